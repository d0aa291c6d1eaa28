"""A running API over fakes, with a byte-level tokenizer and a chat template."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from control_plane.api.text.chat_renderer import ChatRenderer
from control_plane.api.text.codec import TextCodec
from tests.control_plane.api.fakes import Api
from tests.control_plane.api.tokenizers import byte_level_tokenizer

TEMPLATE = (
    "{% for m in messages %}{% if m.role not in ['user', 'assistant'] %}{{ raise_exception('role ' + m.role) }}"
    "{% endif %}{{ m.role[0] + ':' + m.content }}{% endfor %}{% if add_generation_prompt %}a:{% endif %}"
)


@pytest.fixture
async def api(tmp_path: Path) -> AsyncIterator[Api]:
    codec = TextCodec(byte_level_tokenizer(), ChatRenderer(TEMPLATE, {}))
    async with Api(tmp_path, codec).running() as running:
        yield running
    await codec.close()


@pytest.fixture
async def api_without_tokenizer(tmp_path: Path) -> AsyncIterator[Api]:
    codec = TextCodec(
        None, None, reason="the checkpoint has no tokenizer.json and its tokenizer could not be converted"
    )
    async with Api(tmp_path, codec).running() as running:
        yield running
    await codec.close()
