"""From which token of a prompt on an activated adapter (aLoRA) acts."""

from __future__ import annotations

from collections.abc import Sequence

from control_plane.checks import refuse
from control_plane.registry.records import ResolvedAdapter
from control_plane.registry.versions.invocation import last_occurrence

_MAX_SHOWN = 16


def active_from(prompt: Sequence[int], resolved: Sequence[ResolvedAdapter], input_field: str) -> int:
    """Tokens of the prompt before the last occurrence of the adapter's invocation tokens; 0: it acts on all.

    Raises InvalidRequest for a prompt without them: it would get the base model's tokens. Combinations have no
    activated adapters (adapter_uses.py).
    """
    tokens = resolved[0].version.alora_invocation_tokens if len(resolved) == 1 else ()
    if not tokens:
        return 0
    start = last_occurrence(prompt, tokens)
    if start is None:
        shown = f"{', '.join(map(str, tokens[:_MAX_SHOWN]))}{', ...' if len(tokens) > _MAX_SHOWN else ''}"
        raise refuse(
            input_field,
            f"lacks the invocation tokens of adapter {resolved[0].adapter_id!r}, {len(tokens)} in all: {shown}; the "
            "adapter acts from these on. End the prompt with the text that it was trained to follow, or send token_ids "
            "that have them in a row",
        )
    return start
