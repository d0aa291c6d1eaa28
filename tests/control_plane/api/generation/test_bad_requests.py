"""Requests that are refused before a worker hears of them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from motet.v1 import generation_pb2, types_pb2

from control_plane.api.text.codec import TextCodec
from control_plane.registry.model.served_modules import WorkerReport
from control_plane.scheduler.types import FinishReason
from tests.control_plane.api.fake_adapters import DIGEST
from tests.control_plane.api.fakes import Api, details, job_event
from tests.control_plane.api.generation.calls import generate, request, script, stopping
from tests.control_plane.api.tokenizers import byte_level_tokenizer

INVALID = grpc.StatusCode.INVALID_ARGUMENT
LEAKS = re.compile(r"/tmp|/root|/home|Traceback|\.py\b|<class|redis", re.IGNORECASE)


def sampling(**fields: Any) -> generation_pb2.GenerateRequest:
    return request(sampling=types_pb2.SamplingParams(**fields))


def decoding(**fields: Any) -> generation_pb2.GenerateRequest:
    return request(decoding=types_pb2.DecodingParams(**fields))


def beams(**fields: Any) -> generation_pb2.GenerateRequest:
    return request(decoding={"beam_search": {"width": 2}}, **fields)


def uses(*adapters: dict[str, Any], **fields: Any) -> generation_pb2.GenerateRequest:
    return request(adapters=[generation_pb2.AdapterUse(**each) for each in adapters], **fields)


BAD: dict[str, tuple[generation_pb2.GenerateRequest, str]] = {
    "no input": (generation_pb2.GenerateRequest(), "input"),
    "empty text": (request(text=""), "text"),
    "empty token ids": (request(token_ids=types_pb2.TokenIds()), "token_ids.ids"),
    "empty chat": (request(chat=types_pb2.ChatMessages()), "chat.messages"),
    "empty role": (request(chat=types_pb2.ChatMessages(messages=[{"content": "x"}])), "chat.messages[0].role"),
    "refused by the template": (
        request(chat=types_pb2.ChatMessages(messages=[{"role": "tool", "content": "x"}])),
        "chat",
    ),
    "token id": (request(token_ids=types_pb2.TokenIds(ids=[1, 300])), "token_ids.ids[1]"),
    "wrapped token id": (request(token_ids=types_pb2.TokenIds(ids=[2**32 - 1])), "token_ids.ids[0]"),
    "prompt too long": (request(token_ids=types_pb2.TokenIds(ids=[1] * 64)), "token_ids"),
    "text too long": (request(text="x" * 64), "text"),
    "prompt and max_tokens": (stopping(max_tokens=62), "stopping.max_tokens"),
    "NaN temperature": (sampling(temperature=float("nan")), "sampling.temperature"),
    "negative temperature": (sampling(temperature=-0.5), "sampling.temperature"),
    "large temperature": (sampling(temperature=101), "sampling.temperature"),
    "infinite temperature": (sampling(temperature=float("inf")), "sampling.temperature"),
    "top_k 0": (sampling(top_k=0), "sampling.top_k"),
    "wrapped top_k": (sampling(top_k=2**32 - 1), "sampling.top_k"),
    "top_p 0": (sampling(top_p=0), "sampling.top_p"),
    "top_p 1.01": (sampling(top_p=1.01), "sampling.top_p"),
    "NaN top_p": (sampling(top_p=float("nan")), "sampling.top_p"),
    "min_p above 1": (sampling(min_p=1.5), "sampling.min_p"),
    "NaN min_p": (sampling(min_p=float("nan")), "sampling.min_p"),
    "repetition_penalty 0": (sampling(repetition_penalty=0), "sampling.repetition_penalty"),
    "small repetition_penalty": (sampling(repetition_penalty=0.0099), "sampling.repetition_penalty"),
    "tiny repetition_penalty": (sampling(repetition_penalty=1e-38), "sampling.repetition_penalty"),
    "infinite repetition_penalty": (sampling(repetition_penalty=float("inf")), "sampling.repetition_penalty"),
    "presence_penalty": (sampling(presence_penalty=2.5), "sampling.presence_penalty"),
    "NaN frequency_penalty": (sampling(frequency_penalty=float("nan")), "sampling.frequency_penalty"),
    "frequency_penalty": (sampling(frequency_penalty=-2.5), "sampling.frequency_penalty"),
    "bias of an unknown token": (sampling(logit_bias={300: 1.0}), "sampling.logit_bias[300]"),
    "NaN bias": (sampling(logit_bias={3: float("nan")}), "sampling.logit_bias[3]"),
    "infinite bias": (sampling(logit_bias={3: float("-inf")}), "sampling.logit_bias[3]"),
    "large bias": (sampling(logit_bias={3: 100.5}), "sampling.logit_bias[3]"),
    "many biases": (sampling(logit_bias=dict.fromkeys(range(1025), 0.0)), "sampling.logit_bias"),
    "logprobs": (sampling(logprobs=21), "sampling.logprobs"),
    "prompt_logprobs": (sampling(prompt_logprobs=2**32 - 1), "sampling.prompt_logprobs"),
    "min_tokens above max_tokens": (stopping(max_tokens=3, min_tokens=4), "stopping.min_tokens"),
    "min_tokens above the context": (stopping(min_tokens=2**32 - 1), "stopping.min_tokens"),
    "n 0": (decoding(n=0), "decoding.n"),
    "n 2^32-1": (decoding(n=2**32 - 1), "decoding.n"),
    "best_of below n": (decoding(n=3, best_of=2), "decoding.best_of"),
    "best_of 2^32-1": (decoding(best_of=2**32 - 1), "decoding.best_of"),
    "one beam": (decoding(beam_search={"width": 1}), "decoding.beam_search.width"),
    "no width": (decoding(beam_search={}), "decoding.beam_search.width"),
    "17 beams": (decoding(beam_search={"width": 17}), "decoding.beam_search.width"),
    "NaN length_penalty": (
        decoding(beam_search={"width": 2, "length_penalty": float("nan")}),
        "decoding.beam_search.length_penalty",
    ),
    "length_penalty": (
        decoding(beam_search={"width": 2, "length_penalty": -10.5}),
        "decoding.beam_search.length_penalty",
    ),
    "more completions than beams": (decoding(n=3, beam_search={"width": 2}), "decoding.n"),
    "best_of of beams": (decoding(best_of=2, beam_search={"width": 2}), "decoding.best_of"),
    "stop string with beams": (beams(stopping={"stop": ["x"]}), "stopping.stop"),
    "temperature with beams": (beams(sampling={"temperature": 0.5}), "sampling.temperature"),
    "top_k with beams": (beams(sampling={"top_k": 5}), "sampling.top_k"),
    "bias with beams": (beams(sampling={"logit_bias": {3: 1.0}}), "sampling.logit_bias"),
    "logprobs with beams": (beams(sampling={"logprobs": 0}), "sampling.logprobs"),
    "penalty with beams": (beams(sampling={"repetition_penalty": 1.5}), "sampling.repetition_penalty"),
    "priority": (request(priority=101), "priority"),
    "low priority": (request(priority=-(2**31)), "priority"),
    "resume of several completions": (
        request(decoding={"n": 2}, resume_from=types_pb2.TokenIds(ids=[3])),
        "resume_from",
    ),
    "resume of beams": (beams(resume_from=types_pb2.TokenIds(ids=[3])), "resume_from"),
    "prompt logprobs of a resumed stream": (
        request(sampling={"prompt_logprobs": 1}, resume_from=types_pb2.TokenIds(ids=[3])),
        "sampling.prompt_logprobs",
    ),
    "max_tokens 0": (stopping(max_tokens=0), "stopping.max_tokens"),
    "wrapped max_tokens": (stopping(max_tokens=2**32 - 1), "stopping.max_tokens"),
    "empty stop": (stopping(stop=["a", ""]), "stopping.stop[1]"),
    "long stop": (stopping(stop=["a" * 257]), "stopping.stop[0]"),
    "many stops": (stopping(stop=["a"] * 17), "stopping.stop"),
    "stop token": (stopping(stop_token_ids=[300]), "stopping.stop_token_ids[0]"),
    "many stop tokens": (stopping(stop_token_ids=[3] * 257), "stopping.stop_token_ids"),
    "path as adapter": (request(adapter="../../etc/passwd"), "adapter"),
    "two dots": (request(adapter="a..b"), "adapter"),
    "bad digest": (request(adapter="x", adapter_digest="zz"), "adapter_digest"),
    "digest without adapter": (request(adapter_digest=DIGEST), "adapter_digest"),
    "adapter and adapters": (uses({"name": "x"}, adapter="y"), "adapters"),
    "five adapters": (uses(*({"name": name} for name in "abcde")), "adapters"),
    "path in adapters": (uses({"name": "a"}, {"name": "../b"}), "adapters[1].name"),
    "adapter without a name": (uses({"scale": 1.0}), "adapters[0].name"),
    "bad digest in adapters": (uses({"name": "a", "digest": "zz"}), "adapters[0].digest"),
    "an adapter twice": (uses({"name": "a"}, {"name": "adapters/a", "scale": 2.0}), "adapters[1].name"),
    "scale nan": (uses({"name": "a", "scale": float("nan")}), "adapters[0].scale"),
    "scale inf": (uses({"name": "a", "scale": float("-inf")}), "adapters[0].scale"),
    "large scale": (uses({"name": "a", "scale": 100.5}), "adapters[0].scale"),
    "unknown combination": (uses({"name": "a"}, {"name": "b"}, combination=9), "combination"),
    "combination of one adapter": (uses({"name": "a"}, combination=2), "combination"),
    "combination without adapters": (request(adapter="a", combination=1), "combination"),
    "long request id": (request(request_id="r" * 129), "request_id"),
    "control character": (request(request_id="a\nb"), "request_id"),
    "long salt": (request(cache_salt="é" * 65), "cache_salt"),
    "resume beyond max_tokens": (
        request(stopping={"max_tokens": 1}, resume_from=types_pb2.TokenIds(ids=[3, 4])),
        "resume_from.ids",
    ),
    "resume beyond the default": (
        request(token_ids=types_pb2.TokenIds(ids=[1] * 60), resume_from=types_pb2.TokenIds(ids=[3] * 5)),
        "resume_from.ids",
    ),
    "resume token": (request(resume_from=types_pb2.TokenIds(ids=[300])), "resume_from.ids[0]"),
    "model fingerprint": (
        request(preconditions={"model_fingerprint": "f" * 63}),
        "preconditions.model_fingerprint",
    ),
    "prompt hash": (request(preconditions={"prompt_sha256": "F" * 64}), "preconditions.prompt_sha256"),
    "render time before 1970": (
        request(chat={"messages": [{"role": "user"}], "render_time": {"seconds": -1}}),
        "chat.render_time",
    ),
    "render time after 3000": (
        request(chat={"messages": [{"role": "user"}], "render_time": {"seconds": 2**62}}),
        "chat.render_time",
    ),
    "nanoseconds of the render time": (
        request(chat={"messages": [{"role": "user"}], "render_time": {"nanos": 10**9}}),
        "chat.render_time",
    ),
}


@pytest.mark.parametrize("what", BAD)
async def test_bad_request_names_its_field_and_reaches_no_worker(api: Api, what: str) -> None:
    message, field = BAD[what]
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await generate(api, message)
    assert caught.value.code() == INVALID
    info, fields, _ = details(caught.value)
    assert fields == [field]
    assert info.reason in ("FIELD_INVALID", "CONTEXT_TOO_LONG")
    assert not LEAKS.search(caught.value.details() or "")
    assert not api.fleet.requests


@pytest.mark.parametrize("ignore_eos", [False, True])
async def test_stop_tokens_that_leave_nothing_to_choose_are_refused(tmp_path: Path, *, ignore_eos: bool) -> None:
    """A worker would refuse the whole step, and end its session."""
    codec = TextCodec(byte_level_tokenizer(), None)
    async with Api(tmp_path, codec, vocab_size=8).running() as api:
        script(api, job_event([5], FinishReason.LENGTH))
        others = [token_id for token_id in range(8) if token_id != 1]  # 1 is the end-of-sequence token
        fields = {"stop_token_ids": [*others, 1] if ignore_eos else others, "ignore_eos": ignore_eos}
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await generate(api, stopping(min_tokens=1, **fields))
        assert details(caught.value)[1] == ["stopping.stop_token_ids"]
        assert "whole vocabulary of 8" in (caught.value.details() or "") and not api.fleet.requests
        assert await generate(api, stopping(**fields))
        assert await generate(api, stopping(min_tokens=1, **fields | {"stop_token_ids": others[1:]}))
    await codec.close()


async def test_smallest_repetition_penalty_may_be_sent(api: Api) -> None:
    script(api, job_event([5], FinishReason.LENGTH))
    responses = await generate(api, sampling(repetition_penalty=0.01))
    assert abs(responses[0].started.sampling.repetition_penalty - 0.01) < 1e-8


async def test_context_too_long_has_the_numbers(api: Api) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await generate(api, stopping(max_tokens=62))
    message = caught.value.details() or ""
    assert details(caught.value)[0].reason == "CONTEXT_TOO_LONG"
    assert all(number in message for number in ("62", "3 tokens", "64", "61"))


async def test_the_context_is_that_of_the_workers_at_present(api: Api) -> None:
    """Never more than they compute: a request for more is refused, and never shortened."""
    script(api, job_event([7], FinishReason.LENGTH))
    await generate(api, stopping(max_tokens=61))
    api.served.update([WorkerReport(max_model_len=40)])
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await generate(api, stopping(max_tokens=61))
    assert details(caught.value)[0].reason == "CONTEXT_TOO_LONG"
    assert "the context of 40 tokens; at most 37" in (caught.value.details() or "")
    await generate(api, request())
    assert [work.max_tokens for work in api.fleet.requests] == [61, 37]


async def test_without_a_length_from_anybody_requests_wait_for_a_worker(tmp_path: Path) -> None:
    async with Api(tmp_path, TextCodec(None, None, reason="not needed"), max_model_len=None).running() as api:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await generate(api, request())
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    assert details(caught.value)[0].reason == "NO_WORKER"


async def test_all_violations_are_in_one_refusal(api: Api) -> None:
    message = request(sampling={"temperature": -1, "top_p": 2}, request_id="x" * 200)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await generate(api, message)
    assert details(caught.value)[1] == ["request_id", "sampling.temperature", "sampling.top_p"]


@pytest.mark.parametrize("raw", [b"\x0a\xff\xff\xff\xff\x0f", b"\x12\x02\xff\xfe", b"\x0f", b"\xff" * 30])
async def test_malformed_protobuf_is_invalid_argument(api: Api, raw: bytes) -> None:
    channel: Any = api.channel
    call = channel.unary_stream("/motet.v1.GenerationService/Generate")
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async for _ in call(raw):
            pass
    assert caught.value.code() == INVALID
    assert details(caught.value)[1] == ["request"]


async def test_unknown_adapter_is_not_found_with_nearest_names(api: Api) -> None:
    api.registry.add("poet")
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await generate(api, request(adapter="adapters/poets"))
    assert caught.value.code() == grpc.StatusCode.NOT_FOUND
    info, _, others = details(caught.value)
    assert info.reason == "ADAPTER_NOT_FOUND"
    assert others[0].resource_name == "adapters/poets"
    assert "poet" in (caught.value.details() or "")
