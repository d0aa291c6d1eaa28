"""Each generation has one record in the audit log, however it ends, and no text unless that is wanted."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from motet.v1 import generation_pb2_grpc, types_pb2

from control_plane.access.authenticator import Authenticator, Presented
from control_plane.access.principal import Principal, Role, of_roles
from control_plane.api.rpc.callers import Callers
from control_plane.api.text.chat_renderer import ChatRenderer
from control_plane.api.text.codec import TextCodec
from control_plane.audit.audit_log import AuditLog
from control_plane.errors import QuotaExceeded, Unauthenticated, WorkerLost
from control_plane.fleet.requests.streams import Place, RunFacts
from control_plane.observers.ended_request import EndedRequest
from control_plane.scheduler.types import FinishReason, Request, SlotRef
from tests.control_plane.api.conftest import TEMPLATE
from tests.control_plane.api.fake_adapters import DIGEST
from tests.control_plane.api.fakes import Api, ScriptedJob, job_event
from tests.control_plane.api.generation.calls import TOKENIZER, generate, ids_of, request, script
from tests.control_plane.audit.sinks import MemorySink, a_writer

FACTS = RunFacts([Place("w0", 7, SlotRef(3, 12))], num_cached_tokens=2, queue_time_s=0.25, num_new_tokens=4)


class Audited:
    """An API whose audit log is in memory."""

    def __init__(self, directory: Path, *, has_text: bool) -> None:
        self.sink = MemorySink()
        self.log = AuditLog(a_writer(self.sink), has_text=has_text, wall_clock=lambda: 1e9)
        self.codec = TextCodec(TOKENIZER, ChatRenderer(TEMPLATE, {}))
        self.api = Api(directory, self.codec, audit=self.log)

    def script(self, *events: Any, facts: RunFacts = FACTS) -> None:
        def on_submit(job: ScriptedJob, _request: Request) -> None:
            job.facts = facts
            job.script(*events)

        self.api.fleet.on_submit = on_submit

    async def records(self) -> list[dict[str, Any]]:
        """What the lines say, without the start's and the end's."""
        await self.log.close()
        return [event["data"] for event in self.sink.events()][1:-1]


@pytest.fixture
async def audited(tmp_path: Path) -> AsyncIterator[Audited]:
    audited = Audited(tmp_path, has_text=False)
    async with audited.api.running():
        yield audited
    await audited.codec.close()


@pytest.fixture
async def audited_with_text(tmp_path: Path) -> AsyncIterator[Audited]:
    directory = tmp_path / "with text"
    directory.mkdir()
    audited = Audited(directory, has_text=True)
    async with audited.api.running():
        yield audited
    await audited.codec.close()


async def test_a_generation_has_one_record_with_who_where_and_how_long(audited: Audited) -> None:
    audited.api.registry.add("poet")
    audited.script(job_event(ids_of("he")), job_event(ids_of("ll", "o"), FinishReason.LENGTH))
    await generate(audited.api, request(adapter="poet", request_id="mine", stopping={"max_tokens": 3}))
    [record] = await audited.records()
    peer = record["actor"].pop("peer")
    assert peer.startswith("ipv4:127.0.0.1:")
    assert record == {
        "actor": {"principal": "", "tenant": "default", "method": "none"},
        "action": "generate",
        "resource": "adapters/poet",
        "digest": DIGEST,
        "outcome": "success",
        "reason": "",
        "request_id": "mine",
        "correlation_id": "",
        "fleet_request_id": 1,
        "finish_reasons": ["length"],
        "prompt_tokens": 3,
        "resumed_tokens": 0,
        "cached_tokens": 2,
        "generated_tokens": 4,
        "queue_time_s": 0.25,
        "time_to_first_token_s": 0.0,
        "total_time_s": 0.0,
        "workers": [{"worker_id": "w0", "epoch": 7, "slot": 3, "slot_generation": 12}],
    }


async def test_the_base_model_has_no_slot_and_every_completion_a_reason(audited: Audited) -> None:
    facts = RunFacts([Place("w0", 7, None), Place("w1", 9, None)])
    audited.script(
        job_event([5], FinishReason.LENGTH, index=1), job_event([1], FinishReason.STOP_TOKEN, index=0), facts=facts
    )
    [first, *_] = await generate(audited.api, request(decoding=types_pb2.DecodingParams(n=2)))
    [record] = await audited.records()
    assert (record["resource"], record["digest"]) == ("@base", "")
    assert (record["request_id"], record["fleet_request_id"]) == (first.started.request_id, 1)
    assert record["finish_reasons"] == ["stop_token", "length"]
    assert [(w["worker_id"], w["slot"], w["slot_generation"]) for w in record["workers"]] == [
        ("w0", None, None),
        ("w1", None, None),
    ]


async def test_an_error_of_the_fleet_is_the_reason_and_has_no_second_line(audited: Audited) -> None:
    audited.script(job_event([5]), WorkerLost("lost too often"))
    with pytest.raises(grpc.aio.AioRpcError):
        await generate(audited.api, request())
    [record] = await audited.records()
    assert (record["outcome"], record["reason"], record["finish_reasons"]) == ("failure", "WORKER_LOST", [])


@pytest.mark.parametrize(("timeout_s", "reason"), [(None, "CANCELLED"), (50.0, "DEADLINE_EXCEEDED")])
async def test_a_client_that_leaves_has_a_record(audited: Audited, timeout_s: float | None, reason: str) -> None:
    audited.script(job_event([5]))
    call = audited.api.stub(generation_pb2_grpc.GenerationServiceStub).Generate(request(), timeout=timeout_s)
    await call.read()
    audited.api.now_s += 60.0  # past the deadline, where there is one
    call.cancel()
    await audited.api.fleet.jobs[0].is_cancelled.wait()
    await asyncio.sleep(0)
    [record] = await audited.records()
    assert (record["outcome"], record["reason"], record["total_time_s"]) == ("failure", reason, 60.0)


async def test_a_request_that_is_refused_is_no_generation_and_has_the_line_of_a_refusal(audited: Audited) -> None:
    def refuse(_job: ScriptedJob, _request: Request) -> None:
        raise QuotaExceeded("full", tenant="a", quota="x", limit=1, retry_after_s=1.0)

    audited.api.fleet.on_submit = refuse
    for message in (request(), request(adapter="nobody"), request(stopping={"max_tokens": 9999})):
        with pytest.raises(grpc.aio.AioRpcError):
            await generate(audited.api, message)
    records = await audited.records()
    assert [(record["action"], record["outcome"], record["reason"]) for record in records] == [
        ("generate", "denied", "QUOTA_EXCEEDED"),
        ("generate", "denied", "ADAPTER_NOT_FOUND"),
    ]
    assert all("workers" not in record for record in records)


async def test_a_stream_whose_tokens_all_came_before_has_a_record_without_a_worker(audited: Audited) -> None:
    resume = types_pb2.TokenIds(ids=[5, 6])
    await generate(audited.api, request(stopping={"max_tokens": 2}, resume_from=resume))
    [record] = await audited.records()
    assert (record["outcome"], record["resumed_tokens"], record["generated_tokens"]) == ("success", 2, 0)
    assert record["workers"] == [] and record["queue_time_s"] is None


async def test_a_record_has_no_text_and_with_the_flag_prompt_and_completions(
    audited: Audited, audited_with_text: Audited
) -> None:
    for one in (audited, audited_with_text):
        one.script(job_event(ids_of("he")), job_event(ids_of("ll", "o"), FinishReason.LENGTH))
        await generate(one.api, request(text="secret", stopping={"max_tokens": 3}))
        chat = {"messages": [{"role": "user", "content": "whisper"}]}
        await generate(one.api, request(chat=chat, stopping={"max_tokens": 3}))
        await generate(one.api, request(stopping={"max_tokens": 3}))
        await one.log.close()
    content = json.dumps(audited.sink.events())
    assert "text" not in content and "secret" not in content and "hello" not in content and "whisper" not in content
    assert [record["text"] for record in await audited_with_text.records()] == [
        {"prompt": "secret", "completions": ["hello"]},
        {"prompt": [{"role": "user", "content": "whisper"}], "completions": ["hello"]},
        {"prompt": [5, 6, 7], "completions": ["hello"]},
    ]


async def test_without_a_log_nothing_is_collected(api: Api) -> None:
    script(api, job_event(ids_of("he"), FinishReason.LENGTH))
    assert (await generate(api, request(stopping={"max_tokens": 1})))[-1].finished.reason


async def test_no_line_has_what_a_client_presents_as_its_credential(tmp_path: Path) -> None:
    class Keys:
        def principal(self, presented: Presented) -> Principal | None:
            if presented.token.endswith("good-secret"):
                return Principal("key:ops", of_roles({Role.ADMIN}), ("*",))
            raise Unauthenticated("the key is not valid")

    audited = Audited(tmp_path, has_text=False)
    async with audited.api.running(Callers(Authenticator([Keys()]))):
        audited.script(job_event([5], FinishReason.LENGTH))
        stub = audited.api.stub(generation_pb2_grpc.GenerationServiceStub)
        for token in ("motet_ops_good-secret", "motet_ops_bad-secret"):
            with contextlib.suppress(grpc.aio.AioRpcError):
                async for _ in stub.Generate(request(), metadata=(("authorization", f"Bearer {token}"),)):
                    pass
    await audited.codec.close()
    records = await audited.records()
    assert [(r["actor"]["principal"], r["actor"]["method"], r["reason"]) for r in records] == [
        ("key:ops", "key", ""),
        ("", "none", "UNAUTHENTICATED"),
    ]
    assert b"secret" not in audited.sink.data and b"motet_ops" not in audited.sink.data


class Ended:
    """An observer that keeps the requests that ended."""

    is_on = True

    def __init__(self) -> None:
        self.requests: list[EndedRequest] = []

    def ended(self, request: EndedRequest) -> None:
        self.requests.append(request)

    def refused(self, _reason: str) -> None:
        pass


async def test_observers_learn_which_settings_were_in_effect(tmp_path: Path) -> None:
    ended = Ended()
    codec = TextCodec(TOKENIZER, ChatRenderer(TEMPLATE, {}))
    api = Api(tmp_path, codec, observers=ended)
    async with api.running():
        script(api, *(job_event(ids_of("he"), FinishReason.LENGTH, index=index) for index in range(2)))
        sampling = types_pb2.SamplingParams(temperature=0.5, top_k=4)
        stopping = types_pb2.StoppingParams(max_tokens=3, stop=["###"])
        await generate(api, request(sampling=sampling, stopping=stopping, decoding=types_pb2.DecodingParams(n=2)))
    await codec.close()
    (found,) = [each.settings for each in ended.requests]
    assert found is not None
    assert (found.max_tokens, found.num_completions, list(found.stop)) == (3, 2, ["###"])
    values = found.sampling
    assert (values.temperature, values.top_k, values.top_p, values.seed) == (0.5, 4, 1.0, 1234)
