"""Target modules outside the decoder layers: embedding and head, also with an odd vocabulary in the last page."""

from __future__ import annotations

import pytest
import torch

from data_plane.adapters.arena.adapter_arena import AdapterArena
from data_plane.adapters.step.adapter_steps import AdapterSteps
from data_plane.errors import AdapterMismatch, ArenaFull
from data_plane.plan import TargetKind, TargetModule
from tests.data_plane.adapters.factories import BASE, DictSource, Packed, pack, sha256

VOCAB, HIDDEN = 53, 16
EMBEDDING = TargetModule("model.rest.embed", TargetKind.EMBEDDING, VOCAB, HIDDEN)
HEAD = TargetModule("model.rest.head", TargetKind.HEAD, HIDDEN, VOCAB)
LAYER = TargetModule("model.layers.0.q", TargetKind.LINEAR, HIDDEN, 32)
TARGETS = (EMBEDDING, LAYER, HEAD)
FORMS = pytest.mark.usefixtures("lora_form")


class Base:
    """A base model of random weights (data_plane.adapters.kinds.base_weights.BaseWeights)."""

    def weight(self, target_name: str) -> torch.Tensor:
        target = next(target for target in TARGETS if target.name == target_name)
        generator = torch.Generator().manual_seed(len(target_name))
        return torch.randn(target.out_features, target.in_features, generator=generator)

    def bias(self, target_name: str) -> torch.Tensor | None:
        return None


def make_arena(*, arena_bytes: int = 1 << 20) -> AdapterArena:
    return AdapterArena(
        TARGETS,
        num_slots=4,
        arena_bytes=arena_bytes,
        dtype=torch.float32,
        device="cpu",
        base=Base(),
        base_fingerprint=BASE,
    )


def packed(
    ranks: dict[TargetModule, int], *, vectors: str = "", seed: int = 0, is_embedding: TargetModule = EMBEDDING
) -> Packed:
    """Names end up in chunks by their third part: here "q" in layers.0's, the others in "rest"."""
    adapter = pack({target.name: rank for target, rank in ranks.items()}, targets=TARGETS, vectors=vectors, seed=seed)
    manifest = adapter.manifest
    for target in (EMBEDDING, HEAD):
        manifest = manifest.replace(f'"name":"layers.{target.name.split(".")[2]}"'.encode(), b'"name":"rest"')
    name = f'"name":"{is_embedding.name}"'.encode()
    manifest = manifest.replace(b"," + name, b',"is_embedding":true,' + name)
    return Packed(sha256(manifest), manifest, adapter.chunks, adapter.weights, adapter.vectors, vectors)


def load(arena: AdapterArena, slot: int, adapter: Packed) -> None:
    arena.load(slot, 1, adapter.digest, DictSource().add(adapter))


def looked_up(adapter: Packed | None, token_id: int, y: torch.Tensor, multiplier: float) -> torch.Tensor:
    """The embedding of one token whose adapter this is; y is the base's."""
    if adapter is None or EMBEDDING.name not in adapter.weights:
        return y
    a, b, scaling = adapter.weights[EMBEDDING.name]
    total = y + multiplier * scaling * a[:, token_id] @ b
    if adapter.vector_kind != "magnitude":
        return total
    norm = (Base().weight(EMBEDDING.name) + scaling * b.T @ a).norm(dim=1)
    return adapter.vectors[EMBEDDING.name] / norm * total


@FORMS
@pytest.mark.parametrize("multiplier", [1.0, 4.0])
def test_an_embedding_adds_the_columns_of_its_tokens(multiplier: float) -> None:
    arena = make_arena()
    adapters = {
        0: packed({EMBEDDING: 9, LAYER: 2}),
        1: packed({EMBEDDING: 3, HEAD: 4}, vectors="magnitude", seed=1),
        2: packed({HEAD: 8}, seed=2),
    }
    for slot, adapter in adapters.items():
        load(arena, slot, adapter)
        assert arena.used_bytes() <= 1 << 20
    slots = [0, -1, 1, 2, 1, 0]
    token_ids = torch.tensor([52, 5, 0, 3, 51, 48])
    step = AdapterSteps(arena).begin(torch.tensor(slots, dtype=torch.int32), [0, 1, 2])
    assert step is not None
    y = torch.randn(6, HIDDEN, generator=torch.Generator().manual_seed(0))
    rows = zip(slots, token_ids.tolist(), y, strict=True)
    expected = torch.stack([looked_up(adapters.get(slot), token, row, multiplier) for slot, token, row in rows])
    step.embed(EMBEDDING.name, token_ids, y, multiplier)
    torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-4)


@FORMS
def test_a_head_adds_to_the_rows_that_are_kept() -> None:
    """The step has more tokens, of more adapters, than the head has rows."""
    arena = make_arena()
    adapters = {0: packed({LAYER: 2}), 1: packed({HEAD: 11}, seed=1), 2: packed({HEAD: 3, LAYER: 1}, seed=2)}
    for slot, adapter in adapters.items():
        load(arena, slot, adapter)
    assert AdapterSteps(arena).begin(torch.tensor([0, 0, 1, 2, -1], dtype=torch.int32), [0, 1, 2]) is not None
    assert AdapterSteps(arena).begin_head(torch.tensor([0, -1], dtype=torch.int32)) is None
    assert AdapterSteps(arena).begin_head(torch.tensor([], dtype=torch.int32)) is None
    kept = [2, -1, 1, 0]
    head = AdapterSteps(arena).begin_head(torch.tensor(kept, dtype=torch.int32))
    assert head is not None
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(4, HIDDEN, generator=generator), torch.randn(4, VOCAB, generator=generator)
    expected = y.clone()
    for row, slot in enumerate(kept):
        if slot > 0:
            a, b, scaling = adapters[slot].weights[HEAD.name]
            expected[row] += scaling * (x[row] @ a.T) @ b
    head.apply(HEAD.name, x, y)
    torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-4)


def test_a_vocabulary_takes_whole_pages() -> None:
    """Of 16 columns: 53 take four."""
    arena = make_arena()
    load(arena, 0, packed({EMBEDDING: 9, HEAD: 8}))
    assert arena.used_bytes() == (16 + 8) * (16 + 64) * 4
    arena.check_invariants()


def test_an_adapter_of_one_kind_of_module_is_no_adapter_of_another() -> None:
    arena = make_arena()
    with pytest.raises(AdapterMismatch, match=r"head is_embedding is True, the model has it as head"):
        load(arena, 0, packed({HEAD: 4}, is_embedding=HEAD))
    with pytest.raises(AdapterMismatch, match=r"embed is_embedding is False, the model has it as embedding"):
        load(arena, 0, packed({EMBEDDING: 4}, is_embedding=LAYER))
    assert arena.used_bytes() == 0


def test_a_full_arena_refuses_an_adapter_of_zeros() -> None:
    arena = make_arena(arena_bytes=8 * (16 + 64) * 4)
    arena.load_zeros(0, 1, 8)
    with pytest.raises(ArenaFull):
        arena.load_zeros(1, 1, 8)
