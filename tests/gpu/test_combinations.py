"""Combinations of adapters on a GPU: the tests of tests/data_plane/engine with Triton."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.data_plane.engine.test_combinations import check_tokens, serve

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers`")]


def test_combinations_generate_as_peft_beside_all_other_rows(tmp_path: Path) -> None:
    check_tokens(serve("llama", tmp_path, device="cuda"))
