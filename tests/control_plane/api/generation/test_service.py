"""GenerationService over a real channel: stream semantics, cancellation, stop strings."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from motet.v1 import generation_pb2_grpc, types_pb2

from control_plane.access.principal import Principal, Role
from control_plane.api.text.chat_renderer import ChatRenderer
from control_plane.api.text.codec import TextCodec
from control_plane.caller import Caller
from control_plane.errors import NoWorker, QueueFull
from control_plane.scheduler.types import FinishReason, Sampling
from tests.control_plane.api.fake_adapters import DIGEST, OTHER_DIGEST
from tests.control_plane.api.fakes import Api, details, job_event
from tests.control_plane.api.generation.calls import generate, ids_of, request, script, stopping, text_of, tokens_of
from tests.control_plane.api.tokenizers import byte_level_tokenizer


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


async def test_an_authenticated_tenant_is_charged_itself_and_not_the_host(tmp_path: Path) -> None:
    acme = Caller("acme", Principal("key:k", frozenset({Role.INFER}), ("acme",)), "ipv4:10.0.0.7:5")
    async with Api(tmp_path, TextCodec(None, None, reason="not needed")).running(lambda _method, _context: acme) as api:
        script(api, job_event([5], FinishReason.LENGTH))
        responses = await generate(api, request())
        assert responses[0].started.tenant == "acme"
        assert [submitted.account for submitted in api.fleet.requests] == ["acme"]


async def test_defaults_are_made_effective(api: Api) -> None:
    script(api, job_event([5], FinishReason.LENGTH))
    responses = await generate(api, request(text="he"))
    started = responses[0].started
    assert re.fullmatch(r"req-[0-9a-f]{16}", started.request_id)
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


async def test_request_ids_of_the_server_do_not_count_the_requests(api: Api) -> None:
    """Two ids of one tenant must not show how many requests of others came between them."""
    names = []
    for _ in range(4):
        script(api, job_event([5], FinishReason.LENGTH))
        [started, *_] = await generate(api, request())
        names.append(started.started.request_id)
    assert len(set(names)) == 4
    numbers = [int(name.removeprefix("req-"), 16) for name in names]
    assert min(abs(later - earlier) for earlier, later in pairwise(numbers)) > 1 << 16


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
    await asyncio.wait_for(api.fleet.jobs[0].is_cancelled.wait(), 60)


async def test_deadline_reaches_the_request_and_ends_the_call(api: Api) -> None:
    call = api.stub(generation_pb2_grpc.GenerationServiceStub).Generate(request(), timeout=1.0)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call.read()
    assert caught.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
    deadline_s = api.fleet.requests[0].deadline_s
    assert deadline_s is not None and 100.0 < deadline_s < 101.1  # gRPC rounds what is left by a millisecond or so
    await asyncio.wait_for(api.fleet.jobs[0].is_cancelled.wait(), 60)


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


async def test_a_shutdown_refuses_new_requests(api: Api) -> None:
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


async def test_what_ended_a_completion_is_delivered_where_the_client_wants_it(api: Api) -> None:
    script(api, job_event(ids_of("he", "ll", "o")), job_event(ids_of("o", "he"), FinishReason.LENGTH))
    included: Any = {"stopping": {"stop": ["lo"]}, "output": {"include_stop": True}}
    responses = await generate(api, request(**included))
    assert text_of(responses) == "hello" and responses[-1].finished.stop_string == "lo"
    assert tokens_of(responses) == ids_of("he", "ll", "o")
    script(api, job_event(ids_of("he", "ll"), FinishReason.STOP_TOKEN))
    stopped: Any = {"stopping": {"stop_token_ids": ids_of("ll")}, "output": {"include_stop": True}}
    assert text_of(await generate(api, request(**stopped))) == "hell"


async def test_special_tokens_are_in_the_text_where_the_client_wants_them(api: Api) -> None:
    for skips, text in ((True, "hehe"), (None, "hehe"), (False, "he<s>he")):
        script(api, job_event(ids_of("he", "<s>", "he"), FinishReason.LENGTH))
        responses = await generate(api, request(output={"skip_special_tokens": skips}))
        assert text_of(responses) == text, skips


async def test_tokens_of_an_adapter_that_is_gone_are_not_at_fault(api: Api) -> None:
    """They may be of its own vocabulary; what the client can do something about is the name."""
    beyond = types_pb2.TokenIds(ids=[10_000])
    gone: list[Any] = [{"adapter": "gone"}, {"adapters": [{"name": "gone", "scale": 0.5}]}]
    for fields in gone:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await generate(api, request(token_ids=beyond, **fields))
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await generate(api, request(token_ids=beyond, adapter="no name!"))
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_ignore_eos_leaves_only_the_clients_stop_tokens(api: Api) -> None:
    script(api, job_event([5], FinishReason.LENGTH))
    await generate(api, stopping(ignore_eos=True, stop_token_ids=[9]))
    assert api.fleet.requests[0].stop_token_ids == {9}


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
