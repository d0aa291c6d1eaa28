"""The kinds of adapters that can be registered, one file each. A new kind is its file and its line in KINDS here; what
a worker does with it is data_plane/adapters/kinds."""

from __future__ import annotations

from collections.abc import Collection

from control_plane.registry.peft.kinds.adapter_kind import AdapterKind, Part
from control_plane.registry.peft.kinds.dora import DORA
from control_plane.registry.peft.kinds.lora import LORA, LORA_WITH_BIAS
from control_plane.registry.peft.safetensors_header import refuse

KINDS = (LORA, DORA, LORA_WITH_BIAS)  # LORA first: it is the kind where no flag is true
FLAGS = tuple(kind.flag for kind in KINDS if kind.flag)


def kind_with(flags: Collection[str]) -> AdapterKind:
    """The kind whose flag is among those that are true in a configuration. Raises InvalidAdapter if two are."""
    found = [kind for kind in KINDS if kind.flag in flags]
    if len(found) > 1:
        raise refuse(
            found[1].flag, f"is true beside {found[0].flag}, and PEFT has no such adapter; train one of the two"
        )
    return found[0] if found else LORA


def parts_of_all_kinds(*, is_embedding: bool) -> dict[str, Part]:
    """Every part that a target module can have, by name."""
    return {part.name: part for kind in KINDS for part in kind.parts_of(is_embedding=is_embedding)}
