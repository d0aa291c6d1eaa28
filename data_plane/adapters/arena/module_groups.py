"""Modules that one shrink and one expand serve together: views of the slot table, made once per fused linear."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from contract.expert_names import ANY, of_all, of_expert
from data_plane.adapters.arena.slots import SlotTable
from data_plane.adapters.kinds.base_weights import BaseWeights
from data_plane.plan import TargetModule
from kernels.lora import VECTOR_TABLES, Epilogue, ModuleGroup


@dataclass(frozen=True, slots=True)
class TableGroup:
    """Target modules that lie side by side in the slot table."""

    rows: slice  # of the table
    modules: ModuleGroup
    epilogue: (
        Epilogue  # for steps in which an adapter has vectors here; has every table, so that one kernel is compiled
    )


class ModuleGroups:
    """The groups of one arena. Their tensors are views that the slot table keeps up to date."""

    def __init__(self, targets: Sequence[TargetModule], table: SlotTable, base: BaseWeights) -> None:
        self._targets = {target.name: (index, target) for index, target in enumerate(targets)}
        self._table = table
        self._base = base
        self._groups: dict[tuple[str, ...], list[TableGroup]] = {}
        self._num_experts = Counter(all_name for target in targets if ANY in (all_name := of_all(target.name)))
        self._expert_groups: dict[tuple[str, ...], TableGroup] = {}

    def of(self, names: tuple[str, ...]) -> list[TableGroup]:
        """The target modules in this order as groups: one group if the model lists them so.

        Most models list q, k and v next to each other, and so gate and up. Others become several groups.
        """
        if names not in self._groups:
            runs: list[list[str]] = []
            for name in names:
                is_next = bool(runs) and self._targets[name][0] == self._targets[runs[-1][-1]][0] + 1
                runs[-1:] = [[*runs[-1], name]] if is_next else [*runs[-1:], [name]]
            self._groups[names] = [self._group(tuple(run)) for run in runs]
        return self._groups[names]

    def of_experts(self, names: tuple[str, ...]) -> TableGroup:
        """Modules of all experts of a layer, by names that stand for all of them, as one group.

        Its kernels see num_experts * num_slots slots: expert e of slot s is entry e * num_slots + s. The table lists
        the experts of each name in order, and the names one after the other.
        """
        if names not in self._expert_groups:
            num_experts = self._num_experts[names[0]]
            each = [of_expert(name, expert) for name in names for expert in range(num_experts)]
            found = self._group(tuple(each))
            table, epilogue, shape = found.modules, found.epilogue, (len(names), -1)
            assert epilogue.base_bias is None, f"{names} have a bias of the base, and DoRA needs one for each expert"
            modules = replace(
                table,
                first=table.first.view(shape),
                rank=table.rank.view(shape),
                scaling=table.scaling.view(shape),
                out_features=table.out_features[::num_experts],
            )
            vectors = {name: getattr(epilogue, name).view(shape) for name in VECTOR_TABLES}
            self._expert_groups[names] = TableGroup(found.rows, modules, replace(epilogue, **vectors))
        return self._expert_groups[names]

    def _group(self, names: tuple[str, ...]) -> TableGroup:
        targets = [self._targets[name][1] for name in names]
        group, epilogue = self._table.group(targets)
        biases = [self._base.bias(name) for name in names]
        if any(bias is not None for bias in biases):
            device = group.pages.device
            parts = [
                torch.zeros(target.out_features, device=device) if bias is None else bias.float()
                for target, bias in zip(targets, biases, strict=True)
            ]
            epilogue = replace(epilogue, base_bias=torch.cat(parts))
        first = self._targets[names[0]][0]
        return TableGroup(slice(first, first + len(names)), group, epilogue)
