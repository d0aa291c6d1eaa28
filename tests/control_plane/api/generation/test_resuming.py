"""A stream that broke is continued where it broke."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from motet.v1 import types_pb2

from control_plane.api.text.chat_renderer import ChatRenderer
from control_plane.api.text.codec import TextCodec
from control_plane.scheduler.types import FinishReason, Request
from tests.control_plane.api.fakes import Api, ScriptedJob, details, job_event
from tests.control_plane.api.generation.calls import generate, ids_of, request, script, text_of, tokens_of
from tests.control_plane.api.tokenizers import byte_level_tokenizer


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
