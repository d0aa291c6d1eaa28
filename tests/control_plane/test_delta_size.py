"""Streams whose client wants few, large deltas, through a real control plane: the same stream in fewer messages."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import grpc.aio
from motet import AsyncClient
from motet.v1 import generation_pb2, types_pb2

from tests.control_plane.server_processes import control_plane, generate, hash_worker, tokens_of

NUM_TOKENS = 60
# The hash worker's tokens depend on the prompt alone, so one request has the same tokens each time.
BASE: dict[str, Any] = {
    "token_ids": {"ids": [5, 6, 7]},
    "text": None,
    "sampling": {"seed": 3},
    "stopping": {"max_tokens": NUM_TOKENS, "ignore_eos": True},
}


def deltas_of(responses: list[generation_pb2.GenerateResponse]) -> list[generation_pb2.GenerationDelta]:
    return [response.delta for response in responses if response.WhichOneof("event") == "delta"]


def text_of(responses: list[generation_pb2.GenerateResponse]) -> str:
    return "".join(response.delta.text for response in responses)


async def test_larger_deltas_make_the_same_stream(tmp_path: Path) -> None:
    # Steps of 5 ms, and a wait that is far longer than the test.
    large: dict[str, Any] = {"delta_tokens": 16, "delta_wait": {"seconds": 10}}
    async with (
        control_plane(tmp_path, "--host-cache", "memory") as (_, clients, workers),
        grpc.aio.insecure_channel(clients) as channel,
        hash_worker(tmp_path, workers, "--step-time-ms", "5"),
    ):
        single = await generate(channel, **BASE)
        grouped = await generate(channel, **BASE, output=large)
        assert tokens_of(grouped) == tokens_of(single) and len(tokens_of(single)) == NUM_TOKENS
        assert text_of(grouped) == text_of(single)
        deltas = deltas_of(grouped)
        assert [delta.token_offset for delta in deltas] == [
            sum(len(delta.token_ids) for delta in deltas[:index]) for index in range(len(deltas))
        ]
        assert all(len(delta.token_ids) >= 16 for delta in deltas[1:-1]) and len(deltas) <= 6
        before, after = single[-1].finished, grouped[-1].finished
        assert after.reason == types_pb2.FINISH_REASON_LENGTH and after.usage == before.usage

        # A continued stream, with the same option: the same tokens behind those that had come.
        head = tokens_of(single)[:20]
        resumed = await generate(channel, **BASE, output=large, resume_from={"ids": head})
        assert tokens_of(resumed) == tokens_of(single)[20:] and text_of(single).endswith(text_of(resumed))

        # Several completions, each contiguous.
        several = BASE | {"decoding": {"n": 2}}
        singles, groups = await generate(channel, **several), await generate(channel, **several, output=large)
        for index in range(2):
            due, got = (
                [token for delta in deltas_of(found) if delta.index == index for token in delta.token_ids]
                for found in (singles, groups)
            )
            assert due == got and len(got) == NUM_TOKENS

        # A stop string is found within a delta, and what follows it is not sent.
        word = text_of(single)[30:33]
        stopped = BASE | {"stopping": {**BASE["stopping"], "stop": [word]}}
        due_end, got_end = await generate(channel, **stopped), await generate(channel, **stopped, output=large)
        assert text_of(got_end) == text_of(due_end) and tokens_of(got_end) == tokens_of(due_end)
        assert got_end[-1].finished.stop_string == word
        assert got_end[-1].finished.usage == due_end[-1].finished.usage


async def test_a_short_wait_sends_what_there_is_and_the_sdk_gives_whole_streams(tmp_path: Path) -> None:
    async with (
        control_plane(tmp_path, "--host-cache", "memory") as (_, clients, workers),
        grpc.aio.insecure_channel(clients) as channel,
        AsyncClient(clients) as client,
        hash_worker(tmp_path, workers, "--step-time-ms", "20"),
    ):
        waiting: dict[str, Any] = {"delta_wait": {"nanos": 50_000_000}}
        sizes = [len(delta.token_ids) for delta in deltas_of(await generate(channel, **BASE, output=waiting))]
        assert sum(sizes) == NUM_TOKENS and len(sizes) > 2 and max(sizes) < NUM_TOKENS - 1

        options: Any = {"max_tokens": NUM_TOKENS, "ignore_eos": True, "seed": 3}
        whole = await client.generate([5, 6, 7], **options).result()
        chunks = []
        async with client.generate([5, 6, 7], delta_tokens=16, delta_wait_s=10.0, **options) as stream:
            async for chunk in stream:
                chunks.append(chunk)
        assert [token for chunk in chunks for token in chunk.token_ids] == list(whole.token_ids)
        assert "".join(chunk.text for chunk in chunks) == whole.text
        assert any(len(chunk.token_ids) >= 16 for chunk in chunks)

        # Closed while tokens wait: the request ends at the server.
        async with client.generate([5, 6, 7], delta_tokens=128, delta_wait_s=10.0, **options) as stream:
            await anext(aiter(stream))
        async with asyncio.timeout(30):
            while (await client.status()).queues.num_running:
                await asyncio.sleep(0.01)
