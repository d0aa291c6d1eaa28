"""Requests of random values: refused by field, or in range and returned as values that may be sent again."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
from motet.v1 import generation_pb2, types_pb2

from control_plane.api.generation.request import CheckedRequest, check_request
from control_plane.api.generation.sampling_params import decoding_message, sampling_message
from control_plane.errors import ContextTooLong, InvalidRequest

VOCAB_SIZE = 300
FLOATS = [math.nan, math.inf, -math.inf, -3.0, -1.0, -0.0, 1e-30, 0.5, 1.0, 1.5, 2.0, 50.0, 1e30]
COUNTS = [0, 1, 2, 3, 16, 17, 20, 21, 299, 300, 1024, 1025, 2**31, 2**32 - 1]


def check(message: generation_pb2.GenerateRequest) -> CheckedRequest:
    return check_request(message, vocab_size=VOCAB_SIZE, max_model_len=64, draw_seed=lambda: 77)


def fill(message: Any, rng: random.Random, *, share: float) -> None:
    """Set some scalar fields of a message to values from far and near."""
    for field in message.DESCRIPTOR.fields:
        if rng.random() >= share:
            continue
        if field.name == "logit_bias":
            for _ in range(rng.choice([1, 2, 1100])):
                message.logit_bias[rng.choice([0, 5, 299, 300, rng.randrange(2**32)])] = rng.choice(FLOATS)
        elif field.message_type is not None:
            fill(getattr(message, field.name), rng, share=share)
        elif field.name in ("stop", "stop_token_ids"):
            continue
        elif field.enum_type is not None:
            setattr(message, field.name, rng.choice([0, 1, 2, 3]))
        elif field.cpp_type == field.CPPTYPE_BOOL:
            setattr(message, field.name, rng.random() < 0.5)
        elif field.cpp_type == field.CPPTYPE_FLOAT:
            setattr(message, field.name, rng.choice(FLOATS))
        else:
            setattr(message, field.name, rng.choice(COUNTS))


def random_request(rng: random.Random) -> generation_pb2.GenerateRequest:
    message = generation_pb2.GenerateRequest(token_ids={"ids": [5, 6]})
    share = rng.choice([0.1, 0.3, 0.7])
    fill(message.sampling, rng, share=share)
    fill(message.stopping, rng, share=share)
    fill(message.decoding, rng, share=share)
    if rng.random() < share:
        message.priority = rng.choice([-(2**31), -101, -100, 0, 100, 101])
    if rng.random() < 0.1:
        message.resume_from.ids.append(7)
    return generation_pb2.GenerateRequest.FromString(message.SerializeToString())


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ({"sampling": {"temperature": -1}}, "sampling.temperature: is -1.0; give a value from 0 to 100; 0 is greedy"),
        ({"sampling": {"top_p": 0}}, "sampling.top_p: is 0.0; give a value above 0 and at most 1"),
        ({"sampling": {"top_k": 301}}, "sampling.top_k: is 301; give a count from 1 to the vocabulary size 300, or "),
        ({"stopping": {"max_tokens": 0}}, "stopping.max_tokens: is 0; give at least 1"),
        ({"priority": 101}, "priority: is 101; give a value from -100 to 100"),
        ({"adapter": "Legal"}, "adapter: 'Legal' is not a valid adapter id: use 1 to 63 characters of a-z, 0-9, "),
    ],
)
def test_refusal_has_the_value_and_advice(message: dict[str, Any], expected: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        check(generation_pb2.GenerateRequest(token_ids={"ids": [5]}, **message))
    assert str(caught.value).startswith(expected)


@pytest.mark.parametrize("seed", range(2))
def test_accepted_values_are_in_range_and_may_be_sent_again(seed: int) -> None:
    rng = random.Random(seed)
    num_accepted = 0
    for _ in range(700):
        message = random_request(rng)
        try:
            checked = check(message)
        except InvalidRequest as error:
            assert error.violations and all(v.field and v.description for v in error.violations)
            continue
        num_accepted += 1
        sampling, decoding = checked.sampling, checked.decoding
        numbers = [sampling.temperature, sampling.top_p, sampling.min_p, sampling.repetition_penalty]
        numbers += [sampling.presence_penalty, sampling.frequency_penalty, *(bias for _, bias in sampling.logit_bias)]
        assert all(math.isfinite(number) for number in numbers)
        assert sampling.repetition_penalty > 0 and 0 < sampling.top_p <= 1 and 0 <= sampling.min_p <= 1
        assert all(token < VOCAB_SIZE for token, _ in sampling.logit_bias)
        assert (sampling.num_logprobs or 0) <= 20 and (sampling.num_prompt_logprobs or 0) <= 20
        assert 1 <= decoding.n <= decoding.num_indices <= 1024 and abs(checked.priority) <= 100
        again = generation_pb2.GenerateRequest()
        again.CopyFrom(message)
        again.sampling.CopyFrom(sampling_message(sampling, VOCAB_SIZE))
        again.decoding.CopyFrom(decoding_message(decoding))
        assert check(again) == checked
    assert num_accepted > 100


def test_a_pristine_request_is_greedy_for_one_completion() -> None:
    checked = check(generation_pb2.GenerateRequest(token_ids=types_pb2.TokenIds(ids=[5])))
    assert (checked.sampling.temperature, checked.sampling.seed, checked.decoding.num_indices) == (0.0, 77, 1)
    assert not checked.decoding.is_ranked


@pytest.mark.parametrize("field", ["token_ids", "resume_from.ids"])
def test_more_token_ids_than_the_context_takes_are_refused_before_they_are_read(field: str) -> None:
    """By their number alone: nothing is said of the ids, of which each is wrong."""
    message = generation_pb2.GenerateRequest(token_ids={"ids": [5]})
    ids = message.token_ids.ids if field == "token_ids" else message.resume_from.ids
    ids.extend([VOCAB_SIZE] * 64)
    with pytest.raises(ContextTooLong, match=rf"^{field}: .*6[45] tokens; at most 63") as caught:
        check(message)
    assert [violation.field for violation in caught.value.violations] == [field]
