"""What rows may ask for beyond temperature, top-k and top-p: against transformers' processors and plain forward passes.

Forks, host_fed rows and swapped rows must go on with the tokens that they would have had.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from data_plane.engine.batch import split_prefills
from data_plane.engine.engine import EngineStats, TorchEngine
from data_plane.engine.sampling.logprobs import LEAST_LOGPROB
from data_plane.engine.sampling.sampler import Sampler, SamplerStats
from data_plane.errors import PlanRefused
from data_plane.models.loader import LoadedModel
from data_plane.plan import NewRow, RowLogprobs, RowSampling
from tests.data_plane.engine.planner import GREEDY, Job, Planner, array, make_plan
from tests.data_plane.engine.test_engine import PROMPT, new_row

SAMPLED = RowSampling(temperature=0.9, top_k=50, top_p=0.95, seed=11)
NUM_TOKENS = 12
ChangeLogits = Callable[[Callable[[torch.Tensor], torch.Tensor]], None]


@pytest.fixture(scope="module")
def model(checkpoint: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)


@pytest.fixture
def change_logits(monkeypatch: pytest.MonkeyPatch) -> ChangeLogits:
    """Has every model's logits changed by a function from here on."""
    logits_of = LoadedModel.logits

    def use(change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        monkeypatch.setattr(LoadedModel, "logits", lambda model, *inputs: change(logits_of(model, *inputs)))

    return use


def complete(engine: TorchEngine, sampling: RowSampling, **settings: Any) -> list[int]:
    job = Job(PROMPT, NUM_TOKENS, sampling=sampling)
    Planner(engine, chunk=4).run([job], **settings)
    return job.tokens


def generate(model: Any, **settings: Any) -> list[int]:
    """transformers' own greedy completion."""
    tokens = model.generate(
        torch.tensor([PROMPT]),
        attention_mask=torch.ones(1, len(PROMPT), dtype=torch.int64),
        max_new_tokens=NUM_TOKENS,
        do_sample=False,
        pad_token_id=0,
        **({"eos_token_id": None} | settings),
    )
    answered: list[int] = tokens[0, len(PROMPT) :].tolist()
    return answered


def test_repetition_penalty_is_transformers(engine: TorchEngine, model: Any) -> None:
    plain = complete(engine, GREEDY)
    completions = [generate(model, repetition_penalty=penalty) for penalty in (1.0, 5.0, 0.5, 0.1)]
    assert completions[0] == plain and len({tuple(tokens) for tokens in completions}) >= 3
    for penalty, expected in zip((5.0, 0.5, 0.1), completions[1:], strict=True):
        assert complete(engine, replace(GREEDY, repetition_penalty=penalty)) == expected


def test_logit_bias_and_min_tokens_are_transformers(engine: TorchEngine, model: Any) -> None:
    plain = complete(engine, GREEDY)
    biased = {(plain[0],): -50.0, (3,): 1.5}
    tokens, biases = array([plain[0], 3]), np.array([-50.0, 1.5], dtype=np.float32)
    assert complete(engine, replace(GREEDY, biased_token_ids=tokens, biases=biases)) == generate(
        model, sequence_bias=biased
    )
    banned = sorted(set(plain[:4]))
    expected = generate(model, min_new_tokens=3, eos_token_id=banned)
    held_back = complete(engine, replace(GREEDY, min_tokens=3, banned_token_ids=array(banned)))
    assert held_back[: len(expected)] == expected
    assert not set(held_back[:3]) & set(banned)
    # A ban wins over any bias.
    pushed = np.array([1e4], dtype=np.float32)
    both = replace(
        GREEDY, biased_token_ids=array(banned[:1]), biases=pushed, min_tokens=2, banned_token_ids=array(banned)
    )
    assert [token in banned for token in complete(engine, both)] == [False] * 2 + [True] * (NUM_TOKENS - 2)


def test_presence_and_frequency_count_the_completion_alone(engine: TorchEngine, model: Any) -> None:
    """The formula of OpenAI's API documentation, by hand over the model's logits."""
    expected: list[int] = []
    for _ in range(NUM_TOKENS):
        with torch.inference_mode():
            logits = model(torch.tensor([PROMPT + expected])).logits[0, -1]
        times = torch.bincount(torch.tensor(expected, dtype=torch.int64), minlength=len(logits))
        expected.append(int((logits - 1.5 * times + 6.0 * (times > 0)).argmax()))
    assert complete(engine, replace(GREEDY, presence_penalty=-6.0, frequency_penalty=1.5)) == expected
    assert expected != complete(engine, GREEDY)


def test_penalties_survive_a_preemption_and_stay_with_their_row(engine: TorchEngine) -> None:
    penalised = replace(SAMPLED, repetition_penalty=1.2, frequency_penalty=1.5, presence_penalty=-4, min_p=0.02)
    alone, plain = complete(engine, penalised), complete(engine, SAMPLED)
    assert alone != plain
    # What was generated before the preemption has to count as such: the next tokens depend on it.
    again = Job([*PROMPT, *alone[:6]], NUM_TOKENS - 6, sampling=penalised)
    Planner(engine, chunk=4).run([again])
    assert again.tokens != alone[6:], "nothing would show if it counted as prompt"
    for _ in range(2):  # the second time in rows and histories that were used before
        jobs = [Job(PROMPT, NUM_TOKENS, sampling=sampling) for sampling in (penalised, SAMPLED, penalised, SAMPLED)]
        Planner(engine, chunk=4).run(jobs, preempt_at=6)
        assert [job.tokens for job in jobs] == [alone, plain, alone, plain]


def test_row_past_its_min_tokens_costs_what_a_plain_one_costs() -> None:
    sampling = replace(GREEDY, min_tokens=2, banned_token_ids=array([3]))
    sampler = Sampler(max_rows=4, vocab_size=256, device=torch.device("cpu"))
    sampler.add(new_row(3, sampling=sampling))
    adjustments = [sampler.adjustments(np.array([3]), np.array([position])) for position in (1, 2)]
    assert adjustments[0] is not None and adjustments[0].bias_token.tolist() == [3]
    assert adjustments[1] is None


def test_limits_are_computed_for_the_rows_that_have_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """A greedy row has none, whatever its settings say."""
    sampler = Sampler(max_rows=6, vocab_size=256, device=torch.device("cpu"))
    drawn = replace(SAMPLED, top_k=0, top_p=1.0)
    greedy = {"top_k": 5, "temperature": 0.0}
    limits: list[dict[str, Any]] = [{}, {"top_k": 5}, greedy, {"min_p": 0.1}, {}, {"top_p": 0.9}]
    for row, settings in enumerate(limits):
        sampler.add(new_row(row, sampling=replace(drawn, **settings)))
    seen: list[Any] = []

    def sampled(logits: torch.Tensor, rows: Any, _: Any) -> tuple[torch.Tensor, torch.Tensor]:
        seen.append(rows)
        return torch.zeros(len(logits), dtype=torch.int64), torch.ones(len(logits), dtype=torch.bool)

    monkeypatch.setattr("data_plane.engine.sampling.sampler.sample_and_check", sampled)
    for rows in ([0, 1, 2, 3, 4, 5], [5, 0, 3], [0, 4]):
        sampler.sample(torch.zeros(len(rows), 256), np.array(rows), np.zeros(len(rows), dtype=np.int64))
    assert [rows.limited.tolist() for rows in seen] == [[1, 3, 5], [0, 2], []]


def test_rows_with_options_free_what_they_held(engine: TorchEngine) -> None:
    penalised = replace(SAMPLED, repetition_penalty=1.4, min_tokens=2, banned_token_ids=array([3]))
    Planner(engine, chunk=4).run([Job(PROMPT, 3, sampling=penalised) for _ in range(20)])
    assert engine.stats() == EngineStats(0, SamplerStats(0, 0, num_histories=0, num_history_places=32))


def logprobs_of(model: Any, tokens: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        return torch.log_softmax(model(torch.tensor([tokens])).logits[0].double(), dim=-1)


def check_returned(returned: RowLogprobs, expected: torch.Tensor, num_top: int) -> None:
    """Returned log-probabilities of tokens against the distributions before each, double [n, vocab]."""
    for index, token in enumerate(returned.token_ids.tolist()):
        of_all = expected[index]
        assert returned.logprobs[index] == pytest.approx(of_all[token].item(), abs=1e-4)
        assert returned.ranks[index] == (of_all > of_all[token]).sum() + 1
        assert returned.top_logprobs[index] == pytest.approx(of_all.topk(num_top).values.tolist(), abs=1e-4)
        assert returned.top_token_ids[index].tolist() == of_all.topk(num_top).indices.tolist()


def test_logprobs_of_prompt_and_completion_are_the_models(engine: TorchEngine, model: Any) -> None:
    """Prompt in chunks beside other rows; sampled tokens by the raw distribution, whatever changes the draw."""
    asking = replace(SAMPLED, num_logprobs=3, num_prompt_logprobs=5, repetition_penalty=2.0)
    mute = new_row(1, token_ids=array(PROMPT[:3]), num_prompt_tokens=3, block_ids=array([8]))
    fewer = new_row(2, block_ids=array([9, 10]), sampling=replace(GREEDY, num_logprobs=0))
    asker = new_row(0, block_ids=array([3, 4]), sampling=asking)
    outputs = [
        engine.execute(make_plan(1, new=[asker, mute, fewer], prefills=[(1, 3), (0, 4), (2, 7)])),
        engine.execute(make_plan(2, prefills=[(0, 3)])),
        engine.execute(make_plan(3)),
    ]
    by_row = [{returned.row: returned for returned in output.sampled_logprobs} for output in outputs]
    assert [sorted(returned) for returned in by_row] == [[2], [0, 2], [0, 2]]
    prompt = [returned for output in outputs for returned in output.prompt_logprobs]
    assert [(returned.row, returned.first_position, len(returned.token_ids)) for returned in prompt] == [
        (0, 1, 4),
        (0, 5, 2),
    ]
    assert [token for returned in prompt for token in returned.token_ids.tolist()] == PROMPT[1:]
    tokens = [*PROMPT, int(outputs[1].token_ids[outputs[1].rows.tolist().index(0)])]
    expected = logprobs_of(model, tokens)
    check_returned(prompt[0], expected[:4], 5)
    check_returned(prompt[1], expected[4:], 5)
    check_returned(by_row[1][0], expected[6:], 3)
    check_returned(by_row[2][0], expected[7:], 3)
    assert (by_row[1][0].first_position, by_row[2][0].first_position) == (7, 8)
    assert by_row[2][2].top_token_ids.shape == (1, 0) and by_row[2][2].ranks.tolist() == [1]


def test_tokens_less_likely_than_float32_can_say_are_reported_with_its_lowest_number(
    engine: TorchEngine, change_logits: ChangeLogits
) -> None:
    """Finite logits of -3e38 and 3e38: the difference of two of them is not finite. No row fails for that."""
    change_logits(lambda logits: torch.where(logits > logits.median(dim=-1, keepdim=True).values, 3e38, -3e38))
    sampling = RowSampling(3e38, 0, 1.0, 1, num_logprobs=256, num_prompt_logprobs=256)  # so hot that all are drawn
    row = new_row(block_ids=array([3, 4]), sampling=sampling)
    outputs = [engine.execute(make_plan(1, new=[row], prefills=[(0, 7)]))]
    outputs += [engine.execute(make_plan(step_id)) for step_id in range(2, 8)]
    assert all(output.rows.tolist() == [0] and not len(output.failed_rows) for output in outputs)
    returned = [returned for output in outputs for returned in (*output.prompt_logprobs, *output.sampled_logprobs)]
    assert len(returned) == 8 and all(np.isfinite(part.logprobs).all() for part in returned)
    assert LEAST_LOGPROB in returned[0].logprobs and any(LEAST_LOGPROB in part.logprobs for part in returned[1:])
    for part in returned:
        assert np.isfinite(part.top_logprobs).all() and (part.top_logprobs[:, -1] == LEAST_LOGPROB).all()


def test_prompt_whose_logits_are_not_finite_is_not_returned(engine: TorchEngine, change_logits: ChangeLogits) -> None:
    change_logits(lambda logits: logits.index_fill(1, torch.tensor([250]), float("inf")))
    sampling = replace(GREEDY, num_logprobs=0, num_prompt_logprobs=0)
    output = engine.execute(make_plan(1, new=[new_row(sampling=sampling)], prefills=[(0, 7)]))
    assert output.failed_rows.tolist() == [0] and output.prompt_logprobs == output.sampled_logprobs == []


def test_prompt_whose_logits_would_take_too_much_is_returned_alike(engine: TorchEngine) -> None:
    """In passes of 3 tokens at most, beside rows without log-probabilities and rows that decode."""
    asking = replace(SAMPLED, num_prompt_logprobs=2)
    prompts = [PROMPT * 2, PROMPT[:4], PROMPT]
    rows = [
        new_row(
            row,
            token_ids=array(prompt),
            num_prompt_tokens=len(prompt),
            block_ids=array([2 * row, 2 * row + 1]),
            sampling=sampling,
        )
        for row, (prompt, sampling) in enumerate(zip(prompts, (asking, asking, GREEDY), strict=True))
    ]
    plans = [
        make_plan(1, new=rows[2:], prefills=[(2, 7)]),
        make_plan(2, new=rows[:2], prefills=[(0, 14), (1, 4)]),
        make_plan(3),
    ]
    whole = [engine.execute(plan) for plan in plans]
    engine.reset()
    capacities = engine.capacities
    of_three = 3 * 4 * capacities.vocab_size
    small = TorchEngine(engine.model, engine.kv_cache, engine.arena, capacities, prompt_logits_bytes=of_three)
    parts = [small.execute(plan) for plan in plans]
    for output, expected in zip(parts, whole, strict=True):
        assert output.rows.tolist() == expected.rows.tolist()
        assert output.token_ids.tolist() == expected.token_ids.tolist()
    for one, other in zip(whole[1].prompt_logprobs, parts[1].prompt_logprobs, strict=True):
        assert (one.row, one.first_position, other.first_position) == (other.row, 1, 1)
        assert one.token_ids.tolist() == other.token_ids.tolist() == prompts[one.row][1:]
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-5)
        assert one.top_token_ids.tolist() == other.top_token_ids.tolist()


def test_prefills_that_ask_are_split_and_the_others_stay_whole() -> None:
    wants_logprobs = np.array([True, True])
    pieces, left = split_prefills(array([(0, 9), (1, 3)], 2), wants_logprobs, most=4)
    assert [piece.tolist() for piece in pieces] == [[[0, 4]], [[0, 3]], [[1, 1]]]
    assert left.tolist() == [[0, 2], [1, 2]]
    pieces, left = split_prefills(array([(0, 9), (1, 3)], 2), np.array([False, True]), most=4)
    assert (pieces, left.tolist()) == ([], [[0, 9], [1, 3]])


def test_fork_shares_full_blocks_and_copies_the_last(engine: TorchEngine) -> None:
    """Two samples of one prompt of 11 tokens, blocks of 8: the second from a copy of the block with tokens 8 and 9."""
    prompt = [*PROMPT, 1, 2, 3, 4]
    other = replace(SAMPLED, seed=5)
    jobs = [Job(prompt, 3, sampling=SAMPLED), Job(prompt, 3, sampling=other)]
    Planner(engine, chunk=64).run(jobs)
    first = new_row(0, token_ids=array(prompt), num_prompt_tokens=11, block_ids=array([3, 4]), sampling=SAMPLED)
    fork = new_row(
        1,
        token_ids=array(prompt),
        num_prompt_tokens=11,
        num_computed_tokens=10,
        block_ids=array([3, 9]),
        sampling=other,
    )
    outputs = [
        engine.execute(make_plan(1, new=[first], prefills=[(0, 11)])),
        engine.execute(make_plan(2, new=[fork], prefills=[(1, 1)], copies=[(4, 9)])),
        engine.execute(make_plan(3)),
        engine.execute(make_plan(4)),
    ]
    by_row = [dict(zip(output.rows.tolist(), output.token_ids.tolist(), strict=True)) for output in outputs]
    assert [by_row[step][0] for step in (0, 1, 2)] == jobs[0].tokens
    assert [by_row[step][1] for step in (1, 2, 3)] == jobs[1].tokens
    assert jobs[0].tokens != jobs[1].tokens


def test_host_fed_row_waits_for_its_token(engine: TorchEngine, model: Any) -> None:
    free = new_row(1, block_ids=array([8, 9]))
    host_fed = new_row(0, block_ids=array([3, 4]), is_host_fed=True)
    outputs = [
        engine.execute(make_plan(1, new=[host_fed, free], prefills=[(0, 7), (1, 7)])),
        engine.execute(make_plan(2)),
        engine.execute(make_plan(3, fed=[(0, 42)])),
        engine.execute(make_plan(4)),
        engine.execute(make_plan(5, fed=[(0, 7)])),
    ]
    assert [output.rows.tolist() for output in outputs] == [[0, 1], [1], [0, 1], [1], [0, 1]]
    expected = logprobs_of(model, [*PROMPT, 42, 7]).argmax(-1)[-3:].tolist()
    assert [int(outputs[step].token_ids[0]) for step in (0, 2, 4)] == expected


def test_swapped_row_goes_on_in_other_blocks(engine: TorchEngine) -> None:
    """Its blocks are another row's in the very step that moves them out."""
    expected = complete(engine, SAMPLED)[:4]
    row = new_row(0, block_ids=array([3, 4]), sampling=SAMPLED)
    heir = new_row(5, token_ids=array([9] * 12), num_prompt_tokens=12, block_ids=array([4, 3]))
    known = array([*PROMPT, *expected[:2]])
    back = new_row(0, token_ids=known, num_computed_tokens=8, block_ids=array([20, 21]), sampling=SAMPLED)
    outputs = [
        engine.execute(make_plan(1, new=[row], prefills=[(0, 7)])),
        engine.execute(make_plan(2)),
        engine.execute(make_plan(3, freed=[0], new=[heir], prefills=[(5, 12)], swap_outs=[(3, 5), (4, 0)])),
        engine.execute(make_plan(4, freed=[5], new=[back], prefills=[(0, 1)], swap_ins=[(5, 20), (0, 21)])),
        engine.execute(make_plan(5)),
    ]
    assert [int(outputs[step].token_ids[0]) for step in (0, 1, 3, 4)] == expected
    assert [output.num_moved_blocks for output in outputs] == [0, 0, 2, 2, 0]
    assert all((output.move_time_us > 0) == (output.num_moved_blocks > 0) for output in outputs)


def test_plan_of_moves_alone_samples_no_row(engine: TorchEngine) -> None:
    expected = complete(engine, SAMPLED)[:3]
    row = new_row(0, block_ids=array([3, 4]), sampling=SAMPLED)
    known = array([*PROMPT, *expected[:2]])
    back = new_row(0, token_ids=known, num_computed_tokens=8, block_ids=array([20, 21]), sampling=SAMPLED)
    outputs = [
        engine.execute(make_plan(1, new=[row], prefills=[(0, 7)])),
        engine.execute(make_plan(2)),
        engine.execute(make_plan(3, paused=[0], swap_outs=[(3, 5), (4, 0)])),
        engine.execute(make_plan(4, freed=[0], new=[back], prefills=[(0, 1)], swap_ins=[(5, 20), (0, 21)])),
    ]
    assert [output.token_ids.tolist() for output in outputs] == [[expected[0]], [expected[1]], [], [expected[2]]]
    assert outputs[2].num_moved_blocks == 2


REFUSED: dict[str, tuple[dict[str, object], str]] = {
    "min_p above 1": ({"min_p": 1.5}, "min_p 1.5"),
    "no repetition penalty": ({"repetition_penalty": 0.0}, "repetition_penalty 0.0"),
    "NaN penalty": ({"frequency_penalty": float("nan")}, "frequency_penalty nan"),
    "infinite penalty": ({"presence_penalty": float("inf")}, "presence_penalty inf"),
    "logprobs beyond the vocabulary": ({"num_logprobs": 257}, "num_logprobs 257"),
    "bias of an unknown token": (
        {"biased_token_ids": array([256]), "biases": np.ones(1, np.float32)},
        r"biased_token_ids outside \[0, 256\)",
    ),
    "bias twice": ({"biased_token_ids": array([1, 1]), "biases": np.ones(2, np.float32)}, "one token twice"),
    "NaN bias": ({"biased_token_ids": array([1]), "biases": np.full(1, np.nan, np.float32)}, "not finite"),
    "unknown banned token": ({"min_tokens": 1, "banned_token_ids": array([-1])}, "banned_token_ids outside"),
    "everything banned": ({"min_tokens": 1, "banned_token_ids": array(range(256))}, "every token of the vocabulary"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_options_out_of_range_are_refused_by_name(engine: TorchEngine, case: str) -> None:
    changes, says = REFUSED[case]
    sampling = replace(GREEDY, **changes)  # type: ignore[arg-type]  # fields by name
    with pytest.raises(PlanRefused, match=f"new row 0 .*{says}"):
        engine.execute(make_plan(new=[new_row(sampling=sampling)], prefills=[(0, 7)]))


def test_options_that_do_not_go_together_are_refused(engine: TorchEngine) -> None:
    with pytest.raises(PlanRefused, match="log-probabilities of its prompt, of which 3 tokens"):
        engine.execute(make_plan(new=[new_row(num_computed_tokens=3, sampling=replace(GREEDY, num_prompt_logprobs=1))]))
    engine.reset()
    with pytest.raises(PlanRefused, match="host-fed and has penalties"):
        engine.execute(make_plan(new=[new_row(is_host_fed=True, sampling=replace(GREEDY, presence_penalty=1.0))]))


def test_penalties_of_rows_that_go_on_are_theirs_while_others_join(engine: TorchEngine) -> None:
    """The ninth row with penalties makes the table of histories larger."""
    penalised = replace(GREEDY, repetition_penalty=1.8, frequency_penalty=1.5, presence_penalty=1.0)

    def joining(row: int) -> NewRow:
        prompt = array([5, 9, 31, 7 + row])
        blocks = array(range(3 * row, 3 * row + 3))
        return new_row(row, token_ids=prompt, num_prompt_tokens=4, block_ids=blocks, sampling=penalised)

    found = []
    for joins in (False, True):
        plans = [make_plan(1, new=[joining(row) for row in range(8)], prefills=[(row, 4) for row in range(8)])]
        plans += [make_plan(2), make_plan(3), make_plan(4, new=[joining(8)] if joins else [])]
        plans += [make_plan(step) for step in range(5, 12)]
        outputs = [engine.execute(plan) for plan in plans]
        found.append([output.token_ids[output.rows < 8].tolist() for output in outputs])
        engine.reset()
    assert found[0] == found[1]
