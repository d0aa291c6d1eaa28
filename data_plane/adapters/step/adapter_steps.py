"""Begins steps over the arena: the adapters of a step's tokens, and what they need at each linear.

Called by the engine on the compute thread.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from data_plane.adapters.arena.adapter_arena import AdapterArena
from data_plane.adapters.arena.rotary import RotaryTables
from data_plane.adapters.step.expert_rows import TokenSlots
from data_plane.adapters.step.further_columns import FurtherColumns
from data_plane.adapters.step.linear_tokens import LinearTokens
from data_plane.adapters.step.lora_step import LoraStep, LoraTier, ModuleNeeds, ShrunkRows
from data_plane.adapters.step.row_step import RowStep
from data_plane.adapters.step.side_stream import SideStream
from data_plane.errors import StaleSlot
from data_plane.plan import TargetKind
from kernels.devices import runs_triton, upload
from kernels.lora import AdapterSegments, adapter_segments, segments_on_host


class AdapterSteps:
    """The steps of one arena. A step is valid until the next one begins or the arena evicts an adapter."""

    def __init__(self, arena: AdapterArena, side: SideStream | None = None) -> None:
        """`side`: where recorded steps queue their shrinks; None: with everything else. Other steps do not use it: the
        host limits them, and a second stream would add to its work."""
        self._arena = arena
        self._side = side
        self._table = arena.table
        self._heads = np.flatnonzero([target.kind is TargetKind.HEAD for target in arena.table.targets])
        kinds = [target.kind for target in arena.table.targets]
        self._is_linear = np.array([kind is TargetKind.LINEAR for kind in kinds], dtype=np.bool_)
        self._is_of_experts = np.array(
            [kind in (TargetKind.EXPERT, TargetKind.ROUTER) for kind in kinds], dtype=np.bool_
        )
        self._num_slots = arena.table.num_slots
        pages = arena.table.pages
        self._device = pages.device
        self._segments_on_host = pages.device.type == "cpu" and not runs_triton(pages)
        self._shrunk = ShrunkRows()
        # Segments of the tokens that were grouped last: steady steps group the same ones, the head those of the layers.
        self._last_segments: tuple[tuple[int, bytes], AdapterSegments] | None = None
        self._last_there: tuple[bytes, torch.Tensor] | None = None  # slots of tokens that went to the device last
        # Key: the table's version and the slots. Most steps have the slots of the step before.
        self._needs: tuple[tuple[int, bytes], ModuleNeeds] | None = None

    def begin(
        self, token_slots: torch.Tensor, slots_in_step: Sequence[int], further: FurtherColumns | None = None
    ) -> LoraStep | None:
        """What the step's linears add, or None if no token has an adapter.

        token_slots is int32 [num_tokens] on the host, -1 for no adapter; slots_in_step names each slot in it and in
        `further`. Slots are columns of the slot table. Raises StaleSlot for a slot that is not ready.
        """
        if self._arena.unlisted:
            self._arena.list_published()
        if not slots_in_step:
            return None
        slots = np.asarray(slots_in_step)
        self._arena.check_ready(self._table.slot_of_column[slots])
        host_slots = token_slots.numpy()
        every = host_slots if further is None else np.concatenate([host_slots, *further.every])
        if not np.isin(every, [-1, *slots_in_step]).all():
            unnamed = sorted(set(every.tolist()).difference(slots_in_step) - {-1})
            raise StaleSlot(f"tokens name the slots {unnamed}, the step does not")
        if (every < 0).all():
            return None
        needs = self._needs_of(slots)
        return self._step(needs, host_slots, further) if needs.max_rank_of_all or self._table.rotations else None

    def tier_of(self, slots: npt.NDArray[np.intp]) -> LoraTier | None:
        """What a recorded step needs to serve tokens with these adapters, which are distinct and at least one.

        None if no recorded step can serve them: adapters are combined or scaled, rotate by tables of their own, replace
        rows, or change other modules than linears, experts and routers.
        """
        if self._arena.unlisted:
            self._arena.list_published()
        table = self._table
        if (slots >= self._num_slots).any() or table.rows.host_has_rows[slots].any():
            return None
        if not table.rotations.keys().isdisjoint(slots.tolist()):
            return None
        self._arena.check_ready(slots)
        needs = self._needs_of(slots)
        if needs.max_rank[~(self._is_linear | self._is_of_experts)].any():
            return None
        has_experts = bool(needs.max_rank[self._is_of_experts].any())
        return LoraTier(len(slots), needs.max_rank_of_all, bool(needs.has_vectors.any()), has_experts)

    def begin_tier(self, token_slots: torch.Tensor, tier: LoraTier) -> LoraStep:
        """What a step adds whose adapters the tier serves. token_slots is int32 [n] on the device."""
        segments = adapter_segments(token_slots, self._num_slots, num_groups=tier.max_adapters)
        needs = tier.needs(self._is_linear, self._is_of_experts)
        slots = TokenSlots(token_slots, self._num_slots)
        groups, table = self._arena.groups, self._table
        return LoraStep(groups, table, needs, [segments], None, self._shrunk, slots, side=self._side)

    def begin_head(self, row_slots: torch.Tensor, further: FurtherColumns | None = None) -> LoraStep | None:
        """What the head adds in the step that began last, or None if no adapter of its rows targets the head.

        row_slots is int32 [num_rows] on the host: the slots of the tokens whose logits are kept.
        """
        host_slots = row_slots.numpy()
        every = host_slots if further is None else np.concatenate([host_slots, *further.every])
        slots = every[every >= 0]
        if not self._table.host_rank[self._table.slot_of_column[slots][:, None], self._heads].any():
            return None
        return self._step(ModuleNeeds.of(self._table, slots), host_slots, further)

    def begin_rows(self, token_slots: torch.Tensor) -> RowStep | None:
        """The rows of embedding or head that adapters replace in the step that began last; None: they replace none.

        token_slots is int32 [n] on the host: of the step's tokens, or of those whose logits are kept. Adapters with a
        scale or beside others replace none.
        """
        host_slots = token_slots.numpy()
        slots = np.unique(host_slots[(host_slots >= 0) & (host_slots < self._num_slots)])
        slots = slots[self._table.rows.host_has_rows[slots]]
        if len(slots) == 0:
            return None
        alone = np.where(host_slots < self._num_slots, host_slots, -1).astype(np.int32)
        segments = self._segments(alone)
        return RowStep(self._table.rows, self._there(alone), segments, slots.tolist())

    def _step(self, needs: ModuleNeeds, token_slots: npt.NDArray[np.int32], further: FurtherColumns | None) -> LoraStep:
        # The rows of experts have the first adapter of their tokens: an adapter on experts is not combined, or scaled.
        alone = np.where(token_slots < self._num_slots, token_slots, -1).astype(np.int32)
        slots = TokenSlots(alone, self._num_slots, None if self._segments_on_host else self._device)
        passes, linear = [token_slots], None
        if further is not None:
            passes = [columns for columns in (token_slots, *further.products) if (columns >= 0).any()]
        if further is not None and further.linear:
            linear = LinearTokens.of(self._table, further.linear, [self._segments(each) for each in further.linear])
        segments = [self._segments(columns) for columns in passes]
        rotations = self._rotations(token_slots)
        return LoraStep(self._arena.groups, self._table, needs, segments, linear, self._shrunk, slots, rotations)

    def _segments(self, token_slots: npt.NDArray[np.int32]) -> AdapterSegments:
        # Columns of scales lie after those of the slots: most steps need not look at them.
        has_scales = bool((token_slots >= self._num_slots).any())
        num_slots = self._table.num_columns if has_scales else self._num_slots
        if self._segments_on_host:
            return segments_on_host(token_slots, num_slots)
        key = num_slots, token_slots.tobytes()
        if self._last_segments is None or self._last_segments[0] != key:
            num_groups = len(np.unique(token_slots[(token_slots >= 0) & (token_slots < num_slots)]))
            segments = adapter_segments(self._there(token_slots), num_slots, num_groups=num_groups)
            self._last_segments = key, segments
        return self._last_segments[1]

    def _there(self, token_slots: npt.NDArray[np.int32]) -> torch.Tensor:
        key = token_slots.tobytes()
        if self._last_there is None or self._last_there[0] != key:
            self._last_there = key, upload(token_slots, self._device)
        return self._last_there[1]

    def _rotations(self, token_slots: npt.NDArray[np.int32]) -> list[tuple[RotaryTables, torch.Tensor]]:
        if not self._table.rotations:
            return []
        in_slots = np.where(token_slots >= 0, self._table.slot_of_column[token_slots], -1)
        slots_by_tables: dict[RotaryTables, list[int]] = {}
        for slot, tables in self._table.rotations.items():
            slots_by_tables.setdefault(tables, []).append(slot)
        found = [(tables, np.flatnonzero(np.isin(in_slots, slots))) for tables, slots in slots_by_tables.items()]
        return [(tables, upload(tokens, self._device)) for tables, tokens in found if len(tokens)]

    def _needs_of(self, slots: npt.NDArray[np.intp]) -> ModuleNeeds:
        key = (self._table.version, slots.tobytes())
        if self._needs is None or self._needs[0] != key:
            self._needs = (key, ModuleNeeds.of(self._table, slots))
        return self._needs[1]
