"""The kinds of adapters that a worker serves, one file each.

A new kind is a file here, a line in KINDS and, if its arithmetic is new, a kernel. The control plane has the same kinds
in control_plane/registry/peft/kinds; tests/contract/test_adapter_kinds.py compares the two.
"""

from __future__ import annotations

from collections.abc import Iterable

from data_plane.adapters.kinds.adapter_kind import AdapterKind
from data_plane.adapters.kinds.base_bias import BaseBias, DoraWithBaseBias, LoraWithBaseBias, LoraWithBiases
from data_plane.adapters.kinds.dora import Dora, NormalisedDora
from data_plane.adapters.kinds.lora import Lora, LoraWithBias

KINDS: tuple[AdapterKind, ...] = (
    Lora(),
    LoraWithBias(),
    Dora(),
    NormalisedDora(),
    BaseBias(),
    LoraWithBaseBias(),
    LoraWithBiases(),
    DoraWithBaseBias(),
)
MANIFEST_WORDS = tuple(dict.fromkeys(prefix + kind.name for kind in KINDS for prefix in ("", "rs")))

_BY_PARTS = {frozenset(part.name for part in kind.parts): kind for kind in KINDS}
assert len(_BY_PARTS) == len(KINDS), "two kinds have the same parts"


def kind_with(part_names: Iterable[str]) -> AdapterKind:
    """The kind whose modules have exactly these parts. Raises ValueError if there is none."""
    names = frozenset(part_names)
    if names not in _BY_PARTS:
        known = "; ".join(", ".join(sorted(parts)) for parts in _BY_PARTS)
        raise ValueError(f"has the tensors {', '.join(sorted(names))}: no kind of adapter has those, only {known}")
    return _BY_PARTS[names]
