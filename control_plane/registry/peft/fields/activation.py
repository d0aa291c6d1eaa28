"""Activated LoRA (aLoRA): the tokens that a request must have, and what such adapters may change.

The adapter changes the tokens from the last occurrence of its invocation tokens in the prompt on. Those before are the
base model's.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from control_plane.errors import FieldViolation
from control_plane.registry.model.served_modules import ModuleKind
from control_plane.registry.peft.config_fields import show
from control_plane.registry.peft.module_plans import ModulePlan
from control_plane.registry.peft.problems import Problems
from control_plane.registry.peft.safetensors_header import refuse

FIELD = "alora_invocation_tokens"
MAX_TOKENS = 128
_PARTS = {"a", "b", "bias"}  # what PEFT computes for the tokens from the invocation on, and for no others


def read_invocation_tokens(value: Any, vocab_size: int) -> tuple[int, ...]:
    """The field's token ids; none for an adapter that acts on all tokens. Raises InvalidAdapter."""
    if value is None:
        return ()
    if not isinstance(value, list) or not 1 <= len(value) <= MAX_TOKENS:
        raise refuse(FIELD, f"is {show(value)}; a list of 1 to {MAX_TOKENS} token ids is expected, or null")
    for token in value:
        if type(token) is not int or not 0 <= token < vocab_size:
            raise refuse(FIELD, f"has {show(token)}; ids of the base model are 0 to {vocab_size - 1}")
    return tuple(value)


def check_activated(modules: Iterable[ModulePlan], others: Iterable[str], problems: Problems) -> None:
    """Note what an activated adapter cannot change. `others`: names of what it has beside modules."""
    found = sorted({_obstacle(plan) for plan in modules} - {""}) + sorted(others)
    if found:
        problems.add(
            FieldViolation(
                FIELD,
                f"is set, and the adapter has {', '.join(found)}, which cannot act from a token on; train activated "
                "LoRA on linears of the decoder layers, without DoRA",
            )
        )


def _obstacle(plan: ModulePlan) -> str:
    """Why the module cannot act from a token on, in words; empty if it can."""
    if plan.kind is not ModuleKind.LINEAR:
        return _KINDS[plan.kind]
    if plan.has_magnitude:
        return "DoRA magnitudes"
    others = {part.packed_name for part, _ in plan.tensors} - _PARTS
    return "trained biases of the base model" if others else ""


_KINDS = {
    ModuleKind.HEAD: "LoRA on the head",
    ModuleKind.EMBEDDING: "LoRA on the embedding",
    ModuleKind.ROUTER: "LoRA on routers",
    ModuleKind.EXPERT: "LoRA on experts",
}
