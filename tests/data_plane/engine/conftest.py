"""A small llama and an engine on it, built once for each test module."""

from __future__ import annotations

from pathlib import Path

import pytest

from data_plane.engine.build import build_engine
from data_plane.engine.engine import TorchEngine
from kernels.native import find_compiler
from tests.data_plane.engine.test_oracle import worker_config
from tests.makers import make_checkpoint

# Without a C compiler, and only then, native code's tests are left out.
collect_ignore_glob = [] if find_compiler() else ["test_native_*.py"]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("llama"), "llama")


@pytest.fixture(scope="module")
def shared_engine(checkpoint: Path) -> TorchEngine:
    return build_engine(worker_config(checkpoint, num_blocks=64, host_kv_bytes=6 * 4096))


@pytest.fixture
def engine(shared_engine: TorchEngine) -> TorchEngine:
    shared_engine.reset()
    return shared_engine
