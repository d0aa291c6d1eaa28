"""Matches the rows of `lora_config` and `lora_weights` with the base model, row by row.

Called by ingest.py, before any value is packed. Every row that does not fit is noted with its index.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO

import numpy as np
from motet.lora_module_ids import MODULES, LoraModule

from control_plane.errors import FieldViolation, InvalidAdapter
from control_plane.registry.adapter_files import CONFIG_FILE, EXACT_ARRAY, ROWS_ARRAY, WEIGHTS_ARRAY
from control_plane.registry.model.served_modules import ModuleKind
from control_plane.registry.peft.adapter_config import MAX_CONFIG_BYTES, AdapterConfig, read_adapter_config
from control_plane.registry.peft.experts.tensors import names_in_config
from control_plane.registry.peft.kinds.dora import DORA, PART_DORA_SCALE, PART_MAGNITUDE
from control_plane.registry.peft.kinds.lora import LORA, PART_A, PART_B
from control_plane.registry.peft.module_plans import ModulePlan, check_targets
from control_plane.registry.peft.problems import Problems
from control_plane.registry.peft.safetensors_header import ITEMSIZE, refuse
from control_plane.registry.peft.target_modules import TargetModules, layer_of
from control_plane.registry.trtllm.npy_array import NpyArray, read_npy
from control_plane.registry.trtllm.row_modules import RowModules, has_own_a, is_swapped
from control_plane.registry.trtllm.row_source import RowSource, RowTensor

# numpy's words for types; it has no bfloat16, which TensorRT-LLM writes as two bytes without a type.
_FLOATS = {"<f4": ("F32", 4), "<f2": ("F16", 2), "|V2": ("BF16", 2)}
_INTEGERS = {"<i4": ("<i4", 4), "<i8": ("<i8", 8)}
_STEPS = {"|i1": ("I8", 1)}
_READ_BYTES = 1 << 20  # of a row at a time


@dataclass(frozen=True, slots=True)
class AdapterRows:
    """An adapter as it is packed."""

    source: RowSource
    kind: str  # the manifest's word
    modules: list[ModulePlan]  # by name


@dataclass(frozen=True, slots=True)
class _Row:
    """One row of lora_config."""

    index: int
    module: LoraModule
    layer: int
    rank: int
    is_dora: bool

    @property
    def field(self) -> str:
        """The row's name in messages. It has a dot, so that rows with the same problem are one line."""
        return f"{ROWS_ARRAY}[{self.index}]"


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a module of a row has its values."""

    index_of_a: int  # modules that share A: 0
    all_inputs: int  # columns of all As of the row
    first: int  # of B's outputs
    all_outputs: int  # of the row


@contextmanager
def opened_rows(
    files: Mapping[str, Path], targets: TargetModules, max_adapter_bytes: int, problems: Problems
) -> Iterator[AdapterRows]:
    """The adapter in the files, which stay open until the block ends. Raises InvalidAdapter with all that is wrong."""
    with ExitStack() as stack:
        size = sum(path.stat().st_size for path in files.values())
        if size > max_adapter_bytes:
            problems.add(
                FieldViolation(WEIGHTS_ARRAY, f"{size} bytes, limit {max_adapter_bytes}; raise --max-adapter-bytes")
            )
        problems.raise_all()
        config = None
        if CONFIG_FILE in files:
            config = read_adapter_config(
                stack.enter_context(files[CONFIG_FILE].open("rb")).read(MAX_CONFIG_BYTES + 1), problems
            )
            _check_config(config, problems)
        with problems.collected():
            reader = _Reader(
                stack.enter_context(files[WEIGHTS_ARRAY].open("rb")),
                stack.enter_context(files[ROWS_ARRAY].open("rb")),
                stack.enter_context(files[EXACT_ARRAY].open("rb")) if EXACT_ARRAY in files else None,
                config,
                targets,
            )
            rows = reader.read(problems)
        problems.raise_all()
        yield rows


def _check_config(config: AdapterConfig | None, problems: Problems) -> None:
    """Note the fields that say more than rows do."""
    if config is None:
        return
    for name, value in {**config.rope, "alora_invocation_tokens": config.alora_invocation_tokens}.items():
        if value:
            problems.add(FieldViolation(name, "is not served with TensorRT-LLM's rows; register PEFT's files instead"))


class _Reader:
    """The open files of one adapter."""

    def __init__(
        self,
        weights: BinaryIO,
        rows: BinaryIO,
        exact: BinaryIO | None,
        config: AdapterConfig | None,
        targets: TargetModules,
    ) -> None:
        self._weights, self._rows, self._exact = weights, rows, exact
        self._config = config
        self._targets = targets
        self._modules = RowModules(targets)
        self._array = read_npy(weights, WEIGHTS_ARRAY, _FLOATS)
        self._table = read_npy(rows, ROWS_ARRAY, _INTEGERS)
        self._steps = None if exact is None else read_npy(exact, EXACT_ARRAY, _STEPS)

    def read(self, problems: Problems) -> AdapterRows:
        """The modules that the rows change. Notes all that is wrong with them."""
        self._check_shapes()
        taken: dict[str, _Row] = {}
        plans = []
        for values in self._read_table():
            with problems.collected():
                row = self._row(*values)
                if row is None:
                    continue
                for plan in self._plans(row):
                    if (other := taken.get(plan.name)) is not None:
                        raise refuse(
                            row.field, f"changes {plan.name}, as row {other.index} does; leave one of them out"
                        )
                    taken[plan.name] = row
                    plans.append(plan)
        if not plans and not problems:
            problems.add(FieldViolation(ROWS_ARRAY, "has no row that changes the model; the adapter would do nothing"))
        elif self._config is not None:
            found = {plan.name: plan for plan in plans}
            check_targets(self._config, {}, found, self._targets, problems, is_complete=not problems)
        kind = self._config.manifest_kind if self._config is not None else self._kind(plans)
        return AdapterRows(RowSource(self._weights, self._exact), kind, sorted(plans, key=lambda plan: plan.name))

    @staticmethod
    def _kind(plans: Sequence[ModulePlan]) -> str:
        return DORA.name if any(part is PART_DORA_SCALE for plan in plans for part, _ in plan.tensors) else LORA.name

    def _check_shapes(self) -> None:
        table, limit = self._table, 4 * max(len(self._targets.served), len(self._targets.reported)) + 64
        if table.num_columns not in (3, 4):
            raise refuse(
                ROWS_ARRAY, f"has {table.num_columns} columns; module id, layer, rank and the DoRA flag are expected"
            )
        if table.num_rows > limit:
            raise refuse(ROWS_ARRAY, f"has {table.num_rows} rows, limit {limit} for this base model")
        if table.num_rows != self._array.num_rows:
            raise refuse(ROWS_ARRAY, f"has {table.num_rows} rows, {WEIGHTS_ARRAY} has {self._array.num_rows}")
        if self._steps is None:
            return
        if self._config is None:
            raise refuse(EXACT_ARRAY, f"comes without {CONFIG_FILE}; send both, as `motet convert` wrote them, or none")
        if self._steps.num_rows != table.num_rows:
            raise refuse(EXACT_ARRAY, f"has {self._steps.num_rows} rows, {ROWS_ARRAY} has {table.num_rows}")

    def _read_table(self) -> Iterator[tuple[int, list[int]]]:
        self._rows.seek(self._table.start)
        raw = self._rows.read(self._table.num_rows * self._table.num_columns * self._table.itemsize)
        values = np.frombuffer(raw, self._table.dtype).reshape(self._table.num_rows, self._table.num_columns)
        return enumerate(values.tolist())

    def _row(self, index: int, values: Sequence[int]) -> _Row | None:
        """One row, None for a row that only fills the table up. Raises InvalidAdapter."""
        module_id, layer, rank, flag = (*values, 0)[:4]
        field = f"{ROWS_ARRAY}[{index}]"
        if not any(values) and self._is_zero(index, 0):
            return None
        if not 0 <= module_id < len(MODULES):
            raise refuse(field, f"module id {module_id}; the ids are 0 to {len(MODULES) - 1}")
        row = _Row(index, MODULES[module_id], layer, rank, bool(flag))
        if rank < 1:
            raise refuse(field, f"rank {rank} for module id {row.module}; a rank of at least 1 is expected")
        if flag not in (0, 1):
            raise refuse(field, f"DoRA flag {flag}; 0 or 1 is expected")
        # TensorRT-LLM itself writes zeros for those of query, key and value that an adapter does not change.
        if self._config is None and not row.is_dora and self._is_zero(index, 0):
            return None
        if not 0 <= layer < self._modules.num_layers:
            raise refuse(field, f"layer {layer}; the base model's layers are 0 to {self._modules.num_layers - 1}")
        return row

    def _plans(self, row: _Row) -> Iterator[ModulePlan]:
        """The modules that one row changes. Raises InvalidAdapter."""
        try:
            names = self._modules.names(row.module, row.layer)
        except InvalidAdapter as error:
            (violation,) = error.violations
            raise refuse(row.field, f"{violation.field}: {violation.description}") from error
        served = [self._targets.served[name] for name in names]
        in_features, all_outputs = served[0].in_features, sum(module.out_features for module in served)
        all_inputs = in_features * (len(names) if has_own_a(row.module) else 1)
        if row.is_dora and has_own_a(row.module):
            raise refuse(row.field, f"DoRA flag 1 for module id {row.module}; there is no DoRA on experts")
        width = row.rank * (all_inputs + all_outputs) + (all_outputs if row.is_dora else 0)
        needed = (
            f"rank {row.rank} of module id {row.module} with {all_inputs} inputs and {all_outputs} outputs"
            f"{' and DoRA' if row.is_dora else ''} takes {width} values"
        )
        if width > self._array.num_columns:
            raise refuse(row.field, f"{needed}, the rows of {WEIGHTS_ARRAY} have {self._array.num_columns}")
        if not self._is_zero(row.index, width):
            raise refuse(
                row.field, f"{needed}, and the row has more that are not 0; its sizes are those of another model"
            )
        exact = self._exact_part(row, all_outputs)
        first = 0
        for index, (name, module) in enumerate(zip(names, served, strict=True)):
            place = _Place(index if has_own_a(row.module) else 0, all_inputs, first, all_outputs)
            yield self._plan(row, name, place, exact)
            first += module.out_features

    def _exact_part(self, row: _Row, num_outputs: int) -> int | None:
        """Where the exact values of a row begin; None if there are none. Raises InvalidAdapter."""
        if self._steps is None:
            return None
        width = num_outputs * row.rank + (4 * num_outputs if row.is_dora else 0)
        if width > self._steps.num_columns:
            raise refuse(f"{EXACT_ARRAY}[{row.index}]", f"needs {width} bytes, the rows have {self._steps.num_columns}")
        return self._steps.row_start(row.index)

    def _plan(self, row: _Row, name: str, place: _Place, exact: int | None) -> ModulePlan:
        """One module of a row. `exact`: where the row's exact values begin, if there are any."""
        module, config, first, all_outputs = self._targets.served[name], self._config, place.first, place.all_outputs
        in_features, num_outputs = module.in_features, module.out_features
        scaling = self._scaling(row, name)
        start, itemsize = self._array.row_start(row.index), ITEMSIZE[self._array.dtype]
        b_start = start + row.rank * place.all_inputs * itemsize
        shift = num_outputs // 2 if is_swapped(name) else 0
        a = self._tensor(
            row, "A", (row.rank, in_features), start + place.index_of_a * row.rank * in_features * itemsize
        )
        b = self._tensor(row, "B", (num_outputs, row.rank), b_start + first * row.rank * itemsize)
        corrections = None if exact is None else exact + first * row.rank
        b = replace(b, first_row=shift, divisor=scaling, corrections=corrections)
        tensors = [(PART_A, a), (PART_B, b)]
        if row.is_dora and exact is not None:
            begin = exact + all_outputs * row.rank + 4 * first
            magnitude = RowTensor(f"{EXACT_ARRAY}[{row.index}]", "F32", (num_outputs,), begin, 4 * num_outputs)
            tensors.append((PART_MAGNITUDE, replace(magnitude, first_row=shift, is_exact=True)))
        elif row.is_dora:
            begin = b_start + (all_outputs * row.rank + first) * itemsize
            scale = self._tensor(row, "DoRA scale", (num_outputs,), begin)
            tensors.append((PART_DORA_SCALE, replace(scale, first_row=shift)))
        if config is not None and (config.kind is DORA) != row.is_dora:
            raise refuse(row.field, f"DoRA flag {int(row.is_dora)}, but {CONFIG_FILE} says otherwise")
        return ModulePlan(
            name=name,
            tensors=tuple(tensors),
            rank=row.rank,
            scaling=scaling,
            in_features=in_features,
            out_features=num_outputs,
            layer=layer_of(name),
            kind=module.kind,
            base_bias=None,
        )

    def _scaling(self, row: _Row, name: str) -> float:
        """The scaling that the row's B was multiplied by. Raises InvalidAdapter."""
        config = self._config
        if config is None:
            return 1.0
        if config.kind not in (LORA, DORA):
            raise refuse(config.kind.flag, f"is true in {CONFIG_FILE}; rows have no such part, register PEFT's files")
        is_mixture = self._targets.served[name].kind in (ModuleKind.EXPERT, ModuleKind.ROUTER)
        named = names_in_config(name, config) if is_mixture else [name]
        rank = config.rank_of(named[0], num_rows=row.rank)
        if rank != row.rank:
            raise refuse(row.field, f"rank {row.rank}, but {CONFIG_FILE} gives {name} the rank {rank}")
        scaling, *others = {config.scaling_of(each, rank) for each in named}
        if others:
            raise refuse(
                "alpha_pattern",
                f"gives {name} several scalings, under the names {' and '.join(named)}; register PEFT's files instead",
            )
        if scaling == 0:
            raise refuse("lora_alpha", f"gives {name} a scaling of 0; the adapter would change nothing")
        return scaling

    def _tensor(self, row: _Row, part: str, shape: tuple[int, ...], start: int) -> RowTensor:
        size = ITEMSIZE[self._array.dtype]
        for side in shape:
            size *= side
        return RowTensor(f"{WEIGHTS_ARRAY}[{row.index}], {part}", self._array.dtype, shape, start, size)

    def _is_zero(self, index: int, first: int) -> bool:
        """Whether a row of the weights has only zeros from this value on."""
        array: NpyArray = self._array
        position = array.row_start(index) + first * array.itemsize
        end = array.row_start(index + 1)
        self._weights.seek(position)
        while position < end:
            data = self._weights.read(min(_READ_BYTES, end - position))
            if not data or data.count(0) != len(data):
                return False
            position += len(data)
        return True
