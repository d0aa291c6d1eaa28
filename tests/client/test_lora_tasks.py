"""Weights that requests bring under a number: sent once, and again where the server no longer has them."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2
from motet import AlreadyExists, AsyncClient, Cancelled, Client, InvalidArgument, LoraTask, NotFound
from motet.connection.bridged_call import READ_AHEAD
from motet.v1 import generation_pb2

from tests.client.conftest import Driver
from tests.client.scripted_server import DIGEST, Script, ScriptedServer, abort, delta, playing, started
from tests.client.test_generation import TEXT, TOKENS, refusing

FILES = {"adapter_config.json": b"{}", "adapter_model.safetensors": bytes(range(256)) * 4096}
NOT_CACHED = refusing(
    grpc.StatusCode.NOT_FOUND, "no longer here", error_details_pb2.ErrorInfo(reason="LORA_TASK_NOT_CACHED")
)
TAKEN = error_details_pb2.ErrorInfo(reason="LORA_TASK_TAKEN")


def task(files: dict[str, bytes] = FILES) -> LoraTask:
    return LoraTask(7, files)


def brings(request: Any) -> bool:
    return isinstance(request, generation_pb2.GenerateWithTaskHeader)


def test_weights_are_sent_with_the_first_request_and_later_ones_name_number_and_digest(
    server: ScriptedServer, driver: Driver
) -> None:
    server.scripts.extend([playing(TOKENS), playing(TOKENS)])
    poet = task()
    assert driver.generate("a", lora_task=poet)[1].text == TEXT
    assert server.files == FILES and poet.digest == DIGEST
    assert max(server.chunk_sizes) <= 1 << 20
    assert driver.generate("b", lora_task=poet)[1].text == TEXT
    first, later = server.requests
    assert brings(first) and first.request.text == "a"
    assert (first.request.lora_task_id, first.request.adapter_digest) == (7, "")
    assert (later.text, later.lora_task_id, later.adapter_digest) == ("b", 7, DIGEST)


def test_files_of_a_directory_are_those_that_registering_would_send(
    server: ScriptedServer, driver: Driver, tmp_path: Path
) -> None:
    for name, content in {**FILES, "chat_template.jinja": b"{{ 1 }}", "README.md": b"not sent"}.items():
        (tmp_path / name).write_bytes(content)
    server.scripts.append(playing(TOKENS))
    driver.generate("a", lora_task=LoraTask(0, tmp_path))
    assert server.requests[0].request.HasField("lora_task_id")
    assert server.files == {**FILES, "chat_template.jinja": b"{{ 1 }}"}


def test_weights_that_are_no_longer_cached_are_sent_again_without_a_wait(
    server: ScriptedServer, driver: Driver
) -> None:
    server.scripts.extend([playing(TOKENS), NOT_CACHED, playing(TOKENS)])
    poet = task()
    driver.generate("a", lora_task=poet)
    assert driver.generate("b", lora_task=poet)[1].text == TEXT
    assert [brings(request) for request in server.requests] == [True, False, True]
    assert server.requests[2].request.adapter_digest == ""
    assert driver.sleeps in ([], [0.0])


def test_a_broken_stream_goes_on_with_the_number_and_where_that_is_gone_with_the_weights(
    server: ScriptedServer, driver: Driver
) -> None:
    server.scripts.extend([playing(TOKENS, break_after=3), NOT_CACHED, playing(TOKENS)])
    chunks, result = driver.generate("a", lora_task=task())
    assert result.text == TEXT == "".join(chunk.text for chunk in chunks)
    _, later, last = server.requests
    assert (later.lora_task_id, later.adapter_digest, list(later.resume_from.ids)) == (7, DIGEST, TOKENS[:3])
    assert brings(last) and (last.request.adapter_digest, list(last.request.resume_from.ids)) == (DIGEST, TOKENS[:3])


def test_a_server_that_never_has_the_weights_is_not_sent_them_for_ever(server: ScriptedServer, driver: Driver) -> None:
    server.scripts.extend([NOT_CACHED])
    with pytest.raises(NotFound, match="no longer here"):
        driver.generate("a", lora_task=task())
    assert len(server.requests) == 1


def test_a_number_alone_names_weights_that_were_sent_before(server: ScriptedServer, driver: Driver) -> None:
    server.scripts.extend([playing(TOKENS), NOT_CACHED])
    driver.generate("a", lora_task=2**64 - 1)
    assert server.requests[0].lora_task_id == 2**64 - 1
    with pytest.raises(NotFound) as refused:
        driver.generate("a", lora_task=7)
    assert refused.value.reason == "LORA_TASK_NOT_CACHED" and len(server.requests) == 2


def test_a_refusal_while_the_weights_are_sent_arrives_as_the_server_says_it(
    server: ScriptedServer, driver: Driver
) -> None:
    server.upload_error = lambda context: abort(context, grpc.StatusCode.ALREADY_EXISTS, "use another id", TAKEN)
    large = {**FILES, "adapter_model.safetensors": bytes(24 << 20)}
    with pytest.raises(AlreadyExists, match="use another id") as refused:
        driver.generate("a", lora_task=task(large))
    assert refused.value.reason == "LORA_TASK_TAKEN"


def test_a_file_that_changes_while_it_is_sent_ends_the_request(
    server: ScriptedServer, driver: Driver, tmp_path: Path
) -> None:
    for name, content in FILES.items():
        (tmp_path / name).write_bytes(content)
    changed = LoraTask(7, tmp_path)
    (tmp_path / "adapter_model.safetensors").write_bytes(b"shorter")
    with pytest.raises(InvalidArgument, match=r"adapter_model.safetensors changed during the upload"):
        driver.generate("a", lora_task=changed)


def test_a_long_generation_is_read_whole_however_slowly(server: ScriptedServer, driver: Driver) -> None:
    many = [5] * (4 * READ_AHEAD)
    server.scripts.append(playing(many))
    assert len(driver.generate("a", lora_task=task())[0]) == len(many) + 1


def _stopped(server: ScriptedServer) -> Script:
    """One token, then nothing until the client cancels."""
    return server.waiting_for_cancel(started(), delta(0, [5], "<5>"))


def test_leaving_the_stream_cancels_the_request_that_brought_weights(server: ScriptedServer, driver: Driver) -> None:
    server.scripts.append(_stopped(server))

    def blocking(client: Client) -> None:
        with client.generate("a", lora_task=task()) as stream:
            assert next(stream).text == "<5>"

    async def in_loop(client: AsyncClient) -> None:
        async with client.generate("a", lora_task=task()) as stream:
            assert (await anext(stream)).text == "<5>"

    driver.run(in_loop if driver.is_async else blocking)
    assert server.cancelled.wait(30)


def test_closing_the_client_ends_a_request_that_brought_weights(server: ScriptedServer, driver: Driver) -> None:
    server.scripts.append(_stopped(server))

    def blocking(client: Client) -> None:
        stream = client.generate("a", lora_task=task())
        next(stream)
        threading.Thread(target=client.close).start()
        next(stream)

    async def in_loop(client: AsyncClient) -> None:
        stream = client.generate("a", lora_task=task())
        await anext(stream)
        closing = asyncio.ensure_future(client.close())
        try:
            await anext(stream)
        finally:
            await closing

    with pytest.raises(Cancelled, match="the client was closed"):
        driver.run(in_loop if driver.is_async else blocking)
    assert server.cancelled.wait(30)


@pytest.mark.parametrize("task_id", [-1, 2**64, "7", None])
def test_a_number_that_the_wire_cannot_carry_is_refused_by_name(task_id: Any) -> None:
    with pytest.raises(InvalidArgument, match=r"lora_task"):
        LoraTask(task_id, FILES)


def test_what_is_no_adapter_is_refused_before_anything_is_sent(driver: Driver, tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match=r"adapter_config\.json"):
        LoraTask(7, tmp_path)
    with pytest.raises(InvalidArgument, match="is empty"):
        LoraTask(7, {})
    with pytest.raises(TypeError, match="give bytes"):
        LoraTask(7, {"adapter_config.json": "{}"})  # type: ignore[dict-item]
    with pytest.raises(InvalidArgument, match="lora_task"):
        driver.generate("a", lora_task="7")
