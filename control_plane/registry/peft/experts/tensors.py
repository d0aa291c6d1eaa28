"""Brings the tensors of experts and routers, in whatever form an adapter has them, to one form: two for each product of
each expert, under the names of contract/expert_names.py.

| form | names of the modules in the file |
|---|---|
| fused: `target_parameters` on stacked parameters | `experts.base_layer` and `experts`: PEFT wraps the module twice |
| one by one | `experts.3.gate_proj`, of Mixtral `block_sparse_moe.experts.3.w1` |

PEFT's fused A is [experts * rank, in], the ranks of an expert side by side. B is [out, rank * experts], the experts of
a rank side by side; out is that of gate and up together. A copy of each B is written in which every expert's columns
are side by side, so that reading an expert's part costs its own bytes.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import BinaryIO, cast

import numpy as np

from contract.expert_names import ANY, DOWN, GATE, PROJECTIONS, UP, of_all, of_expert
from control_plane.errors import FieldViolation
from control_plane.registry.model.served_modules import ModuleKind, ServedModule
from control_plane.registry.peft.adapter_config import AdapterConfig
from control_plane.registry.peft.experts.paths import ExpertPath, expert_path, router_path
from control_plane.registry.peft.problems import Problems
from control_plane.registry.peft.safetensors_header import CHECK_BASE, FIELD, ITEMSIZE, TensorEntry, refuse, shorten
from control_plane.registry.peft.target_modules import TargetModules

KEY_PREFIX = "base_model.model."
_A, _B = ".lora_A.weight", ".lora_B.weight"
_GATE_UP = "gate_up_proj"
_STACKED = (_GATE_UP, DOWN)  # parameters in the order in which PEFT wraps them, the first one innermost
_MIXTURE_KINDS = (ModuleKind.EXPERT, ModuleKind.ROUTER)
_BLOCK_BYTES = 4 << 20  # of B that are put in order at a time


@dataclass(frozen=True)
class ExpertTensors:
    """An adapter's tensors in one form."""

    source: BinaryIO  # what the entries' positions are in
    entries: dict[str, TensorEntry]
    names: dict[str, str]  # by module: its name in the configuration, where that is another one
    has_bad_names: bool  # some tensors were left out, and noted


def expert_tensors(
    file: BinaryIO,
    entries: Mapping[str, TensorEntry],
    config: AdapterConfig | None,
    targets: TargetModules,
    ordered: BinaryIO,
    problems: Problems,
    check: Callable[[], None],
) -> ExpertTensors:
    """The tensors with those of experts and routers renamed and taken apart. Notes what does not fit.

    `ordered` is an empty file, which takes as many bytes as all fused B have.
    """
    reader = _Reader(file, config, targets, ordered, check)
    with_names: dict[str, TensorEntry] = {}
    fused: dict[str, dict[str, TensorEntry]] = {}  # by path of the experts: "inner" or "" and the part of the name
    has_bad_names = False
    for key, entry in entries.items():
        path = expert_path(key, KEY_PREFIX)
        if path is None:
            key, entry = reader.of_router(key, entry)
            with_names[key] = entry
            continue
        has_problem = True
        with problems.collected():
            path = reader.known(path, key)
            if path.expert is None:
                fused.setdefault(path.experts, {})[path.level + path.suffix] = entry
            else:
                for name, part in reader.one_by_one(path, entry):
                    if name in with_names:
                        raise refuse(shorten(key), f"appears twice (also as {shorten(with_names[name].name)})")
                    with_names[name] = part
            has_problem = False
        has_bad_names |= has_problem
    for experts, found in fused.items():
        has_problem = True
        with problems.collected():
            with_names |= reader.taken_apart(experts, found)
            has_problem = config is None
        has_bad_names |= has_problem
    return ExpertTensors(reader.source(), with_names, reader.names, has_bad_names)


class _Reader:
    """Takes the tensors of one adapter apart."""

    def __init__(
        self,
        file: BinaryIO,
        config: AdapterConfig | None,
        targets: TargetModules,
        ordered: BinaryIO,
        check: Callable[[], None],
    ) -> None:
        self._file = file
        self._config = config
        self._targets = targets
        self._ordered = ordered  # every B in order
        self._check = check
        self._size = file.seek(0, io.SEEK_END)
        self.names: dict[str, str] = {}

    def source(self) -> BinaryIO:
        """The adapter's file, and the ordered copies after its end."""
        if not self._ordered.seek(0, io.SEEK_END):
            return self._file
        return cast(BinaryIO, _JoinedFiles(self._file, self._size, self._ordered))

    def of_router(self, key: str, entry: TensorEntry) -> tuple[str, TensorEntry]:
        """The tensor under the name that its router has in the base model; any other tensor as it is."""
        router = router_path(key, KEY_PREFIX)
        served = None if router is None else self._targets.served.get(router.module)
        if router is None or served is None or served.kind is not ModuleKind.ROUTER:
            return key, entry
        weight = f"{router.module}.weight"
        is_parameter = self._config is not None and self._config.targets_parameter(weight)
        self.names[router.module] = weight if is_parameter else router.named
        return _renamed(entry, router.module + router.suffix)

    def known(self, path: ExpertPath, key: str) -> ExpertPath:
        """The path under the base model's name. Raises InvalidAdapter for experts that are not served."""
        experts = path.experts
        module = self._targets.experts.get(f"{experts}.{ANY}.{DOWN}")
        if module is None:
            raise refuse(shorten(key), self._targets.refusal(shorten(experts)))
        if path.expert is not None and path.expert >= module.num_experts:
            raise refuse(
                shorten(key),
                f"the base model has {module.num_experts} experts here, 0 to {module.num_experts - 1}; {CHECK_BASE}",
            )
        return path

    def one_by_one(self, path: ExpertPath, entry: TensorEntry) -> Iterator[tuple[str, TensorEntry]]:
        """The tensor of one expert: as it is, or one each for gate and up where these are one module."""
        assert path.expert is not None, "a fused tensor"
        for part in (GATE, UP) if path.part == _GATE_UP else (path.part,):
            module = f"{path.experts}.{path.expert}.{part}"
            self.names[module] = path.named
            served = self._targets.served[module]
            if served.is_interleaved and path.suffix not in (_A, _B):
                raise refuse(
                    shorten(entry.name), "belongs to an expert with biases, and only lora_A and lora_B are served there"
                )
            found = entry
            if path.part == _GATE_UP and path.suffix == _B:
                found = self._rows_of(entry, part, served)
            yield _renamed(found, module + path.suffix)

    def _rows_of(self, entry: TensorEntry, part: str, served: ServedModule) -> TensorEntry:
        """Gate's or up's rows of one expert's B [out of both, rank]."""
        if len(entry.shape) != 2 or entry.shape[0] != 2 * served.out_features:
            raise refuse(shorten(entry.name), f"shape {list(entry.shape)}, expected [{2 * served.out_features}, rank]")
        return self._in_order(entry, 1, 2, is_interleaved=served.is_interleaved)[0, int(part == UP)]

    def taken_apart(self, experts: str, found: Mapping[str, TensorEntry]) -> dict[str, TensorEntry]:
        """Every expert's tensors of the fused tensors of a layer, by name."""
        if self._config is None:
            return {}
        named = [part for part in _STACKED if self._config.targets_parameter(f"{experts}.{part}")]
        levels = [level for level in ("base_layer", "") if level + _A in found or level + _B in found]
        if len(named) != len(levels) or any(name.rpartition(".lora_")[0] not in levels for name in found):
            raise refuse(
                "target_parameters",
                f"names {' and '.join(named) or 'none'} of {shorten(experts)}, and the file has tensors of "
                f"{len(levels)}; list the stacked parameters that the adapter was trained on",
            )
        result: dict[str, TensorEntry] = {}
        for part, level in zip(named, levels, strict=True):
            a, b = (found.get(level + suffix) for suffix in (_A, _B))
            if a is None or b is None:
                missing = (_A if a is None else _B).removesuffix(".weight")
                raise refuse(
                    f"{shorten(experts)}.{part}{missing}", "is missing, its counterpart is there; save it again"
                )
            result |= self._of_parameter(experts, part, a, b)
        return result

    def _of_parameter(self, experts: str, part: str, a: TensorEntry, b: TensorEntry) -> dict[str, TensorEntry]:
        projections = (GATE, UP) if part == _GATE_UP else (DOWN,)
        served = self._targets.experts[f"{experts}.{ANY}.{projections[0]}"]
        num_experts, parameter = served.num_experts, f"{experts}.{part}"
        out_features = served.out_features * len(projections)
        self._check_shapes(parameter, a, b, served, out_features)
        rank = a.shape[0] // num_experts
        columns = self._in_order(
            b, num_experts, len(projections), is_interleaved=served.is_interleaved and part == _GATE_UP
        )
        result: dict[str, TensorEntry] = {}
        size = rank * a.shape[1] * ITEMSIZE[a.dtype]
        for index, projection in enumerate(projections):
            for expert in range(num_experts):
                module = of_expert(f"{experts}.{ANY}.{projection}", expert)
                self.names[module] = parameter
                own = replace(a, shape=(rank, a.shape[1]), start=a.start + expert * size, size_bytes=size)
                result |= dict([_renamed(own, module + _A), _renamed(columns[expert, index], module + _B)])
        return result

    def _check_shapes(
        self, parameter: str, a: TensorEntry, b: TensorEntry, served: ServedModule, out_features: int
    ) -> None:
        assert self._config is not None, "the tensors of a configuration that cannot be read are not taken apart"
        num_experts, in_features = served.num_experts, served.in_features
        rows = a.shape[0]
        rank = self._config.rank_of(parameter, num_rows=max(rows // num_experts, 1))
        expected = ((num_experts * rank, in_features), (out_features, num_experts * rank))
        if (a.shape, b.shape) == expected:
            return
        if a.shape != (rows, in_features) and (a.shape, b.shape) == ((rows, out_features), (in_features, rows)):
            raise refuse(
                shorten(parameter),
                "has the inputs of the layer in lora_B and its outputs in lora_A, as early versions of PEFT wrote "
                "them, and PEFT does not load that any more; train it again with a later version",
            )
        wrong = 0 if a.shape != expected[0] else 1
        raise refuse(
            f"{shorten(parameter)}.{('lora_A', 'lora_B')[wrong]}",
            f"shape {list((a, b)[wrong].shape)}, expected {list(expected[wrong])} ({num_experts} experts and rank "
            f"{rank} by the config, {out_features} x {in_features} of the base model)",
        )

    def _in_order(
        self, b: TensorEntry, num_experts: int, num_parts: int, *, is_interleaved: bool
    ) -> dict[tuple[int, int], TensorEntry]:
        """B's columns by expert and its rows by part (gate, up), each [out of the part, rank] in one piece."""
        out_features, rank = b.shape[0] // num_parts, b.shape[1] // num_experts
        itemsize = ITEMSIZE[b.dtype]
        begin, size = self._ordered.seek(0, io.SEEK_END), out_features * rank * itemsize
        row_bytes = b.shape[1] * itemsize
        rows_at_once = max(_BLOCK_BYTES // row_bytes // num_parts, 1)
        for row in range(0, out_features, rows_at_once):
            self._check()
            count = min(rows_at_once, out_features - row)
            for part in range(num_parts):
                rows = self._rows(b, row_bytes, row, count, part, num_parts, is_interleaved=is_interleaved)
                values = np.frombuffer(rows, dtype=f"V{itemsize}").reshape(count, rank, num_experts)
                for expert in range(num_experts):
                    self._ordered.seek(begin + (expert * num_parts + part) * size + row * rank * itemsize)
                    self._ordered.write(np.ascontiguousarray(values[:, :, expert]).tobytes())
        return {
            (expert, part): replace(
                b,
                shape=(out_features, rank),
                start=self._size + begin + (expert * num_parts + part) * size,
                size_bytes=size,
            )
            for expert in range(num_experts)
            for part in range(num_parts)
        }

    def _rows(
        self, b: TensorEntry, row_bytes: int, row: int, count: int, part: int, num_parts: int, *, is_interleaved: bool
    ) -> bytes:
        """`count` rows of a part from its `row`th on."""
        out_features = b.shape[0] // num_parts
        if not is_interleaved:
            return self._read(b.start + (part * out_features + row) * row_bytes, count * row_bytes)
        both = self._read(b.start + row * num_parts * row_bytes, count * num_parts * row_bytes)
        return np.frombuffer(both, dtype=np.uint8).reshape(count, num_parts, row_bytes)[:, part].tobytes()

    def _read(self, start: int, size: int) -> bytes:
        self._file.seek(start)
        raw = self._file.read(size)
        if len(raw) != size:
            raise refuse(FIELD, "became shorter while it was read; send it again")
        return raw


class _JoinedFiles(io.RawIOBase):
    """Reads one file and, from the position `size` on, another one."""

    def __init__(self, first: BinaryIO, size: int, second: BinaryIO) -> None:
        self._first = first
        self._size = size
        self._second = second
        self._position = 0

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """From the start only."""
        assert whence == io.SEEK_SET, "no tensor is looked for from the end"
        self._position = offset
        return offset

    def read(self, size: int = -1) -> bytes:
        """Bytes of the file that the position is in."""
        file, start = (self._first, 0) if self._position < self._size else (self._second, self._size)
        file.seek(self._position - start)
        data = file.read(size)
        self._position += len(data)
        return data


def missing_experts(
    found: Mapping[str, object], config: AdapterConfig, targets: TargetModules, names: Mapping[str, str]
) -> Iterator[FieldViolation]:
    """Experts and routers that the configuration names and that have no tensors.

    Where none has any, `target_modules` does not mean them: another version of transformers had no such modules.
    """
    stacked = {
        name: f"{experts.removesuffix(ANY)}{DOWN if part == DOWN else _GATE_UP}"
        for name in targets.experts
        for experts, _, part in [name.rpartition(".")]
    }
    weights = {f"{name}.weight": name for name, module in targets.served.items() if module.kind is ModuleKind.ROUTER}
    named = {parameter for parameter in (*stacked.values(), *weights) if config.targets_parameter(parameter)}
    if config.target_parameters and targets.reported and not named:
        yield FieldViolation(
            "target_parameters",
            f"names {shorten(min(config.target_parameters))} and nothing that takes adapters here: these are stacked "
            "parameters of experts and weights of routers; for the weight of a linear, train with target_modules",
        )
    present = {stacked[of_all(name)] for name in found if of_all(name) in stacked} | {
        weight for weight, name in weights.items() if name in found
    }
    for parameter in sorted(named - present):
        yield FieldViolation(f"{parameter}.lora_A", "is missing, target_parameters names it; save the adapter again")
    in_mixtures = {name for name, module in targets.served.items() if module.kind in _MIXTURE_KINDS}
    sorts = {_sort(name, targets) for name in found if name in in_mixtures and names.get(name) not in named}
    for name in sorted(in_mixtures - found.keys()) if not config.targets.has_expression else ():
        if _sort(name, targets) in sorts and is_named(name, names, config):
            yield FieldViolation(f"{name}.lora_A", "is missing, the configuration names its module; save it again")


def is_named(name: str, names: Mapping[str, str], config: AdapterConfig) -> bool:
    """Whether the configuration names an expert's module or a router, under one of its names."""
    own = names.get(name)
    possible = [own] if own is not None else [name, *_other_names(name)]
    return any(
        config.targets_parameter(each) or config.targets_parameter(f"{each}.weight") or config.targets.may_have(each)
        for each in possible
    )


def names_in_config(name: str, config: AdapterConfig) -> list[str]:
    """What the configuration calls the module of an expert, or a router, whose tensors have no names of their own.

    Several where an expression may mean each of them.
    """
    found = []
    for each in (name, *_other_names(name)):
        if config.targets_parameter(f"{each}.weight"):
            found.append(f"{each}.weight")
        elif config.targets_parameter(each) or config.targets.may_have(each):
            found.append(each)
    return (found if config.targets.has_expression else found[:1]) or [name]


def _other_names(name: str) -> list[str]:
    """What else a configuration may call the module of an expert, or a router."""
    old = name.replace(".mlp.", ".block_sparse_moe.")
    experts, _, part = name.rpartition(".")
    if part not in PROJECTIONS or ".experts." not in name:
        return [old]
    stacked = DOWN if part == DOWN else _GATE_UP
    return [
        f"{experts.rpartition('.')[0]}.{stacked}",
        f"{old.rpartition('.')[0]}.{({GATE: 'w1', UP: 'w3', DOWN: 'w2'})[part]}",
    ]


def _sort(name: str, targets: TargetModules) -> tuple[ModuleKind, str]:
    return targets.served[name].kind, name.rpartition(".")[2]


def _renamed(entry: TensorEntry, name: str) -> tuple[str, TensorEntry]:
    return KEY_PREFIX + name, replace(entry, name=KEY_PREFIX + name)
