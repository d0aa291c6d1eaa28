"""The adapters of one step, applied to one linear or to several fused ones."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from data_plane.adapters.arena.module_groups import ModuleGroups, TableGroup
from data_plane.adapters.arena.rotary import RotaryTables
from data_plane.adapters.arena.slots import SlotTable
from data_plane.adapters.step.expert_rows import ExpertRows, TokenSlots
from data_plane.adapters.step.linear_tokens import LinearTokens
from data_plane.adapters.step.side_stream import SideStream
from data_plane.plan import MAX_ROW_ADAPTERS
from kernels.lora import (
    AdapterSegments,
    Epilogue,
    ModuleGroup,
    add_lora_group,
    lora_embed,
    lora_expand,
    lora_shrink,
    shrinks_apart,
)
from kernels.lora.expansion import Expansion
from kernels.lora.native import LoraTokens, Summed, lora_tokens

# A step's tokens by the first to the fourth adapter whose products are summed, and whose A and B are.
MAX_PASSES = 2 * MAX_ROW_ADAPTERS


class TargetedGroup(NamedTuple):
    """What a step's adapters need at modules of one group that they target."""

    columns: slice  # of the linear's output
    is_whole: bool  # no other columns are there
    group: TableGroup
    max_rank: int
    epilogue: Epilogue | None


@dataclass(frozen=True, slots=True)
class ModuleNeeds:
    """What the adapters of a step need at each target module, in the order of the slot table."""

    max_rank: npt.NDArray[np.int32]  # 0: no adapter of the step targets the module
    has_vectors: npt.NDArray[np.bool_]  # an adapter of the step has a vector there
    max_rank_of_all: int
    # Of rows (first, end) of the table: the greatest rank, and whether there are vectors. All steps of these adapters
    # need them, at each linear.
    _found: dict[tuple[int, int], tuple[int, bool]] = field(default_factory=dict)
    _targeted: dict[tuple[str, ...], list[TargetedGroup]] = field(default_factory=dict)  # by the modules of a linear

    def targeted_groups(self, target_names: tuple[str, ...], groups: ModuleGroups) -> list[TargetedGroup]:
        """The groups of a linear's modules that an adapter targets."""
        found = self._targeted.get(target_names)
        if found is None:
            found, begin, of_names = [], 0, groups.of(target_names)
            for group in of_names:
                columns = slice(begin, begin + sum(group.modules.out_features))
                begin = columns.stop
                max_rank, has_vectors = self.of_rows(group.rows)
                epilogue = group.epilogue if has_vectors else None
                if max_rank:
                    found.append(TargetedGroup(columns, len(of_names) == 1, group, max_rank, epilogue))
            self._targeted[target_names] = found
        return found

    def of_rows(self, rows: slice) -> tuple[int, bool]:
        """The greatest rank at these target modules, 0 if no adapter targets them; whether one has a vector there."""
        key = (rows.start, rows.stop)
        if key not in self._found:
            max_rank = int(self.max_rank[rows].max())
            self._found[key] = (max_rank, max_rank > 0 and bool(self.has_vectors[rows].any()))
        return self._found[key]

    @classmethod
    def of(cls, table: SlotTable, columns: npt.NDArray[np.intp]) -> ModuleNeeds:
        """The needs of the adapters in these columns."""
        slots = table.slot_of_column[columns]
        max_rank = table.host_rank[slots].max(axis=0, initial=0)
        return cls(max_rank, np.logical_or.reduce(table.host_has_vectors[slots]), int(max_rank.max(initial=0)))


@dataclass(frozen=True, slots=True)
class LoraTier:
    """What the adapters of a step are at most, for steps that are recorded before any adapter is known."""

    max_adapters: int
    max_rank: int
    has_vectors: bool = False  # adapters may have DoRA scales or biases
    has_experts: bool = False  # adapters may target experts and routers, not linears alone

    def serves(self, needed: LoraTier) -> bool:
        """Whether adapters that need no more than the other tier fit."""
        return (
            needed.max_adapters <= self.max_adapters
            and needed.max_rank <= self.max_rank
            and (self.has_vectors or not needed.has_vectors)
            and (self.has_experts or not needed.has_experts)
        )

    def needs(self, is_linear: npt.NDArray[np.bool_], is_of_experts: npt.NDArray[np.bool_]) -> ModuleNeeds:
        """At every linear, and at every expert and router where the tier has them. Both are [target modules]."""
        is_served = is_linear | (is_of_experts & self.has_experts)
        ranks = np.where(is_served, self.max_rank, 0).astype(np.int32)
        return ModuleNeeds(ranks, is_served & self.has_vectors, int(ranks.max(initial=0)))


class ShrunkRows:
    """Memory for x @ A, as large as the largest step so far."""

    def __init__(self) -> None:
        self._values = torch.zeros(0)

    def rows(self, num_values: int) -> torch.Tensor:
        """float32 [num_values], the same memory in every step."""
        if len(self._values) < num_values:
            self._values = torch.zeros(num_values)
        return self._values[:num_values]


class Shrunk(NamedTuple):
    """x @ A at modules of one group."""

    targeted: TargetedGroup
    # float32 [planes, modules, T, width] of the tokens' first adapters, of their second and so on. Empty if the
    # A and B of all adapters of the step are summed.
    passes: list[tuple[torch.Tensor, AdapterSegments]]


class LoraStep:
    """What the adapters of one step add, from the arena's pages. Valid until the next step begins or a slot changes.

    Weights are read from the pages when the step is applied, so that a slot that changed meanwhile would add other
    weights. Applying the step after such a change is a mistake of the caller, and asserted.
    """

    def __init__(
        self,
        groups: ModuleGroups,
        table: SlotTable,
        needs: ModuleNeeds,
        passes: Sequence[AdapterSegments],
        linear: LinearTokens | None,
        shrunk: ShrunkRows,
        token_slots: TokenSlots,
        rotations: Sequence[tuple[RotaryTables, torch.Tensor]] = (),
        side: SideStream | None = None,
    ) -> None:
        """passes: the tokens by their first adapter, then by their second and so on; mostly one.

        `rotations`: by tables that are not the model's, the tokens that rotate by them, int64 on the device. `side`:
        where shrinks are queued; None: with everything else.
        """
        self.rotations = rotations
        self._groups = groups
        self._table = table
        self._version = table.version
        self._needs = needs
        self._passes = passes
        self._linear = linear
        self._shrunk = shrunk
        self._token_slots = token_slots
        self._side = side
        self.is_plain = len(passes) == 1 and linear is None  # no token has more than one adapter

    def targets(self, target_name: str) -> bool:
        """Whether an adapter of the step targets the module."""
        (group,) = self._groups.of((target_name,))
        return bool(self._needs.max_rank[group.rows].any())

    def apply(self, target_name: str, x: torch.Tensor, y: torch.Tensor) -> None:
        """y [num_tokens, out] += scaling * (x [num_tokens, in] @ A.T) @ B, in place, by each token's slot.

        With the LoRA bias or the DoRA scale of the slot's adapter, as kernels.lora.Epilogue says.
        Does nothing if no adapter of the step targets the module.
        """
        self.apply_group((target_name,), x, y)

    def apply_group(self, target_names: tuple[str, ...], x: torch.Tensor, y: torch.Tensor) -> None:
        """`apply` for modules that read the same x and write side by side into y [num_tokens, sum of out], in order."""
        self._check_valid()
        groups = self._groups.of(target_names)
        parts = torch.split(y, [sum(group.modules.out_features) for group in groups], dim=1)
        for group, part in zip(groups, parts, strict=True):
            max_rank, epilogue = self._needs_of(group)
            if not max_rank:
                continue
            for segments in self._passes:
                add_lora_group(part, x, group.modules, segments, max_rank=max_rank, epilogue=epilogue)
            if self._linear is not None:
                self._linear.add(group, partial(_shrink, x, group.modules, max_rank), part)

    def shrink(self, target_names: tuple[str, ...], x: torch.Tensor) -> list[Shrunk] | None:
        """Queue x @ A.T of the adapters at these modules, to be given to `expand` once y is there.

        In between nothing may write x. None: the step computes both halves at once, by `apply_group`.
        """
        if not shrinks_apart(x):
            return None
        self._check_valid()
        groups = self._needs.targeted_groups(target_names, self._groups)
        if self._side is None or not groups:
            return self._shrunk_of(groups, x)
        with self._side.forked():
            return self._shrunk_of(groups, x)

    def _shrunk_of(self, groups: Sequence[TargetedGroup], x: torch.Tensor) -> list[Shrunk]:
        return [
            Shrunk(
                targeted, [(_shrink(x, targeted.group.modules, targeted.max_rank, each), each) for each in self._passes]
            )
            for targeted in groups
        ]

    def expand(self, shrunk: Sequence[Shrunk], x: torch.Tensor, y: torch.Tensor) -> Expansion | None:
        """Add what was shrunk of x to y [num_tokens, sum of out].

        One addition to the whole of y may be returned instead: whoever reads y next adds it.
        """
        if not shrunk:
            return None
        if self._side is not None:
            self._side.join()
        targeted, passes = shrunk[0]
        if self.is_plain and targeted.is_whole:
            ((h, segments),) = passes
            return Expansion(y, h, targeted.group.modules, segments, targeted.epilogue)
        for targeted, passes in shrunk:
            part, modules = y[:, targeted.columns], targeted.group.modules
            for h, segments in passes:
                Expansion(part, h, modules, segments, targeted.epilogue).add()
            if self._linear is not None:
                self._linear.add(targeted.group, partial(_shrink, x, modules, targeted.max_rank), part)
        return None

    def embed(self, target_name: str, token_ids: torch.Tensor, y: torch.Tensor, multiplier: float) -> None:
        """`apply` for an embedding, where x @ A.T is the columns of A at token_ids [num_tokens].

        The result is multiplied by `multiplier`, as the model multiplies its embeddings.
        """
        self._check_valid()
        (group,) = self._groups.of((target_name,))
        max_rank, epilogue = self._needs_of(group)
        if not max_rank:
            return

        def shrink(segments: AdapterSegments) -> torch.Tensor:
            h = lora_embed(token_ids, group.modules.module(0), segments, max_rank=max_rank)
            return h.mul_(multiplier) if multiplier != 1.0 else h

        for segments in self._passes:
            lora_expand(shrink(segments), group.modules, y, segments, epilogue=epilogue)
        if self._linear is not None:
            self._linear.add(group, shrink, y)

    def expert_rows(
        self, target_names: tuple[str, ...], expert_ids: torch.Tensor, tokens: torch.Tensor
    ) -> ExpertRows | None:
        """What is added inside a layer's experts, or None if no adapter of the step targets one of the modules.

        Row i is token tokens[i] in expert expert_ids[i], both int64 [rows]. The names stand for all experts.
        """
        self._check_valid()
        groups = [self._groups.of_experts((name,)) for name in target_names]
        if not any(self._needs.max_rank[group.rows].any() for group in groups):
            return None
        num_experts = groups[0].modules.num_slots // self._table.num_slots
        return ExpertRows(self._groups, self._needs_of, self._token_slots.segments(expert_ids, tokens, num_experts))

    def native_tokens(self, num_modules: int) -> LoraTokens:
        """Which token has which adapters, for native ops over groups of up to num_modules modules.

        The list has one entry for each pass, at most MAX_PASSES. The next step overwrites what their h point to.
        """
        self._check_valid()
        passes, linear = list(self._passes), [] if self._linear is None else self._linear.passes
        num_tokens = (passes + linear)[0].num_tokens
        shape = (len(passes) + len(linear) + bool(linear), num_modules, num_tokens, self._needs.max_rank_of_all)
        every_h = self._shrunk.rows(math.prod(shape)).view(shape)
        summed = Summed(every_h[-1], self._table.slot_of_column, self._table.sign_of_column) if linear else None
        following = None
        for index, segments in reversed(list(enumerate(passes + linear))):
            sums = summed if index >= len(passes) else None
            following = lora_tokens(segments, every_h[index], sums, following)
        assert following is not None, "a step has no tokens"
        return following

    def _check_valid(self) -> None:
        assert self._version == self._table.version, "a slot changed after the step began: begin it again"

    def _needs_of(self, group: TableGroup) -> tuple[int, Epilogue | None]:
        """The greatest rank of the group in this step, 0 if no adapter targets it, and what its expand needs."""
        max_rank, has_vectors = self._needs.of_rows(group.rows)
        return max_rank, group.epilogue if has_vectors else None


def _shrink(x: torch.Tensor, modules: ModuleGroup, max_rank: int, segments: AdapterSegments) -> torch.Tensor:
    return lora_shrink(x, modules, segments, max_rank=max_rank)
