"""A small vocabulary, and constraints as requests have them."""

from __future__ import annotations

from pathlib import Path

import pytest

from control_plane.scheduler.types import Vocabulary
from tests.makers import make_tokenizer

NUM_TOKENS, END = 264, 0


@pytest.fixture(scope="session")
def vocabulary(tmp_path_factory: pytest.TempPathFactory) -> Vocabulary:
    """Bytes and few merges; the end of a text is token 0."""
    directory: Path = make_tokenizer(tmp_path_factory.mktemp("tokenizer"), vocab_size=NUM_TOKENS)
    return Vocabulary("v", (directory / "tokenizer.json").read_text(encoding="utf-8"), NUM_TOKENS, (END,))
