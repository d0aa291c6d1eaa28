"""What one engine promises beyond right tokens: isolation, determinism, refusals, and life after a bad row."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from data_plane.config import DEFAULT_ARENA_BYTES
from data_plane.engine.build import build_engine, check_launches, with_arena
from data_plane.engine.engine import TorchEngine
from data_plane.engine.memory.device_memory import HostMemory
from data_plane.errors import ConfigError, PlanRefused, StaleSlot
from data_plane.plan import NewRow, RowSampling, StepPlan
from kernels.tuning import write_table
from tests.data_plane.engine.packing import pack
from tests.data_plane.engine.planner import GREEDY, Job, Planner, array, make_plan
from tests.data_plane.engine.test_oracle import worker_config
from tests.makers import make_adapter

pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")

PROMPT = [5, 9, 200, 31, 77, 12, 8]


def load(engine: TorchEngine, adapter_dir: Path, slot: int, generation: int = 1) -> None:
    packed = pack(adapter_dir, engine.capacities.model_fingerprint)
    engine.slots.load(slot, generation, packed.digest, packed)


def complete(engine: TorchEngine, jobs: list[Job], *, chunk: int = 64) -> list[list[int]]:
    Planner(engine, chunk=chunk).run(jobs)
    return [job.tokens for job in jobs]


def sampled_job(seed: int, prompt: list[int] = PROMPT, **sampling: float) -> Job:
    settings: dict[str, float] = {"temperature": 0.9, "top_k": 50, "top_p": 0.95}
    return Job(prompt, 12, sampling=RowSampling(seed=seed, **(settings | sampling)))  # type: ignore[arg-type]


def new_row(row: int = 0, **changes: object) -> NewRow:
    values: dict[str, object] = {
        "row": row,
        "token_ids": array(PROMPT),
        "num_prompt_tokens": len(PROMPT),
        "num_computed_tokens": 0,
        "block_ids": array([row]),
        "slot": None,
        "slot_generation": 0,
        "sampling": GREEDY,
    }
    return NewRow(**(values | changes))  # type: ignore[arg-type]


def test_adapter_whose_b_is_zero_generates_exactly_as_the_base(
    engine: TorchEngine, checkpoint: Path, tmp_path: Path
) -> None:
    load(engine, make_adapter(tmp_path / "zero", checkpoint, scale_b=0.0), 0)
    load(engine, make_adapter(tmp_path / "other", checkpoint, seed=4), 1)
    base, zero, other = complete(engine, [Job(PROMPT, 12), Job(PROMPT, 12, 0, 1), Job(PROMPT, 12, 1, 1)])
    assert zero == base
    assert other != base


def test_same_adapter_in_two_slots_generates_the_same(engine: TorchEngine, checkpoint: Path, tmp_path: Path) -> None:
    adapter_dir = make_adapter(tmp_path / "a", checkpoint, seed=5)
    load(engine, adapter_dir, 2)
    load(engine, adapter_dir, 6)
    first, second = complete(engine, [Job(PROMPT, 12, 2, 1), Job(PROMPT, 12, 6, 1)])
    assert first == second


def test_same_seed_gives_the_same_tokens_alone_and_among_others(engine: TorchEngine) -> None:
    alone = complete(engine, [sampled_job(11)])[0]
    crowd = [sampled_job(seed, PROMPT[: 2 + seed % 5], temperature=1.5) for seed in range(20, 32)]
    together = complete(engine, [*crowd[:6], sampled_job(11), Job(PROMPT, 12), *crowd[6:]], chunk=3)[6]
    assert together == alone
    assert complete(engine, [sampled_job(12)])[0] != alone
    assert complete(engine, [sampled_job((1 << 64) - 1)])[0] != alone


def test_seeded_tokens_survive_a_preemption(engine: TorchEngine) -> None:
    """Draws depend on the index in the completion, and a row that comes back knows how much of it is prompt."""
    alone = complete(engine, [sampled_job(11)])[0]
    jobs = [sampled_job(11), sampled_job(13)]
    Planner(engine, chunk=4).run(jobs, preempt_at=6)
    assert jobs[0].tokens == alone


def test_greedy_row_among_sampled_ones_is_greedy(engine: TorchEngine) -> None:
    alone = complete(engine, [Job(PROMPT, 12)])[0]
    assert complete(engine, [sampled_job(1), Job(PROMPT, 12), sampled_job(2)])[1] == alone


def test_paused_row_waits_and_goes_on_with_its_token(engine: TorchEngine) -> None:
    expected = complete(engine, [Job(PROMPT, 4)])[0]
    blocks = array([0, 1])
    outputs = [
        engine.execute(make_plan(1, new=[new_row(block_ids=blocks)], prefills=[(0, len(PROMPT))])),
        engine.execute(make_plan(2)),
        engine.execute(make_plan(3, paused=[0])),
        engine.execute(make_plan(4)),
        engine.execute(make_plan(5, resumed=[0])),
        engine.execute(make_plan(6)),
    ]
    assert [output.token_ids.tolist() for output in outputs] == [
        [expected[0]],
        [expected[1]],
        [],
        [],
        [expected[2]],
        [expected[3]],
    ]
    assert [output.step_id for output in outputs] == [1, 2, 3, 4, 5, 6]


def test_block_copies_come_before_the_forward_pass(engine: TorchEngine) -> None:
    """A row that goes on in copies of another row's blocks reads what was there."""
    expected = complete(engine, [Job(PROMPT, 2)])[0]
    engine.execute(make_plan(1, new=[new_row(block_ids=array([3]))], prefills=[(0, len(PROMPT))]))
    copied = new_row(row=1, block_ids=array([40, 41]), num_computed_tokens=len(PROMPT) - 1)
    output = engine.execute(make_plan(2, freed=[0], new=[copied], prefills=[(1, 1)], copies=[(3, 40)]))
    assert output.token_ids.tolist() == expected[:1]


def test_wrong_slot_generation_is_refused(engine: TorchEngine, checkpoint: Path, tmp_path: Path) -> None:
    load(engine, make_adapter(tmp_path / "a", checkpoint), 0, generation=3)
    for slot, generation in ((0, 2), (0, 4), (1, 3)):
        with pytest.raises(StaleSlot):
            engine.execute(make_plan(new=[new_row(slot=slot, slot_generation=generation)], prefills=[(0, 1)]))
        engine.execute(make_plan())


@pytest.mark.parametrize("is_filled_again", [False, True])
def test_slot_evicted_under_a_row_is_refused(
    engine: TorchEngine, checkpoint: Path, tmp_path: Path, *, is_filled_again: bool
) -> None:
    load(engine, make_adapter(tmp_path / "a", checkpoint), 0)
    engine.execute(make_plan(new=[new_row(slot=0, slot_generation=1)], prefills=[(0, 3)]))
    engine.slots.evict(0, 1)
    if is_filled_again:
        load(engine, make_adapter(tmp_path / "b", checkpoint, seed=1), 0, generation=2)
    with pytest.raises(StaleSlot):
        engine.execute(make_plan(2, prefills=[(0, 2)]))


# name -> (plans that stand before, the plan to refuse, what the refusal says)
STANDING = make_plan(1, new=[new_row()], prefills=[(0, 3)])
REFUSED: dict[str, tuple[list[StepPlan], StepPlan, str]] = {
    "freed row not used": ([], make_plan(freed=[2]), "freed_rows names row 2, which is not used"),
    "freed row out of range": ([], make_plan(freed=[-1]), r"outside \[0, 32\)"),
    "row taken twice": ([STANDING], make_plan(new=[new_row()]), "new row 0 is used already"),
    "row out of range": ([], make_plan(new=[new_row(32, block_ids=array([0]))]), "not one of the 32 rows"),
    "block out of range": ([], make_plan(new=[new_row(block_ids=array([64]))]), r"block outside \[0, 64\)"),
    "block negative": ([], make_plan(new=[new_row(block_ids=array([-1]))]), r"block outside \[0, 64\)"),
    "too many blocks": ([], make_plan(new=[new_row(block_ids=array([1] * 33))]), "33 blocks, at most 32 fit"),
    "token out of range": ([], make_plan(new=[new_row(token_ids=array([256] * 7))]), "token id outside"),
    "nothing to compute": ([], make_plan(new=[new_row(num_computed_tokens=7)]), "at least one is left"),
    "no prompt": ([], make_plan(new=[new_row(num_prompt_tokens=0)]), "0 of them the prompt"),
    "computed without blocks": (
        [],
        make_plan(new=[new_row(num_computed_tokens=3, block_ids=array([]))]),
        "3 tokens computed in 0 blocks",
    ),
    "NaN temperature": (
        [],
        make_plan(new=[new_row(sampling=RowSampling(float("nan"), 0, 1.0, 0))]),
        "temperature nan",
    ),
    "slot out of range": ([], make_plan(new=[new_row(slot=8)]), "names slot 8 of 8"),
    "appended to a free row": ([], make_plan(appended=[(1, 5)]), "appended_blocks names row 1, which is not used"),
    "appended block out of range": ([STANDING], make_plan(appended=[(0, 64)]), r"block outside \[0, 64\)"),
    "prefill of a free row": ([], make_plan(prefills=[(4, 1)]), "prefills names row 4, which is not used"),
    "prefill beyond the known": ([STANDING], make_plan(prefills=[(0, 5)]), "4 of its known tokens are not computed"),
    "prefill of nothing": ([STANDING], make_plan(prefills=[(0, 0)]), "prefills gives row 0 0 tokens"),
    "prefill twice": ([STANDING], make_plan(prefills=[(0, 1), (0, 1)]), "one row twice"),
    "prefill of a decoding row": (
        [STANDING, make_plan(2, prefills=[(0, 4)])],
        make_plan(prefills=[(0, 1)]),
        "it is decoding",
    ),
    "no room": (
        [STANDING, make_plan(2, prefills=[(0, 4)]), make_plan(3)],
        make_plan(4),
        "row 0 needs room for 9 tokens, its blocks hold 8",
    ),
    "two writers": (
        [],
        make_plan(new=[new_row(), new_row(1, block_ids=array([0]))], prefills=[(0, 7), (1, 7)]),
        "two writers",
    ),
    "step too large": (
        [],
        make_plan(
            new=[
                new_row(
                    row,
                    token_ids=array([1] * 248),
                    num_prompt_tokens=248,
                    block_ids=array(range(row * 31, row * 31 + 31)) % 64,
                )
                for row in range(5)
            ],
            prefills=[(row, 248) for row in range(5)],
        ),
        "1240 tokens, at most 1024",
    ),
    "pause of a free row": ([], make_plan(paused=[0]), "paused_rows names row 0, which is not used"),
    "pause twice": ([STANDING, make_plan(2, paused=[0])], make_plan(paused=[0]), "paused already"),
    "resume of a running row": ([STANDING], make_plan(resumed=[0]), "not paused already"),
    "fed token of a row that is not host-fed": (
        [STANDING, make_plan(2, prefills=[(0, 4)])],
        make_plan(3, fed=[(0, 5)]),
        "row 0, which is not a host-fed row past its prefill",
    ),
    "fed token out of range": (
        [make_plan(1, new=[new_row(is_host_fed=True)], prefills=[(0, 7)])],
        make_plan(2, fed=[(0, 256)]),
        "fed_tokens has a token id outside",
    ),
    "fed twice": (
        [make_plan(1, new=[new_row(is_host_fed=True)], prefills=[(0, 7)])],
        make_plan(2, fed=[(0, 5), (0, 6)]),
        "fed_tokens names one row twice",
    ),
    "swap out to a host block out of range": ([], make_plan(swap_outs=[(0, 6)]), r"host block outside \[0, 6\)"),
    "swap in to a block out of range": ([], make_plan(swap_ins=[(0, 64)]), r"swap_ins names a block outside \[0, 64\)"),
    "swap in to one block twice": ([], make_plan(swap_ins=[(0, 5), (1, 5)]), "swap_ins writes one block twice"),
    "swap out onto one block twice": ([], make_plan(swap_outs=[(0, 5), (1, 5)]), "swap_outs writes one block twice"),
    "copy out of range": ([], make_plan(copies=[(0, 64)]), r"block outside \[0, 64\)"),
    "copy onto one block twice": ([], make_plan(copies=[(0, 5), (1, 5)]), "one block twice"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_plan_that_contradicts_the_state_is_refused_by_name(engine: TorchEngine, case: str) -> None:
    before, refused, says = REFUSED[case]
    for plan in before:
        engine.execute(plan)
    with pytest.raises(PlanRefused, match=says):
        engine.execute(refused)
    engine.reset()
    assert complete(engine, [Job(PROMPT, 2)]) == complete(engine, [Job(PROMPT, 2)])


@pytest.fixture
def poisoned(engine: TorchEngine) -> Iterator[int]:
    """A token whose embedding is not finite, as broken weights or an overflow would have it."""
    weight = engine.model.model.get_input_embeddings().weight
    assert isinstance(weight, torch.Tensor)
    kept = weight[250].clone()
    weight[250] = float("nan")
    yield 250
    weight[250] = kept


def test_row_with_logits_that_are_not_finite_fails_alone(engine: TorchEngine, poisoned: int) -> None:
    expected = complete(engine, [Job(PROMPT, 3)])[0]
    bad = new_row(1, token_ids=array([4, poisoned, 6]), num_prompt_tokens=3, block_ids=array([20, 21]))
    good = new_row(0, block_ids=array([10, 11]))
    first = engine.execute(make_plan(1, new=[good, bad], prefills=[(0, 7), (1, 3)]))
    assert (first.rows.tolist(), first.failed_rows.tolist()) == ([0], [1])
    # A plan that was on its way still counts the failed row among the decoding ones.
    second = engine.execute(make_plan(2))
    assert (second.rows.tolist(), second.failed_rows.tolist()) == ([0], [1])
    # Its blocks go to somebody else, who must not see what it left.
    heir = new_row(1, block_ids=array([20, 21]))
    third = engine.execute(make_plan(3, freed=[1], new=[heir], prefills=[(1, 7)]))
    assert third.rows.tolist() == [0, 1] and len(third.failed_rows) == 0
    assert [first.token_ids[0], second.token_ids[0], third.token_ids[0]] == expected
    assert third.token_ids[1] == expected[0]


@pytest.mark.parametrize("is_appended", [True, False])
def test_blocks_that_a_row_left_in_its_prefill_are_finite_for_who_fills_them_next(
    engine: TorchEngine, poisoned: int, is_appended: bool
) -> None:
    expected = complete(engine, [Job(PROMPT, 3)])[0]
    bad = new_row(0, token_ids=array([4, poisoned, 6, 7]), num_prompt_tokens=4, block_ids=array([20]))
    engine.execute(make_plan(1, new=[bad], prefills=[(0, 3)]))
    assert not torch.isfinite(engine.kv_cache.keys[1][20]).all()
    heir = new_row(1, block_ids=array([10] if is_appended else [10, 20]))
    tokens = [
        *engine.execute(make_plan(2, freed=[0], new=[heir], prefills=[(1, 7)])).token_ids,
        *engine.execute(make_plan(3)).token_ids,
        *engine.execute(make_plan(4, appended=[(1, 20)] if is_appended else [])).token_ids,
    ]
    assert tokens == expected
    assert torch.isfinite(engine.kv_cache.keys[1][20]).all() and torch.isfinite(engine.kv_cache.values[1][20]).all()


@pytest.mark.parametrize("is_freed_before", [True, False])
def test_who_starts_from_blocks_that_are_not_finite_fails_though_their_row_ended_in_its_prefill(
    engine: TorchEngine, poisoned: int, is_freed_before: bool
) -> None:
    """The prefix cache has a full block of a prompt, whose request is cancelled before it samples. A later request with
    that prompt gets what it would get without the cache: its logits are not finite either."""
    expected = complete(engine, [Job(PROMPT, 3)])[0]
    engine.reset()
    prompt = array([4, poisoned, 6, 7, 8, 9, 10, 11, 12, 13])
    first = new_row(0, token_ids=prompt, num_prompt_tokens=10, block_ids=array([20, 21]))
    second = new_row(1, token_ids=prompt, num_prompt_tokens=10, num_computed_tokens=8, block_ids=array([20, 30]))
    engine.execute(make_plan(1, new=[first], prefills=[(0, 8)]))
    if is_freed_before:
        engine.execute(make_plan(2, freed=[0]))
        output = engine.execute(make_plan(3, new=[second], prefills=[(1, 2)]))
    else:
        engine.execute(make_plan(2))
        output = engine.execute(make_plan(3, freed=[0], new=[second], prefills=[(1, 2)]))
    assert (output.rows.tolist(), output.failed_rows.tolist()) == ([], [1])
    # Once nobody starts from them any more, they are as good as others.
    heirs = [new_row(2, block_ids=array([20, 21])), new_row(3, block_ids=array([30, 31]))]
    output = engine.execute(make_plan(4, freed=[1], new=heirs, prefills=[(2, 7), (3, 7)]))
    assert output.token_ids.tolist() == [expected[0]] * 2


def test_reset_forgets_rows_and_slots(engine: TorchEngine, checkpoint: Path, tmp_path: Path) -> None:
    load(engine, make_adapter(tmp_path / "a", checkpoint), 0)
    engine.execute(make_plan(new=[new_row(slot=0, slot_generation=1)], prefills=[(0, 7)]))
    engine.reset()
    assert engine.slots.used_bytes() == 0
    output = engine.execute(make_plan(1))
    assert output.rows.tolist() == [] and output.step_time_us >= 0
    engine.execute(make_plan(2, new=[new_row()], prefills=[(0, 7)]))


def test_sampling_and_dtypes_of_a_step_result(engine: TorchEngine) -> None:
    output = engine.execute(make_plan(7, new=[new_row()], prefills=[(0, 7)]))
    assert output.step_id == 7
    assert output.rows.dtype == output.token_ids.dtype == output.failed_rows.dtype == np.int32


def test_capacities_say_what_was_built(checkpoint: Path) -> None:
    engine = build_engine(worker_config(checkpoint, num_blocks=10, max_model_len=None, token_budget=99))
    capacities = engine.capacities
    assert capacities.max_model_len == 80, "10 blocks of 8 tokens hold less than the model's 512"
    assert (capacities.dtype, capacities.vocab_size, capacities.max_step_tokens) == ("float32", 256, 99)
    assert (capacities.num_blocks, capacities.block_size, capacities.num_slots) == (10, 8, 8)


def test_blocks_are_counted_from_memory_and_bounded_by_what_rows_can_use(checkpoint: Path) -> None:
    engine = build_engine(worker_config(checkpoint, num_blocks=None, max_rows=2, max_model_len=100))
    assert engine.capacities.num_blocks == 2 * 13


def test_an_arena_takes_its_share_of_what_is_free_after_loading(checkpoint: Path) -> None:
    by_share = worker_config(checkpoint, arena_bytes=DEFAULT_ARENA_BYTES, arena_memory_share=0.25)
    memory = HostMemory()
    assert 0 < with_arena(by_share, memory).arena_bytes < 0.3 * memory.free_bytes()
    by_bytes = worker_config(checkpoint)
    assert with_arena(by_bytes, memory) is by_bytes
    small = worker_config(checkpoint, arena_bytes=DEFAULT_ARENA_BYTES, arena_memory_share=0.001)
    assert 0 < build_engine(small).capacities.arena_bytes < 0.01 * memory.free_bytes()


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"max_model_len": 513}, "--max-model-len: 513 is above 512 tokens"),
        ({"max_model_len": 128, "num_blocks": 4}, "--max-model-len: 128 is above the 32 tokens of 4 KV blocks"),
        ({"num_blocks": None, "host_kv_bytes": 1 << 40}, "--num-blocks: .*, host KV 1024.0 GiB; lower .* or --arena-b"),
        ({"arena_bytes": 1 << 60}, "--arena-bytes: 1152921504606846976 bytes do not fit in memory"),
        (
            {"arena_bytes": 1},
            "--arena-bytes: 1 bytes hold no adapter: the smallest takes 3072 bytes, one of rank 8 on every linear "
            "layer 65536; give that",
        ),
        ({"host_kv_bytes": 100}, "--host-kv-bytes: 100 bytes hold no KV block of 4096"),
    ],
)
def test_settings_that_cannot_be_are_refused(checkpoint: Path, settings: dict[str, int | None], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        build_engine(worker_config(checkpoint, **settings))


@pytest.mark.parametrize(
    ("arena_bytes", "says"),
    [
        (0, "--arena-bytes is 0: this worker serves the base model and no adapter"),
        (65535, "--arena-bytes 65535 is less"),
    ],
)
def test_arena_that_refuses_common_adapters_is_reported_at_the_start(
    checkpoint: Path, arena_bytes: int, says: str, caplog: pytest.LogCaptureFixture
) -> None:
    engine = build_engine(worker_config(checkpoint, arena_bytes=arena_bytes))
    assert engine.capacities.arena_bytes == arena_bytes
    assert [record.getMessage() for record in caplog.records if says in record.getMessage()]


def test_start_shows_people_how_far_it_is(checkpoint: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        build_engine(worker_config(checkpoint, num_blocks=10, max_model_len=None, arena_bytes=1 << 20, warm_up="on"))
    shown = [vars(record)["shown"] for record in caplog.records if hasattr(record, "shown")]
    patterns = [
        r"preparing native code, .*",
        r"loading \d+\.\d KiB of weights for cpu",
        r"weights loaded and model checked in \d+\.\d s",
        r"warming up: .*",
        r"warmed up in \d+\.\d s",
        r"memory of .* GiB: weights .*, arena 1\.0 MiB, kv 40\.0 KiB; KV cache for 80 tokens",
    ]
    returned = [sentence for sentence in shown if not sentence.startswith(("loading weights:", "warm-up:"))]
    assert len(returned) == len(patterns)
    for sentence, pattern in zip(returned, patterns, strict=True):
        assert re.fullmatch(pattern, sentence), sentence


def test_launch_parameters_that_cannot_be_read_or_run_with_end_the_start(tmp_path: Path) -> None:
    check_launches("A GPU", tmp_path)
    bucket = "cache=bfloat16 dim=128 dtype=bfloat16 group=4"
    path = write_table("paged_attention_prefill", "A GPU", {}, {bucket: {"block_m": 8}}, tmp_path)
    with pytest.raises(ConfigError, match=rf"A GPU: .*_prefill.json: .*{bucket}.*block_m is 8, want .* from 16 to 256"):
        check_launches("A GPU", tmp_path)
    path.write_text("{")
    with pytest.raises(ConfigError, match=r"launch parameters of A GPU: .*_prefill.json: .*delete or rewrite"):
        check_launches("A GPU", tmp_path)


def test_bf16_engine_generates(checkpoint: Path) -> None:
    engine = build_engine(worker_config(checkpoint, dtype="bfloat16", num_blocks=64))
    assert engine.capacities.dtype == "bfloat16"
    together = complete(engine, [Job(PROMPT, 4), Job(PROMPT[:3], 4)])
    assert together[0] == complete(engine, [Job(PROMPT, 4)])[0]
