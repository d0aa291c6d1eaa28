"""Decoder layers as one native program: which models have it, and that it computes what the modules do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM

from data_plane.adapters.arena.scaled_columns import ScaledColumns
from data_plane.adapters.step.further_columns import FurtherColumns
from data_plane.engine.build import build_engine
from data_plane.engine.engine import TorchEngine
from data_plane.layers.decoder_stack import DecoderStack
from kernels.linear.choice import Form
from kernels.native import set_num_threads
from kernels.paged_attention import AttentionBatch
from tests.data_plane.engine.packing import pack
from tests.data_plane.engine.test_oracle import worker_config
from tests.makers import make_adapter, make_checkpoint

RECORDED = ("llama", "mistral", "qwen2", "qwen3")
BLOCK_SIZE = 16
ADAPTERS = ((8, "all-linear"), (3, "all-linear"), (20, ["q_proj", "down_proj"]))  # ranks and targets
Columns = int | tuple[int, ...]  # of a sequence's only adapter, -1 for none; or of the adapters that it combines
Sequences = tuple[tuple[int, int, Columns], ...]
# Sequences of a step: computed tokens, tokens of the step, slot.
STEPS: tuple[Sequences, ...] = (
    ((0, 5, -1), (0, 40, 0), (0, 17, 1), (0, 1, 2)),
    ((5, 1, -1), (40, 1, 0), (17, 20, 1), (1, 1, 2)),
    ((6, 1, -1), (41, 1, 0)),
    ((7, 1, -1),),
)


@pytest.fixture(autouse=True)
def native_weights(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """Whatever is fastest here."""
    monkeypatch.setattr("data_plane.layers.packed_weight.fastest_form", lambda *_: Form.NATIVE)
    request.addfinalizer(lambda: set_num_threads(1))


def make_engine(directory: Path, arch: str, dtype: str = "float32") -> TorchEngine:
    checkpoint = make_checkpoint(directory / "model", arch)
    engine = build_engine(worker_config(checkpoint, dtype=dtype, block_size=BLOCK_SIZE))
    for slot, (rank, targets) in enumerate(ADAPTERS):
        adapter = make_adapter(directory / f"adapter-{slot}", checkpoint, rank=rank, targets=targets, seed=slot)
        packed = pack(adapter, engine.capacities.model_fingerprint, getattr(torch, dtype))
        engine.slots.load(slot, 1, packed.digest, packed)
    return engine


def stack_of(engine: TorchEngine) -> DecoderStack:
    stacked = engine.model.stacked
    assert stacked is not None
    return stacked.stack


def logits_of(
    engine: TorchEngine, sequences: Sequences, *, first: int = 0, linear: frozenset[tuple[int, ...]] = frozenset()
) -> torch.Tensor:
    """Of all tokens of a step. Sequence i of `sequences` has the blocks of row first + i, and tokens of its own.

    Adapters whose columns are in `linear` have A and B summed, others their products.
    """
    starts, tokens, positions = [0], [], []
    products, summed = np.full((2, 4, sum(count for _, count, _ in sequences)), -1, dtype=np.int32)
    for index, (computed, count, columns) in enumerate(sequences):
        every = (columns,) if isinstance(columns, int) else columns
        table = summed if every in linear else products
        table[: len(every), starts[-1] : starts[-1] + count] = np.array(every)[:, None]
        generator = torch.Generator().manual_seed(first + index)
        tokens.append(torch.randint(2, 250, (100,), generator=generator)[computed : computed + count])
        positions.append(torch.arange(computed, computed + count))
        starts.append(starts[-1] + count)
    tables = torch.arange(len(sequences) * 4, dtype=torch.int32).view(-1, 4) + 4 * first
    places = torch.cat([(4 * BLOCK_SIZE) * (first + index) + position for index, position in enumerate(positions)])
    lengths = [computed + count for computed, count, _ in sequences]
    every_column = np.concatenate([products, summed])
    named = sorted(set(every_column.flatten().tolist()) - {-1})
    further = FurtherColumns(
        tuple(c for c in products[1:] if (c >= 0).any()), tuple(c for c in summed if (c >= 0).any())
    )
    lora = engine.adapter_steps.begin(torch.from_numpy(products[0]), named, further if further.every else None)
    context = engine.model.context
    context.begin(AttentionBatch.build(tables, starts, lengths), places, lora)
    try:
        return engine.model.logits(torch.cat(tokens), torch.cat(positions), torch.arange(starts[-1])).clone()
    finally:
        context.end()


@pytest.mark.parametrize("form", [Form.NATIVE, Form.SHARED], ids=str)
@pytest.mark.parametrize("arch", RECORDED)
def test_native_layers_compute_as_the_modules(
    arch: str, form: Form, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("data_plane.layers.packed_weight.fastest_form", lambda *_: form)
    engine = make_engine(tmp_path, arch)
    assert stack_of(engine).is_recorded
    with torch.inference_mode():
        for sequences in STEPS:
            native = logits_of(engine, sequences)
            with stack_of(engine).as_modules():
                plain = logits_of(engine, sequences)
            torch.testing.assert_close(native, plain, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_row_has_the_same_bits_alone_and_in_a_batch_and_in_any_number_of_threads(dtype: str, tmp_path: Path) -> None:
    engine = make_engine(tmp_path, "llama", dtype)
    with torch.inference_mode():
        for sequences in STEPS[:2]:
            together = logits_of(engine, sequences)
            begin = 0
            for index, sequence in enumerate(sequences):
                for num_threads in (1, 3):
                    set_num_threads(num_threads)
                    alone = logits_of(engine, (sequence,), first=index)
                    assert torch.equal(alone, together[begin : begin + sequence[1]]), (index, num_threads)
                begin += sequence[1]


def combining(engine: TorchEngine) -> tuple[tuple[Sequences, ...], frozenset[tuple[int, ...]]]:
    """Steps in which sequences have two to four adapters, or one with a scale; the columns of sums of A and B."""
    take = ScaledColumns(engine.arena.table).take
    products = [take(slot, 1, scale, is_linear=False) for slot, scale in ((0, 0.5), (1, -2.0), (2, 1.0), (0, 0.0))]
    sums = [take(slot, 1, scale, is_linear=True) for slot, scale in ((0, 0.5), (1, -2.0), (2, 1.0), (0, 1.0))]
    two, four, scaled = tuple(products[:2]), tuple(products), products[1]
    linear, many = tuple(sums[:2]), tuple(sums)
    steps: tuple[Sequences, ...] = (
        ((0, 5, -1), (0, 40, two), (0, 17, linear), (0, 3, four), (0, 2, 1), (0, 9, many), (0, 4, scaled)),
        ((5, 1, -1), (40, 1, two), (17, 1, linear), (3, 1, four), (2, 1, 1), (9, 20, many), (4, 1, scaled)),
        ((6, 1, two),),
        ((7, 1, many), (41, 1, linear)),
    )
    return steps, frozenset({linear, many})


@pytest.mark.parametrize("arch", RECORDED)
def test_combinations_of_adapters_compute_as_the_modules(arch: str, tmp_path: Path) -> None:
    engine = make_engine(tmp_path, arch)
    steps, linear = combining(engine)
    with torch.inference_mode():
        for sequences in steps:
            native = logits_of(engine, sequences, linear=linear)
            with stack_of(engine).as_modules():
                plain = logits_of(engine, sequences, linear=linear)
            # The sums of several adapters, some times -2, are larger than those of one.
            torch.testing.assert_close(native, plain, rtol=1e-4, atol=1e-4 * float(plain.abs().max()))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_combination_has_the_same_bits_alone_and_in_a_batch_and_in_any_number_of_threads(
    dtype: str, tmp_path: Path
) -> None:
    engine = make_engine(tmp_path, "llama", dtype)
    steps, linear = combining(engine)
    with torch.inference_mode():
        for sequences in steps[:2]:
            together, begin = logits_of(engine, sequences, linear=linear), 0
            for index, sequence in enumerate(sequences):
                for num_threads in (1, 3):
                    set_num_threads(num_threads)
                    alone = logits_of(engine, (sequence,), first=index, linear=linear)
                    assert torch.equal(alone, together[begin : begin + sequence[1]]), (index, num_threads)
                begin += sequence[1]


def test_a_step_with_combinations_is_one_native_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine(tmp_path, "llama")
    steps, linear = combining(engine)
    monkeypatch.setattr("data_plane.layers.decoder_layer.DecoderLayer.forward", None)
    with torch.inference_mode():
        for sequences in steps:
            assert logits_of(engine, sequences, linear=linear).isfinite().all()


def test_layers_with_other_logits_run_as_modules(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("data_plane.layers.recorded_layers.RecordedLayers.run", lambda self, x, *_: (x, x))
    engine = build_engine(worker_config(make_checkpoint(tmp_path, "llama")))
    assert not stack_of(engine).is_recorded
    assert "their native program gives other logits" in caplog.text


def test_models_of_another_shape_have_no_native_layers(tmp_path: Path) -> None:
    engine = build_engine(worker_config(make_checkpoint(tmp_path, "gpt2")))
    assert engine.model.stacked is None


def test_weights_in_another_form_run_as_modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("data_plane.layers.packed_weight.fastest_form", lambda *_: Form.PLAIN)
    engine = build_engine(worker_config(make_checkpoint(tmp_path, "llama")))
    assert not stack_of(engine).is_recorded


def direct_is_proven(directory: Path) -> bool:
    stacked = build_engine(worker_config(make_checkpoint(directory, "llama"))).model.stacked
    assert stacked is not None and stacked.direct is not None and stacked.stack.is_recorded
    return stacked.direct.is_proven


def test_the_forward_pass_round_native_layers_is_direct_where_its_bits_are_the_models(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert direct_is_proven(tmp_path / "plain")
    plain = LlamaForCausalLM.forward

    def scaled(self: LlamaForCausalLM, **kwargs: Any) -> Any:
        output = plain(self, **kwargs)
        output.logits = output.logits * 1.0001
        return output

    monkeypatch.setattr(LlamaForCausalLM, "forward", scaled)
    assert not direct_is_proven(tmp_path / "scaled")
