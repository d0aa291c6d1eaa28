"""Tokens whose adapters are combined as PEFT's add_weighted_adapter does with combination_type="linear".

There the combined adapter has A = sum of sign * sqrt(|w|) * A_i and B = sum of sqrt(|w|) * B_i, where w is the scale
times the scaling of adapter i. So x @ A is the sum of the adapters' shrinks, and that sum is expanded by each B_i.
Modules that only some of the adapters target are combined of those.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from data_plane.adapters.arena.module_groups import TableGroup
from data_plane.adapters.arena.slots import SlotTable
from data_plane.plan import Int32Array
from kernels.devices import upload
from kernels.lora import AdapterSegments, lora_expand

Shrink = Callable[[AdapterSegments], torch.Tensor]  # float32 [planes, modules, T, width]


@dataclass(frozen=True, slots=True)
class _Member:
    """One adapter of each of the tokens."""

    segments: AdapterSegments
    columns: torch.Tensor  # int64 [T] of the slot table; 0 where the token has no such adapter
    slots: torch.Tensor  # int64 [T]: the slots that the columns scale
    sign: torch.Tensor  # float32 [T] of the scale; 0 where the token has no such adapter


class LinearTokens:
    """The tokens of one step whose adapters' A and B are summed."""

    def __init__(self, table: SlotTable, members: Sequence[_Member]) -> None:
        self._table = table
        self._members = members

    @property
    def passes(self) -> list[AdapterSegments]:
        """The tokens by their first adapter, then by their second and so on."""
        return [member.segments for member in self._members]

    @classmethod
    def of(cls, table: SlotTable, columns: Sequence[Int32Array], segments: Sequence[AdapterSegments]) -> LinearTokens:
        """columns int32 [T] of each member, -1 for none; segments of the same."""
        members = []
        for each, its_segments in zip(columns, segments, strict=True):
            used = each.clip(min=0)
            sign = table.sign_of_column[used] * (each >= 0)
            slots = table.slot_of_column[used]
            tensors = (upload(array, table.pages.device) for array in (used, slots, sign))
            at, slot, signs = tensors
            members.append(_Member(its_segments, at.long(), slot.long(), signs))
        return cls(table, members)

    def add(self, group: TableGroup, shrink: Shrink, y: torch.Tensor) -> None:
        """y [T, sum of out] += the combined adapters' product at the modules of the group. Other tokens stay."""
        summed: torch.Tensor | None = None
        for member in self._members:
            h = shrink(member.segments).sum(0)
            ranks, scaling = group.modules.rank[:, member.columns], group.modules.scaling[:, member.columns]
            factor = scaling * member.sign * _sign(group.modules.scaling[:, member.slots])
            # What a shrink leaves unset is not read.
            is_set = torch.arange(h.shape[-1], device=h.device) < (ranks * (member.sign != 0))[..., None]
            part = torch.where(is_set, h, 0.0) * factor[..., None]
            summed = part if summed is None else summed.add_(part)
        assert summed is not None, "a combination has no adapters"
        planes = summed[None].contiguous()
        for member in self._members:
            lora_expand(planes, group.modules, y, member.segments)


def _sign(values: torch.Tensor) -> torch.Tensor:
    return torch.where(values < 0, -1.0, 1.0)
