"""The fault rounds' own checks see what they are there for: wrong tokens, mixed versions, missed targets."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from motet import Chunk, FinishReason, Unavailable

from contract.fingerprint import checkpoint_fingerprint
from tests.fakes.hash_model import oracle
from tests.hostile.faults.load import Call, problem_of
from tests.hostile.faults.report import table, verdict
from tests.hostile.faults.rounds import RoundResult, Window
from tests.hostile.faults.truth import HashTruth, Job
from tests.makers import make_checkpoint, make_tokenizer

DIGESTS = ["ab" * 32, "cd" * 32]
JOB = Job((5, 6, 7), "some", 12)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tokenizer(make_checkpoint(tmp_path_factory.mktemp("model"), arch="llama"))


@pytest.fixture
def truth(model_dir: Path) -> HashTruth:
    return HashTruth(model_dir, ["some"])


def answered(truth: HashTruth, tokens: list[int], *, digest: str = DIGESTS[0]) -> Call:
    """A call that got these tokens, each in a chunk of its own, a second apart."""
    call = Call(JOB, False, 0.0, 30.0, is_ended=True)
    for place, token in enumerate(tokens):
        chunk = Chunk(text="", token_ids=(token,), token_offset=place, adapter_digest=digest)
        call.take(chunk, float(place + 1))
    call.texts[0] = truth.text(tokens)
    call.reasons[0] = FinishReason.LENGTH
    return call


def known(model_dir: Path) -> list[int]:
    return oracle(checkpoint_fingerprint(model_dir), DIGESTS[0], JOB.prompt, JOB.num_tokens)


def test_a_right_completion_has_no_problem(truth: HashTruth, model_dir: Path) -> None:
    assert problem_of(answered(truth, known(model_dir)), truth, {"some": set(DIGESTS)}) == ""


@pytest.mark.parametrize("place", [0, 5, 11])
def test_one_wrong_token_is_seen(truth: HashTruth, model_dir: Path, place: int) -> None:
    tokens = known(model_dir)
    tokens[place] ^= 1
    assert f"token {place} is {tokens[place]}" in problem_of(answered(truth, tokens), truth, {"some": set(DIGESTS)})


def test_a_lost_and_a_doubled_token_are_seen(truth: HashTruth, model_dir: Path) -> None:
    tokens = known(model_dir)
    for changed in (tokens[:3] + tokens[4:], tokens[:3] + tokens[2:], tokens[:-1], [*tokens, 9]):
        assert problem_of(answered(truth, changed), truth, {"some": set(DIGESTS)})


def test_a_completion_of_another_version_or_of_two_is_seen(truth: HashTruth, model_dir: Path) -> None:
    tokens = known(model_dir)
    assert problem_of(answered(truth, tokens, digest=DIGESTS[1]), truth, {"some": set(DIGESTS)})
    assert "version" in problem_of(answered(truth, tokens), truth, {"some": {DIGESTS[1]}})
    mixed = answered(truth, tokens)
    mixed.digests.add(DIGESTS[1])
    assert "versions" in problem_of(mixed, truth, {"some": set(DIGESTS)})


def test_another_text_is_seen(truth: HashTruth, model_dir: Path) -> None:
    call = answered(truth, known(model_dir))
    call.texts[0] += "x"
    assert "text" in problem_of(call, truth, {"some": set(DIGESTS)})


def test_wrong_tokens_of_a_call_that_failed_are_seen(truth: HashTruth, model_dir: Path) -> None:
    tokens = known(model_dir)[:4]
    call = answered(truth, tokens)
    call.fail(Unavailable("gone", reason="WORKER_LOST"), 5.0)
    assert problem_of(call, truth, {"some": set(DIGESTS)}) == ""
    assert call.error == "Unavailable WORKER_LOST"
    call.token_ids[0][2] ^= 1
    assert problem_of(call, truth, {"some": set(DIGESTS)})


def test_a_wait_belongs_to_the_faults_that_it_met(truth: HashTruth, model_dir: Path) -> None:
    call = answered(truth, known(model_dir))
    call.take(Chunk(text="", token_ids=(9,), token_offset=12, adapter_digest=DIGESTS[0]), 20.0)
    assert (call.longest_gap_s, call.gap_begun_s, call.first_s) == (8.0, 12.0, 1.0)
    assert Window("fault", 19.0, 19.5).overlaps(call)
    assert Window("fault", 11.0, 12.5).overlaps(call)
    assert not Window("fault", 2.0, 3.0).overlaps(call)
    assert not Window("fault", 21.0, 22.0).overlaps(call)


def test_the_verdict_names_everything_that_misses_its_target() -> None:
    clean = RoundResult(1, ("worker killed",), False, num_right=9, waits_s=[0.1] * 99 + [1.4])
    assert verdict([clean]) == []
    for what in ("wrong", "avoidable", "hung", "problems"):
        change: dict[str, Any] = {what: ["something"]}
        assert verdict([dataclasses.replace(clean, **change)]) == [f"round 1 (worker killed), {what}: something"]
    slow = dataclasses.replace(clean, waits_s=[0.1] * 90 + [1.6] * 10)
    assert verdict([slow]) == ["worker killed: longest wait for a token, p99, is 1.60 s; at most 1.5 s"]
    both = dataclasses.replace(slow, names=("redis killed", "worker killed"))
    assert verdict([both]) == []
    assert "two or three of them" in table([clean, both])
