"""Long responses of Tokenize: all of them together hold up the event loop no longer than one."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

from motet.v1 import model_pb2

from control_plane.api.model.service import MAX_TOKENS_AT_ONCE, ModelService

NUM_PIECES = 3
TOKEN_IDS = list(range(NUM_PIECES * MAX_TOKENS_AT_ONCE))


class Texts:
    """Those of a base model that has as many tokens for each text, and counts what it spells."""

    def __init__(self) -> None:
        self.num_spelled = 0
        self.codec = self

    async def of(self, find: Any) -> tuple[None, Texts]:
        assert find() is None
        return None, self

    async def encode_text(self, _text: str, **_options: Any) -> list[int]:
        return TOKEN_IDS

    def spell(self, token_id: int) -> bytes:
        self.num_spelled += 1
        return b"%d" % token_id


async def test_responses_that_are_filled_at_once_take_turns() -> None:
    texts: Any = Texts()
    service = ModelService(
        base_model=Mock(served_fingerprint="ab" * 32),
        served=Mock(context_of=Mock(return_value=64)),
        texts=texts,
        registry=Mock(),
        fleet=Mock(),
        gate=Mock(),
    )
    request, context = model_pb2.TokenizeRequest(text="x", return_tokens=True), SimpleNamespace()
    tasks = [asyncio.ensure_future(service.Tokenize(request, context)) for _ in range(5)]  # type: ignore[arg-type]
    most, before = 0, 0
    while not all(task.done() for task in tasks):
        await asyncio.sleep(0)
        most, before = max(most, texts.num_spelled - before), texts.num_spelled
    assert 0 < most <= 2 * MAX_TOKENS_AT_ONCE, "the last piece of one response and the first one of another"
    for task in tasks:
        response = task.result()
        assert list(response.token_ids) == TOKEN_IDS
        assert list(response.tokens) == [b"%d" % token_id for token_id in TOKEN_IDS]
