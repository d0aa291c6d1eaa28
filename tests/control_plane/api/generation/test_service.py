"""GenerationService over a real channel: checks, stream semantics, cancellation, stop strings, resume."""

from __future__ import annotations

import asyncio
import hashlib
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from motet.v1 import generation_pb2, generation_pb2_grpc, types_pb2

from control_plane.api.text.chat_renderer import ChatRenderer
from control_plane.api.text.codec import TextCodec
from control_plane.errors import NoWorker, QueueFull
from control_plane.fleet.requests.streams import JobEvent
from control_plane.registry.model.served_modules import WorkerReport
from control_plane.scheduler.types import FinishReason, Request, Sampling
from tests.control_plane.api.fakes import (
    DIGEST,
    OTHER_DIGEST,
    Api,
    ScriptedJob,
    byte_level_tokenizer,
    details,
    job_event,
)

INVALID = grpc.StatusCode.INVALID_ARGUMENT
LEAKS = re.compile(r"/tmp|/root|/home|Traceback|\.py\b|<class|redis", re.IGNORECASE)
TOKENIZER = byte_level_tokenizer()


def ids_of(*tokens: str) -> list[int]:
    vocab = TOKENIZER.get_vocab()
    return [vocab[token] for token in tokens]


def request(**fields: Any) -> generation_pb2.GenerateRequest:
    if not {"text", "chat", "token_ids"} & set(fields):
        fields["token_ids"] = types_pb2.TokenIds(ids=[5, 6, 7])
    return generation_pb2.GenerateRequest(**fields)


def sampling(**fields: Any) -> generation_pb2.GenerateRequest:
    return request(sampling=types_pb2.SamplingParams(**fields))


def stopping(**fields: Any) -> generation_pb2.GenerateRequest:
    return request(stopping=types_pb2.StoppingParams(**fields))


def decoding(**fields: Any) -> generation_pb2.GenerateRequest:
    return request(decoding=types_pb2.DecodingParams(**fields))


def beams(**fields: Any) -> generation_pb2.GenerateRequest:
    return request(decoding={"beam_search": {"width": 2}}, **fields)


def script(api: Api, *events: JobEvent | Exception) -> None:
    api.fleet.on_submit = lambda job, _request: job.script(*events)


async def generate(api: Api, message: generation_pb2.GenerateRequest) -> list[generation_pb2.GenerateResponse]:
    return [response async for response in api.stub(generation_pb2_grpc.GenerationServiceStub).Generate(message)]


def text_of(responses: list[generation_pb2.GenerateResponse]) -> str:
    return "".join(response.delta.text for response in responses)


def tokens_of(responses: list[generation_pb2.GenerateResponse]) -> list[int]:
    return [token for response in responses for token in response.delta.token_ids]


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


async def test_stream_starts_with_the_first_token_and_finishes_once(api: Api) -> None:
    api.registry.add("poet")
    script(api, job_event(ids_of("he")), job_event(ids_of("ll", "o")), job_event(ids_of("!"), FinishReason.LENGTH))
    api.now_s = 100.0
    responses = await generate(
        api,
        request(
            adapter="poet",
            request_id="mine",
            sampling={"temperature": 0.5, "top_p": 0.5, "seed": 9},
            stopping={"max_tokens": 4, "stop": ["zzz"], "stop_token_ids": [8, 7]},
        ),
    )
    assert [r.WhichOneof("event") for r in responses] == ["started", "delta", "delta", "delta", "finished"]
    started, finished = responses[0].started, responses[-1].finished
    assert (started.request_id, started.adapter, started.adapter_digest) == ("mine", "adapters/poet", DIGEST)
    assert (started.prompt_tokens, started.cached_tokens, started.queue_time.ToMilliseconds()) == (3, 2, 250)
    assert (started.sampling.temperature, started.sampling.top_k, started.sampling.seed) == (0.5, 300, 9)
    assert started.stopping == types_pb2.StoppingParams(
        max_tokens=4, stop=["zzz"], stop_token_ids=[7, 8], ignore_eos=False, min_tokens=0
    )
    assert started.stopping.HasField("ignore_eos")
    deltas = [r.delta for r in responses[1:-1]]
    assert [(d.token_offset, d.completion_tokens) for d in deltas] == [(0, 1), (1, 3), (3, 4)]
    assert "".join(d.text for d in deltas) == "hello!"
    assert finished.reason == types_pb2.FINISH_REASON_LENGTH
    assert finished.usage == types_pb2.Usage(prompt_tokens=3, cached_tokens=2, completion_tokens=4)
    assert finished.seed == 9
    submitted = api.fleet.requests[0]
    assert submitted.adapter is not None and submitted.adapter.digest == DIGEST
    assert submitted.stop_token_ids == {1, 7, 8}  # the checkpoint's end-of-sequence token too
    assert submitted.arrival_s == 100.0 and submitted.deadline_s is None


async def test_defaults_are_made_effective(api: Api) -> None:
    script(api, job_event([5], FinishReason.LENGTH))
    responses = await generate(api, request(text="he"))
    started = responses[0].started
    assert started.request_id == "req-1"
    assert started.stopping.max_tokens == 63  # what is left of the context
    assert started.sampling.seed == 1234
    assert started.sampling.temperature == 0 and started.sampling.HasField("temperature")
    assert started.sampling.top_p == 1
    assert api.fleet.requests[0].sampling == Sampling(seed=1234)
    assert started.decoding == types_pb2.DecodingParams(n=1, best_of=1)
    assert started.tenant == api.fleet.requests[0].tenant == "default"
    assert api.fleet.requests[0].account == "default at ipv4:127.0.0.1"
    # What `started` reports may be sent back as it is.
    again = await generate(
        api,
        request(text="he", sampling=started.sampling, stopping=started.stopping, decoding=started.decoding),
    )
    assert again[0].started.sampling == started.sampling


async def test_nothing_is_sent_before_the_first_token(api: Api) -> None:
    call = api.stub(generation_pb2_grpc.GenerationServiceStub).Generate(request())
    metadata = asyncio.ensure_future(call.initial_metadata())
    await api.fleet.submitted.wait()
    assert not metadata.done()
    api.fleet.jobs[0].script(job_event([5], FinishReason.LENGTH))
    responses = aiter(call)
    assert (await anext(responses)).WhichOneof("event") == "started"
    assert await metadata is not None
    assert [response.WhichOneof("event") async for response in responses] == ["delta", "finished"]


async def test_cancelling_the_call_cancels_the_job(api: Api) -> None:
    call = api.stub(generation_pb2_grpc.GenerationServiceStub).Generate(request())
    await api.fleet.submitted.wait()
    call.cancel()
    await asyncio.wait_for(api.fleet.jobs[0].is_cancelled.wait(), 5)


async def test_deadline_reaches_the_request_and_ends_the_call(api: Api) -> None:
    call = api.stub(generation_pb2_grpc.GenerationServiceStub).Generate(request(), timeout=0.2)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call.read()
    assert caught.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
    deadline_s = api.fleet.requests[0].deadline_s
    assert deadline_s is not None and 100.0 < deadline_s < 100.3  # gRPC rounds what is left by a millisecond or so
    await asyncio.wait_for(api.fleet.jobs[0].is_cancelled.wait(), 5)


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (QueueFull("8 requests wait, at most 8; try again", retry_after_s=2.5), grpc.StatusCode.RESOURCE_EXHAUSTED),
        (NoWorker("no worker is attached; try again"), grpc.StatusCode.UNAVAILABLE),
    ],
)
async def test_error_of_the_fleet_ends_the_stream_by_status(api: Api, error: Any, code: grpc.StatusCode) -> None:
    script(api, job_event([5]), error)
    call = api.stub(generation_pb2_grpc.GenerationServiceStub).Generate(request())
    responses = aiter(call)
    assert (await anext(responses)).WhichOneof("event") == "started"
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async for _ in responses:
            pass
    assert caught.value.code() == code
    info, _, others = details(caught.value)
    assert info.reason == error.reason
    assert others[0].retry_delay.ToMilliseconds() == int(error.retry_after_s * 1000)
    assert api.fleet.jobs[0].is_cancelled.is_set()


async def test_job_that_ends_without_a_reason_is_internal_and_scrubbed(api: Api) -> None:
    script(api, job_event([5]), RuntimeError("secret /root/path"))
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await generate(api, request())
    assert caught.value.code() == grpc.StatusCode.INTERNAL
    assert "secret" not in (caught.value.details() or "")
    assert details(caught.value)[0].metadata["correlation_id"] in (caught.value.details() or "")


async def test_draining_refuses_new_requests(api: Api) -> None:
    api.gate.close()
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await generate(api, request())
    assert caught.value.code() == grpc.StatusCode.UNAVAILABLE
    assert details(caught.value)[0].reason == "DRAINING"


async def test_stop_string_over_tokens_and_events_cuts_exactly(api: Api) -> None:
    script(api, job_event(ids_of("he", "ll")), job_event(ids_of("o", "!", "he")))
    responses = await generate(api, request(stopping={"stop": ["llo", "xyz"], "max_tokens": 9}))
    assert text_of(responses) == "he"
    assert tokens_of(responses) == ids_of("he", "ll", "o")  # what came after the stop string is not sent
    finished = responses[-1].finished
    assert (finished.reason, finished.stop_string) == (types_pb2.FINISH_REASON_STOP_STRING, "llo")
    assert finished.usage.completion_tokens == 3
    assert api.fleet.jobs[0].is_cancelled.is_set()


async def test_held_text_is_delivered_at_the_end(api: Api) -> None:
    script(api, job_event(ids_of("he", "ll")), job_event(ids_of("ðŁ"), FinishReason.LENGTH))
    responses = await generate(api, request(stopping={"stop": ["hello"]}))
    assert [r.delta.text for r in responses[1:-1]] == ["", "hell\ufffd"]


async def test_stop_token_counts_and_has_no_text(api: Api) -> None:
    script(api, job_event(ids_of("he", "ll", "o"), FinishReason.STOP_TOKEN))
    responses = await generate(api, request(stopping={"stop_token_ids": ids_of("o")}))
    assert text_of(responses) == "hell"
    assert tokens_of(responses) == ids_of("he", "ll", "o")
    assert responses[-1].finished.reason == types_pb2.FINISH_REASON_STOP_TOKEN


async def test_ignore_eos_leaves_only_the_clients_stop_tokens(api: Api) -> None:
    script(api, job_event([5], FinishReason.LENGTH))
    await generate(api, stopping(ignore_eos=True, stop_token_ids=[9]))
    assert api.fleet.requests[0].stop_token_ids == {9}


@pytest.mark.parametrize("stops", [["zzz"], ["o 😀 "], ["😀"]])
async def test_broken_stream_resumes_with_exactly_the_missing_text(api: Api, stops: list[str]) -> None:
    """Cut after every token: text before and after the cut join to the unbroken text."""
    ids = ids_of("he", "ll", "o", "Ġ", "ðŁ", "ĺ", "Ģ", "Ġa", "!")
    script(api, *[job_event([token]) for token in ids[:-1]], job_event(ids[-1:], FinishReason.LENGTH))
    message = request(stopping={"stop": stops, "max_tokens": len(ids)})
    whole = await generate(api, message)
    deltas = [response.delta for response in whole if response.WhichOneof("event") == "delta"]
    for cut in range(1, len(deltas)):
        received = [token for delta in deltas[:cut] for token in delta.token_ids]

        def rest(job: ScriptedJob, work: Request) -> None:
            assert list(work.generated_token_ids) == received  # noqa: B023
            job.script(job_event(ids[len(received) :], FinishReason.LENGTH))  # noqa: B023

        api.fleet.on_submit = rest
        resumed = await generate(
            api,
            request(stopping={"stop": stops, "max_tokens": len(ids)}, resume_from=types_pb2.TokenIds(ids=received)),
        )
        assert resumed[1].delta.token_offset == len(received)
        assert text_of(whole[: cut + 1]) + text_of(resumed) == text_of(whole)
        assert received + tokens_of(resumed) == tokens_of(whole)
        assert resumed[-1].finished.usage == whole[-1].finished.usage
        assert resumed[-1].finished.reason == whole[-1].finished.reason


@pytest.mark.parametrize(
    ("stopping_fields", "received", "reason"),
    [
        ({"max_tokens": 2}, ["he", "ll"], types_pb2.FINISH_REASON_LENGTH),
        ({"stop_token_ids": ids_of("o")}, ["he", "o"], types_pb2.FINISH_REASON_STOP_TOKEN),
        ({"stop": ["el"]}, ["he", "ll"], types_pb2.FINISH_REASON_STOP_STRING),
    ],
)
async def test_stream_that_lost_only_its_end_gets_it_without_work(
    api: Api, stopping_fields: dict[str, Any], received: list[str], reason: int
) -> None:
    responses = await generate(
        api, request(stopping=stopping_fields, resume_from=types_pb2.TokenIds(ids=ids_of(*received)))
    )
    assert [response.WhichOneof("event") for response in responses] == ["started", "finished"]
    assert responses[1].finished.reason == reason
    assert responses[1].finished.usage.completion_tokens == 2
    assert not api.fleet.requests


async def test_started_names_the_model_and_the_prompt(api: Api) -> None:
    script(api, job_event([5], FinishReason.LENGTH))
    ids = [5, 6, 299]
    started = (await generate(api, request(token_ids={"ids": ids})))[0].started
    words = b"".join(token.to_bytes(4, "little") for token in ids)
    assert (started.model_fingerprint, started.prompt_sha256) == ("f" * 64, hashlib.sha256(words).hexdigest())
    assert not started.HasField("render_time")


@pytest.mark.parametrize("fields", [{"model_fingerprint": "0" * 64}, {"prompt_sha256": "0" * 64}])
async def test_resume_on_another_model_or_prompt_is_refused(api: Api, fields: dict[str, str]) -> None:
    script(api, job_event([5], FinishReason.LENGTH))
    started = (await generate(api, request()))[0].started
    expected = {"model_fingerprint": started.model_fingerprint, "prompt_sha256": started.prompt_sha256}
    resume_from = types_pb2.TokenIds(ids=[5])
    await generate(api, request(preconditions=expected, resume_from=resume_from))
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await generate(api, request(preconditions=expected | fields, resume_from=resume_from))
    assert caught.value.code() == grpc.StatusCode.FAILED_PRECONDITION
    assert details(caught.value)[0].reason == "PRECONDITION_FAILED"
    (field,) = fields
    message = caught.value.details() or ""
    assert message.startswith(f"preconditions.{field}: ") and message.endswith(
        "send a new request, without resume_from and preconditions"
    )
    assert len(api.fleet.requests) == 2


async def test_conversation_that_prints_the_date_is_the_same_prompt_at_the_reported_time(tmp_path: Path) -> None:
    template = "{{ strftime_now('%d %H:%M:%S') }}{{ messages[0].content }}"
    codec = TextCodec(byte_level_tokenizer(), ChatRenderer(template, {}))
    chat: dict[str, Any] = {"messages": [{"role": "user", "content": "he"}]}
    async with Api(tmp_path, codec).running() as api:
        script(api, job_event([5], FinishReason.LENGTH))
        started = (await generate(api, request(chat=chat)))[0].started
        assert started.render_time.ToSeconds() == api.wall_s
        api.wall_s += 24 * 3600.0
        expected = {"model_fingerprint": started.model_fingerprint, "prompt_sha256": started.prompt_sha256}
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await generate(api, request(chat=chat, preconditions=expected))
        assert details(caught.value)[0].reason == "PRECONDITION_FAILED"
        again = (
            await generate(api, request(chat=chat | {"render_time": started.render_time}, preconditions=expected))
        )[0]
        assert again.started.render_time == started.render_time
        first, second = api.fleet.requests
        assert first.prompt_token_ids == second.prompt_token_ids
    await codec.close()


@pytest.mark.parametrize("num_resumed", [255, 256, 257, 700])
async def test_long_stream_goes_on_where_it_broke(tmp_path: Path, num_resumed: int) -> None:
    """Its text is brought up in pieces, and the stop string is found across them."""
    codec = TextCodec(byte_level_tokenizer(), None)
    async with Api(tmp_path, codec, max_model_len=2000).running() as api:
        tokens = ids_of("a") * (num_resumed - 1) + ids_of("b")
        script(api, job_event(ids_of("c", "d"), FinishReason.LENGTH))
        fields: dict[str, Any] = {"resume_from": {"ids": tokens}, "stopping": {"max_tokens": 1000, "stop": ["aabc"]}}
        responses = await generate(api, request(**fields))
        finished = responses[-1].finished
        assert (finished.stop_string, finished.usage.completion_tokens) == ("aabc", num_resumed + 1)
        assert (tokens_of(responses), text_of(responses)) == (ids_of("c"), "")
        # The same where the broken stream had delivered the stop string's last token.
        ended = await generate(api, request(**fields | {"resume_from": {"ids": [*tokens, *ids_of("c")]}}))
        assert [response.WhichOneof("event") for response in ended] == ["started", "finished"]
        last = ended[-1].finished
        assert (last.stop_string, last.usage.completion_tokens) == ("aabc", num_resumed + 1)
        assert len(api.fleet.requests) == 1
    await codec.close()


class SlowCodec(TextCodec):
    """Lets something happen while a text is tokenised."""

    def __init__(self, meanwhile: Callable[[], object]) -> None:
        super().__init__(byte_level_tokenizer(), None)
        self._meanwhile = meanwhile

    async def encode_text(self, text: str, **limits: Any) -> list[int]:
        token_ids = await super().encode_text(text, **limits)
        self._meanwhile()
        return token_ids


async def test_adapter_deleted_while_the_prompt_is_tokenised_is_not_found(tmp_path: Path) -> None:
    """A request that nobody knows of yet must not bring the weights of a deleted adapter back."""
    codec = SlowCodec(lambda: api.registry.records.clear())
    async with Api(tmp_path, codec).running() as api:
        api.registry.add("poet")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await generate(api, request(text="he", adapter="poet"))
        assert caught.value.code() == grpc.StatusCode.NOT_FOUND
        assert not api.fleet.requests
    await codec.close()


async def test_request_keeps_the_version_that_was_active_when_it_came(tmp_path: Path) -> None:
    codec = SlowCodec(lambda: api.registry.add("poet", OTHER_DIGEST, DIGEST))
    async with Api(tmp_path, codec).running() as api:
        api.registry.add("poet", DIGEST, OTHER_DIGEST)
        script(api, job_event([5], FinishReason.LENGTH))
        responses = await generate(api, request(text="he", adapter="poet"))
        assert responses[0].started.adapter_digest == DIGEST
    await codec.close()


@pytest.mark.parametrize("digest", ["", DIGEST])
async def test_version_deleted_while_the_prompt_is_tokenised_fails_only_who_named_it(
    tmp_path: Path, digest: str
) -> None:
    """A name that is trained anew and loses its old version goes on being served."""
    codec = SlowCodec(lambda: api.registry.add("poet", OTHER_DIGEST))
    async with Api(tmp_path, codec).running() as api:
        api.registry.add("poet", DIGEST)
        script(api, job_event([5], FinishReason.LENGTH))
        message = request(text="he", adapter="poet", adapter_digest=digest)
        if digest:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await generate(api, message)
            assert caught.value.code() == grpc.StatusCode.NOT_FOUND and not api.fleet.requests
        else:
            responses = await generate(api, message)
            assert responses[0].started.adapter_digest == OTHER_DIGEST
            adapter = api.fleet.requests[0].adapter
            assert adapter is not None and adapter.digest == OTHER_DIGEST
    await codec.close()


class UntouchedEncoder:
    def encode_batch_fast(self, input: list[str], *, add_special_tokens: bool) -> Any:
        raise AssertionError("a prompt was encoded")


@pytest.mark.parametrize("prompt", [{"text": "he"}, {"chat": {"messages": [{"role": "user", "content": "he"}]}}])
async def test_request_that_has_no_room_is_refused_before_it_is_tokenised(tmp_path: Path, prompt: Any) -> None:
    chat = ChatRenderer("{{ messages[0].content }}", {})
    codec = TextCodec(byte_level_tokenizer(), chat, encoder=UntouchedEncoder())
    async with Api(tmp_path, codec).running() as api:
        api.fleet.refusal = QueueFull("8 requests wait already; try again in a moment")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await generate(api, request(**prompt, stopping={"max_tokens": 7}, decoding={"n": 3}))
        assert details(caught.value)[0].reason == "QUEUE_FULL"
        assert api.calls == [("check_room", "default at ipv4:127.0.0.1", 21)]
    await codec.close()


async def test_token_ids_work_without_a_tokenizer(api_without_tokenizer: Api) -> None:
    api = api_without_tokenizer
    script(api, job_event([5, 6], FinishReason.LENGTH))
    responses = await generate(api, request())
    assert (tokens_of(responses), text_of(responses)) == ([5, 6], "")
    for message in (request(text="x"), request(chat={"messages": [{"role": "user"}]}), stopping(stop=["x"])):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await generate(api, message)
        assert caught.value.code() == grpc.StatusCode.FAILED_PRECONDITION
        assert details(caught.value)[0].reason == "TOKENIZER_UNAVAILABLE"


async def test_chat_is_rendered_and_tokenised(api: Api) -> None:
    script(api, job_event([5], FinishReason.LENGTH))
    await generate(api, request(chat={"messages": [{"role": "user", "content": "he"}]}))
    assert list(api.fleet.requests[0].prompt_token_ids) == ids_of("u", ":", "he", "a", ":")
