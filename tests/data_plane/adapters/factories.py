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
from data_plane.adapters.arena.base_weights import BaseWeights
from data_plane.adapters.sites import Site
from data_plane.adapters.step.adapter_steps import AdapterSteps
from data_plane.adapters.step.lora_step import LoraStep
from data_plane.errors import AdapterUnavailable

BASE = "b" * 64
SITES = tuple(
    Site(f"model.layers.{layer}.{name}", in_features, out_features)
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
    weights: dict[str, tuple[torch.Tensor, torch.Tensor, float]]  # site name -> A [rank, in], B [rank, out], scaling
    vectors: dict[str, torch.Tensor] = field(default_factory=dict)  # site name -> float32 [out], of `vector_kind`
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
    """A base model of random weights; "q" alone has a bias (data_plane.adapters.arena.base_weights.BaseWeights)."""

    def weight(self, site_name: str) -> torch.Tensor:
        site = next(site for site in SITES if site.name == site_name)
        return torch.randn(site.out_features, site.in_features, generator=_seeded(f"weight {site_name}"))

    def bias(self, site_name: str) -> torch.Tensor | None:
        return torch.randn(48, generator=_seeded(f"bias {site_name}")) if site_name.endswith(".q") else None


@dataclass
class DictSource:
    """An AdapterSource over a dictionary."""

    adapters: dict[str, Packed] = field(default_factory=dict)

    def add(self, *adapters: Packed) -> DictSource:
        self.adapters.update({adapter.digest: adapter for adapter in adapters})
        return self

    def open(self, digest: str) -> tuple[bytes, Iterator[bytes]]:
        if digest not in self.adapters:
            raise AdapterUnavailable(f"adapter {digest} is nowhere")
        return self.adapters[digest].manifest, iter(self.adapters[digest].chunks)


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def raw_bytes(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()


def _seeded(text: str) -> torch.Generator:
    return torch.Generator().manual_seed(zlib.crc32(text.encode()))


def pack(
    ranks: Mapping[str, int] | int,
    *,
    sites: Sequence[Site] = SITES,
    scaling: float = 2.0,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    base: str = BASE,
    changes: Mapping[str, object] | None = None,
    edit: Callable[[torch.Tensor, torch.Tensor], object] | None = None,
    vectors: str = "",
    edit_vector: Callable[[torch.Tensor], object] | None = None,
) -> Packed:
    """An adapter of one rank on every site, or of the given ranks by site name.

    `changes` go into the manifest; `edit` may change each A and B in place. vectors: every module has a "bias" or a
    "magnitude", which `edit_vector` may change.
    """
    if isinstance(ranks, int):
        ranks = {site.name: ranks for site in sites}
    by_name = {site.name: site for site in sites}
    weights: dict[str, tuple[torch.Tensor, torch.Tensor, float]] = {}
    by_site: dict[str, torch.Tensor] = {}
    chunks: list[bytes] = []
    entries: list[dict[str, object]] = []
    for layer in sorted({name.split(".")[2] for name in ranks}):
        tensors: dict[str, torch.Tensor] = {}
        modules: list[dict[str, object]] = []
        for name in sorted(name for name in ranks if name.split(".")[2] == layer):
            site, rank = by_name[name], ranks[name]
            generator = torch.Generator().manual_seed(zlib.crc32(f"{seed} {name}".encode()))
            a = torch.randn(rank, site.in_features, generator=generator).to(dtype)
            b = torch.randn(rank, site.out_features, generator=generator).to(dtype)
            if edit is not None:
                edit(a, b)
            weights[name] = (a, b, scaling)
            tensors[f"{name}.a"], tensors[f"{name}.b"] = a, b
            modules.append(
                {
                    "a_sha256": sha256(raw_bytes(a)),
                    "b_sha256": sha256(raw_bytes(b)),
                    "in_features": site.in_features,
                    "out_features": site.out_features,
                    "name": name,
                    "rank": rank,
                    "scaling": scaling,
                }
            )
            if vectors:
                vector = by_site[name] = torch.rand(site.out_features, generator=generator) + 0.5
                if edit_vector is not None:
                    edit_vector(vector)
                tensors[f"{name}.{vectors}"] = vector
                modules[-1][f"{vectors}_sha256"] = sha256(raw_bytes(vector))
        chunks.append(save(tensors))
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
        "format": 1,
        "kind": "lora",
        **(changes or {}),
    }
    manifest = json.dumps(fields, sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode()
    return Packed(sha256(manifest), manifest, chunks, weights, by_site, vectors)


def make_arena(
    *,
    num_slots: int = 4,
    arena_bytes: int = 1 << 20,
    sites: Sequence[Site] = SITES,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    base: BaseWeights | None = None,
) -> AdapterArena:
    """An arena whose memory is NaN before it is written."""
    arena = AdapterArena(
        sites,
        num_slots=num_slots,
        arena_bytes=arena_bytes,
        dtype=dtype,
        device=device,
        base=base or RandomBase(),
        base_fingerprint=BASE,
    )
    arena.table.pages.fill_(float("nan"))
    return arena


def expected_output(
    site: str, x: torch.Tensor, y: torch.Tensor, token_slots: Sequence[int], in_slots: Mapping[int, Packed]
) -> torch.Tensor:
    """What the step leaves in a site's output y, from the packed tensors, in fp32."""
    rows = []
    for row, slot in enumerate(token_slots):
        weights = in_slots[slot].weights.get(site) if slot >= 0 else None
        if weights is None:
            rows.append(y[row].float())
            continue
        a, b, scaling = weights
        delta = (x[row].float() @ a.float().T) @ b.float()
        vector, kind = in_slots[slot].vectors.get(site), in_slots[slot].vector_kind
        if vector is None:
            rows.append(y[row] + scaling * delta)
        elif kind == "bias":
            rows.append(y[row] + scaling * (delta + vector))
        else:
            weight, bias = RandomBase().weight(site), RandomBase().bias(site)
            own = torch.zeros_like(vector) if bias is None else bias
            norm = (weight + scaling * b.float().T @ a.float()).norm(dim=1)
            rows.append(vector / norm * (y[row] - own + scaling * delta) + own)
    return torch.stack(rows)


def expected_delta(
    site: str, x: torch.Tensor, token_slots: Sequence[int], in_slots: Mapping[int, Packed]
) -> torch.Tensor:
    """What the step adds to a site's output of zeros."""
    width = next(s.out_features for s in SITES if s.name == site)
    return expected_output(site, x, torch.zeros(len(token_slots), width), token_slots, in_slots)


def load(arena: AdapterArena, slot: int, generation: int, packed: Packed) -> None:
    """Load from a source that has only this adapter."""
    arena.load(slot, generation, packed.digest, DictSource().add(packed))


def begin_step(arena: AdapterArena, token_slots: Sequence[int]) -> LoraStep | None:
    """A step whose tokens have these slots."""
    slots = sorted({slot for slot in token_slots if slot >= 0})
    return AdapterSteps(arena).begin(torch.tensor(list(token_slots), dtype=torch.int32), slots)


def run_step(arena: AdapterArena, token_slots: Sequence[int], in_slots: Mapping[int, Packed], *, seed: int = 0) -> None:
    """Run a step over every site and compare with the packed matrices."""
    step = begin_step(arena, token_slots)
    generator = torch.Generator().manual_seed(seed)
    for site in SITES:
        x = torch.randn(len(token_slots), site.in_features, generator=generator)
        y = torch.randn(len(token_slots), site.out_features, generator=generator)
        expected = expected_output(site.name, x, y, token_slots, in_slots)
        if step is not None:
            step.apply(site.name, x, y)
        torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-3)


def assert_nothing_left(arena: AdapterArena) -> None:
    """The arena is empty, balances and works."""
    assert arena.used_bytes() == 0
    arena.check_invariants()
    good = pack(5, seed=9)
    load(arena, 0, 99, good)
    run_step(arena, [0, -1], {0: good})
