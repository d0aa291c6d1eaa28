"""How many tokens of a chat's usage are reasoning, however they came together in chunks."""

from __future__ import annotations

import pytest
from motet import Chunk, FinishReason
from motet.responses import ResponseParser
from motet.responses.bundled import BUNDLED
from motet.responses.templates import load_template

from gateway.openai.chats.turns import Turn
from gateway.openai.replies import Reply

TOKENS = ["<think>", "Well ", "then", "</think>", "It ", "rains", " here", " now", ".", " Bye", "."]
NUM_REASONING = 3  # with the mark that begins it


@pytest.mark.parametrize("size", [1, 2, 3, 5, 8, len(TOKENS)])
def test_reasoning_tokens_do_not_grow_with_the_chunks(size: int) -> None:
    reply = Reply("model", is_chat=True, n=1)
    template = load_template(dict(BUNDLED["hermes"]))
    reply.read_with(lambda: Turn(ResponseParser(template)))
    for at in range(0, len(TOKENS), size):
        part = TOKENS[at : at + size]
        reply.add(0, Chunk("".join(part), tuple(range(at, at + len(part))), at, ""), "")
    reply.add(0, Chunk("", (), len(TOKENS), "", finish_reason=FinishReason.STOP_TOKEN), "")
    num_tokens = reply.usage()["completion_tokens_details"]["reasoning_tokens"]
    assert num_tokens == NUM_REASONING if size == 1 else abs(num_tokens - NUM_REASONING) <= 1
