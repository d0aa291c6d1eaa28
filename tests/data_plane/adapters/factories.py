"""Packed adapters and arenas for tests, written from docs/protocol.md and not with the code under test."""

from __future__ import annotations

import hashlib
import json
import math
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from safetensors.torch import save

from data_plane.adapters.arena.adapter_arena import AdapterArena
from data_plane.adapters.format.manifest import read_manifest, verify_chunk
from data_plane.adapters.kinds.base_weights import BaseWeights
from data_plane.adapters.step.adapter_steps import AdapterSteps
from data_plane.adapters.step.lora_step import LoraStep
from data_plane.errors import AdapterUnavailable
from data_plane.plan import TargetKind, TargetModule
from tests.paged_chunks import to_pages, write_chunk

BASE = "b" * 64
TARGETS = tuple(
    TargetModule(f"model.layers.{layer}.{name}", TargetKind.LINEAR, in_features, out_features)
    for layer in range(2)
    for name, in_features, out_features in (("q", 32, 48), ("v", 32, 16), ("up", 32, 80), ("down", 80, 32))
)
DTYPE_NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}


@dataclass
class Packed:
    """An adapter as every tier holds it, and its matrices for the oracle."""

    digest: str
    manifest: bytes
    chunks: list[bytes]
    weights: dict[str, tuple[torch.Tensor, torch.Tensor, float]]  # by module: A [rank, in], B [rank, out], scaling
    vectors: dict[str, torch.Tensor] = field(default_factory=dict)  # by module: float32 [out], of `vector_kind`
    vector_kind: str = ""

    @property
    def arena_bytes(self) -> int:
        """By the formula of docs/protocol.md."""
        matrices = sum(
            -(-a.shape[0] // 8) * 8 * (a.shape[1] + b.shape[1]) * a.element_size() for a, b, _ in self.weights.values()
        )
        columns = math.gcd(*(width for a, b, _ in self.weights.values() for width in (a.shape[1], b.shape[1])))
        page = 8 * columns * next(iter(self.weights.values()))[0].element_size()
        return matrices + -(-4 * sum(map(len, self.vectors.values())) // page) * page


class RandomBase:
    """A base model of random weights; "q" alone has a bias (data_plane.adapters.kinds.base_weights.BaseWeights)."""

    def __init__(self, device: str = "cpu") -> None:
        self._device = device

    def weight(self, target_name: str) -> torch.Tensor:
        target = next(target for target in TARGETS if target.name == target_name)
        weight = torch.randn(target.out_features, target.in_features, generator=_seeded(f"weight {target_name}"))
        return weight.to(self._device)

    def bias(self, target_name: str) -> torch.Tensor | None:
        if not target_name.endswith(".q"):
            return None
        return torch.randn(48, generator=_seeded(f"bias {target_name}")).to(self._device)


@dataclass
class DictSource:
    """An AdapterSource over a dictionary, which verifies chunks as every source does."""

    adapters: dict[str, Packed] = field(default_factory=dict)

    def add(self, *adapters: Packed) -> DictSource:
        self.adapters.update({adapter.digest: adapter for adapter in adapters})
        return self

    def open(self, digest: str) -> tuple[bytes, Iterator[bytes]]:
        if digest not in self.adapters:
            raise AdapterUnavailable(f"adapter {digest} is nowhere")
        return self.adapters[digest].manifest, self._chunks(digest)

    def _chunks(self, digest: str) -> Iterator[bytes]:
        packed = self.adapters[digest]
        for entry, chunk in zip(read_manifest(packed.manifest, digest).chunks, packed.chunks, strict=False):
            verify_chunk(entry, chunk, digest)
            yield chunk


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def raw_bytes(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()


def _seeded(text: str) -> torch.Generator:
    return torch.Generator().manual_seed(zlib.crc32(text.encode()))


def pack(
    ranks: Mapping[str, int] | int,
    *,
    targets: Sequence[TargetModule] = TARGETS,
    scaling: float = 2.0,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    base: str = BASE,
    changes: Mapping[str, object] | None = None,
    edit: Callable[[torch.Tensor, torch.Tensor], object] | None = None,
    vectors: str = "",
    edit_vector: Callable[[torch.Tensor], object] | None = None,
    version: int = 2,
) -> Packed:
    """An adapter of one rank on every target module, or of the given ranks by target module name.

    `changes` go into the manifest; `edit` may change each A and B in place. vectors: every module has a "bias" or a
    "magnitude", which `edit_vector` may change. version: the format.
    """
    if isinstance(ranks, int):
        ranks = {target.name: ranks for target in targets}
    by_name = {target.name: target for target in targets}
    weights: dict[str, tuple[torch.Tensor, torch.Tensor, float]] = {}
    by_module: dict[str, torch.Tensor] = {}
    chunks: list[bytes] = []
    entries: list[dict[str, object]] = []
    columns = math.gcd(*(width for name in ranks for width in _page_widths(by_name[name])))
    for layer in sorted({name.split(".")[2] for name in ranks}):
        tensors: dict[str, torch.Tensor] = {}
        pages: list[torch.Tensor] = []
        modules: list[dict[str, object]] = []
        for name in sorted(name for name in ranks if name.split(".")[2] == layer):
            target, rank = by_name[name], ranks[name]
            generator = torch.Generator().manual_seed(zlib.crc32(f"{seed} {name}".encode()))
            a = torch.randn(rank, target.in_features, generator=generator).to(dtype)
            b = torch.randn(rank, target.out_features, generator=generator).to(dtype)
            if edit is not None:
                edit(a, b)
            weights[name] = (a, b, scaling)
            hashes: dict[str, object] = {"parts": ["a", "b", *([vectors] if vectors else [])]}
            if version == 1:
                tensors[f"{name}.a"], tensors[f"{name}.b"] = a, b
                hashes = {"a_sha256": sha256(raw_bytes(a)), "b_sha256": sha256(raw_bytes(b))}
            pages += to_pages(a, columns) + to_pages(b, columns)
            modules.append(
                {
                    **hashes,
                    "in_features": target.in_features,
                    "out_features": target.out_features,
                    "name": name,
                    "rank": rank,
                    "scaling": scaling,
                }
            )
            if vectors:
                vector = by_module[name] = torch.rand(target.out_features, generator=generator) + 0.5
                if edit_vector is not None:
                    edit_vector(vector)
                tensors[f"{name}.{vectors}"] = vector
                if version == 1:
                    modules[-1][f"{vectors}_sha256"] = sha256(raw_bytes(vector))
        chunks.append(save(tensors) if version == 1 else write_chunk(pages, tensors))
        entries.append(
            {
                "modules": modules,
                "name": f"layers.{layer}",
                "sha256": sha256(chunks[-1]),
                "size_bytes": len(chunks[-1]),
            }
        )
    fields = {
        "base_fingerprint": base,
        "chunks": entries,
        "dtype": DTYPE_NAMES[dtype],
        "format": version,
        "kind": "lora",
        **({"page_columns": columns} if version > 1 else {}),
        **(changes or {}),
    }
    manifest = json.dumps(fields, sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode()
    return Packed(sha256(manifest), manifest, chunks, weights, by_module, vectors)


def _page_widths(target: TargetModule) -> tuple[int, ...]:
    """The widths that pages are made for: no vocabulary, and no output that is narrow beside its input."""
    if target.kind is TargetKind.EMBEDDING:
        return (target.out_features,)
    if target.kind is TargetKind.HEAD or 16 * target.out_features <= target.in_features:
        return (target.in_features,)
    return target.in_features, target.out_features


def make_arena(
    *,
    num_slots: int = 4,
    arena_bytes: int = 1 << 20,
    targets: Sequence[TargetModule] = TARGETS,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    base: BaseWeights | None = None,
    num_scaled: int = 0,
) -> AdapterArena:
    """An arena whose memory is NaN before it is written."""
    arena = AdapterArena(
        targets,
        num_slots=num_slots,
        arena_bytes=arena_bytes,
        dtype=dtype,
        device=device,
        base=base or RandomBase(device),
        base_fingerprint=BASE,
        num_scaled=num_scaled,
    )
    arena.table.pages.fill_(float("nan"))
    return arena


def expected_output(
    target: str, x: torch.Tensor, y: torch.Tensor, token_slots: Sequence[int], in_slots: Mapping[int, Packed]
) -> torch.Tensor:
    """What the step leaves in a target module's output y, from the packed tensors, in fp32."""
    rows = []
    for row, slot in enumerate(token_slots):
        weights = in_slots[slot].weights.get(target) if slot >= 0 else None
        if weights is None:
            rows.append(y[row].float())
            continue
        a, b, scaling = weights
        delta = (x[row].float() @ a.float().T) @ b.float()
        vector, kind = in_slots[slot].vectors.get(target), in_slots[slot].vector_kind
        if vector is None:
            rows.append(y[row] + scaling * delta)
        elif kind == "bias":
            rows.append(y[row] + scaling * (delta + vector))
        else:
            weight, bias = RandomBase().weight(target), RandomBase().bias(target)
            own = torch.zeros_like(vector) if bias is None else bias
            norm = (weight + scaling * b.float().T @ a.float()).norm(dim=1)
            rows.append(vector / norm * (y[row] - own + scaling * delta) + own)
    return torch.stack(rows)


def expected_delta(
    target: str, x: torch.Tensor, token_slots: Sequence[int], in_slots: Mapping[int, Packed]
) -> torch.Tensor:
    """What the step adds to a target module's output of zeros."""
    width = next(s.out_features for s in TARGETS if s.name == target)
    return expected_output(target, x, torch.zeros(len(token_slots), width), token_slots, in_slots)


def load(arena: AdapterArena, slot: int, generation: int, packed: Packed) -> None:
    """Load from a source that has only this adapter."""
    arena.load(slot, generation, packed.digest, DictSource().add(packed))


def begin_step(arena: AdapterArena, token_slots: Sequence[int]) -> LoraStep | None:
    """A step whose tokens have these slots."""
    slots = sorted({slot for slot in token_slots if slot >= 0})
    return AdapterSteps(arena).begin(torch.tensor(list(token_slots), dtype=torch.int32), slots)


def run_step(arena: AdapterArena, token_slots: Sequence[int], in_slots: Mapping[int, Packed], *, seed: int = 0) -> None:
    """Run a step over every target module and compare with the packed matrices."""
    step = begin_step(arena, token_slots)
    generator = torch.Generator().manual_seed(seed)
    for target in TARGETS:
        x = torch.randn(len(token_slots), target.in_features, generator=generator)
        y = torch.randn(len(token_slots), target.out_features, generator=generator)
        expected = expected_output(target.name, x, y, token_slots, in_slots)
        if step is not None:
            step.apply(target.name, x, y)
        torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-3)


def assert_nothing_left(arena: AdapterArena) -> None:
    """The arena is empty, balances and works."""
    assert arena.used_bytes() == 0
    arena.check_invariants()
    good = pack(5, seed=9)
    load(arena, 0, 99, good)
    run_step(arena, [0, -1], {0: good})
