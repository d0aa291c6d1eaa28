"""A scripted server, and both clients behind one blocking interface so that every story runs with both."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from motet import AsyncClient, Client, RetryPolicy
from motet.types import Adapter, Chunk, Generation

from tests.client.scripted_server import ScriptedServer

RETRY = RetryPolicy(max_attempts=4, initial_backoff_s=0.02, max_backoff_s=0.04)


class Driver:
    """One of the two clients, driven by blocking calls. `sleeps` records every wait it made."""

    def __init__(self, target: str, *, is_async: bool) -> None:
        self.target = target
        self.is_async = is_async
        self.sleeps: list[float] = []
        self.now_s = 1000.0  # the clients' clock; only sleeping moves it
        self.settings: dict[str, Any] = {"retry": RETRY}

    def run(self, action: Callable[[Any], Any]) -> Any:
        """Runs `action(client)`; whatever it returns is awaited with the async client."""
        if not self.is_async:
            with Client(self.target, sleep=self._sleep, **self._settings()) as client:
                return action(client)

        async def in_loop() -> Any:
            async with AsyncClient(self.target, sleep=self._async_sleep, **self._settings()) as async_client:
                result = action(async_client)
                return await result if hasattr(result, "__await__") else result

        return asyncio.run(in_loop())

    def generate(self, prompt: Any = "hello", **options: Any) -> tuple[list[Chunk], Generation]:
        """All chunks and the result of one generation."""

        def blocking(client: Client) -> tuple[list[Chunk], Generation]:
            with client.generate(prompt, **options) as stream:
                return list(stream), stream.result()

        async def in_loop(client: AsyncClient) -> tuple[list[Chunk], Generation]:
            async with client.generate(prompt, **options) as stream:
                return [chunk async for chunk in stream], await stream.result()

        chunks, result = self.run(in_loop if self.is_async else blocking)
        return chunks, result

    def list(self, **options: Any) -> list[Adapter]:
        """adapters.list() in full."""

        async def in_loop(client: AsyncClient) -> list[Adapter]:
            return [adapter async for adapter in client.adapters.list(**options)]

        adapters: list[Adapter] = self.run(
            in_loop if self.is_async else lambda client: list(client.adapters.list(**options))
        )
        return adapters

    def _settings(self) -> dict[str, Any]:
        return {"clock": lambda: self.now_s, "generator": random.Random(7), **self.settings}

    def _sleep(self, seconds: float) -> None:
        self.sleeps.append(seconds)
        self.now_s += seconds

    async def _async_sleep(self, seconds: float) -> None:
        self._sleep(seconds)


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    scripted = ScriptedServer()
    yield scripted
    scripted.stop()


@pytest.fixture(params=["sync", "async"])
def driver(request: pytest.FixtureRequest, server: ScriptedServer) -> Driver:
    return Driver(server.target, is_async=request.param == "async")
