"""Engines of these tests are built without native code: its settings are restored behind each file."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kernels import native


@pytest.fixture(scope="module", autouse=True)
def _native_settings_of_this_file() -> Iterator[None]:
    usual = native.settings()
    yield
    native.configure(usual)
