"""What the adapters of a step add inside a layer's experts: rows are pairs of a token and one of its experts.

An adapter's weights for an expert are one entry of the slot table. A kernel finds the entry of slot s and expert e of a
projection at e * num_slots + s, as if there were so many slots. So rows are grouped by expert and slot, and one shrink
and one expand serve all of them.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch

from data_plane.adapters.arena.module_groups import ModuleGroups, TableGroup
from kernels.devices import upload
from kernels.lora import AdapterSegments, Epilogue, add_lora_group, grouped_segments, segments_on_host

Needs = Callable[[TableGroup], tuple[int, Epilogue | None]]


class TokenSlots:
    """The slot of each token of a step, int32 [T]: where its rows are grouped."""

    def __init__(
        self, slots: npt.NDArray[np.int32] | torch.Tensor, num_slots: int, device: torch.device | None = None
    ) -> None:
        """`device`: where the slots go when a layer first needs them; None: rows are grouped where the slots are."""
        self._slots = slots
        self._num_slots = num_slots
        self._device = device

    def segments(self, expert_ids: torch.Tensor, tokens: torch.Tensor, num_experts: int) -> AdapterSegments:
        """Rows by expert and slot. expert_ids and tokens are int64 [rows]."""
        if isinstance(self._slots, np.ndarray) and self._device is not None:
            self._slots = upload(self._slots, self._device)
        if isinstance(self._slots, np.ndarray):
            slots = self._slots[tokens.numpy()]
            entries = np.where(slots >= 0, expert_ids.numpy() * self._num_slots + slots, -1).astype(np.int32)
            return segments_on_host(entries, num_experts * self._num_slots)
        chosen = self._slots[tokens]
        entry_ids = torch.where(chosen >= 0, expert_ids * self._num_slots + chosen, -1).to(torch.int32)
        return grouped_segments(entry_ids, num_experts * self._num_slots)


class ExpertRows:
    """The rows of one layer's experts in one step."""

    def __init__(self, groups: ModuleGroups, needs: Needs, segments: AdapterSegments) -> None:
        self._groups = groups
        self._needs = needs
        self._segments = segments

    def targets(self, names: tuple[str, ...]) -> bool:
        """Whether an adapter of the step targets one of these modules of the experts."""
        return self._needs(self._groups.of_experts(names))[0] > 0

    def add(self, names: tuple[str, ...], x: torch.Tensor, y: torch.Tensor) -> None:
        """y [rows, sum of out] += scaling * (x [rows, in] @ A.T) @ B of each row's adapter and expert, in place.

        `names` stand for modules of all experts that read x and write side by side.
        """
        group = self._groups.of_experts(names)
        max_rank, epilogue = self._needs(group)
        if max_rank:
            add_lora_group(y, x, group.modules, self._segments, max_rank=max_rank, epilogue=epilogue)
