"""Settings of the whole run: how Triton kernels run in this process, how hypothesis draws its examples, which way LoRA
goes on a CPU, and the scan for planted secrets.

The first is chosen before anything can import triton (transformers does).
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
from collections.abc import Generator, Iterator

import pytest

from tests.secret_scan import SCAN, ScanningHandler, SecretScan, judge


def has_cuda() -> bool:
    """Whether torch can use a GPU. Imports torch only where there is a driver, since that takes seconds."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    import torch

    return torch.cuda.is_available()


if not has_cuda():
    # Without a GPU the kernels run in triton's interpreter. triton reads this when it is imported.
    os.environ.setdefault("TRITON_INTERPRET", "1")

with contextlib.suppress(ImportError):  # the GPU's own tests run where there is no hypothesis
    from hypothesis import settings

    # An example may take long on a busy machine, and every run draws the same ones.
    settings.register_profile("motet", deadline=None, derandomize=True)
    settings.load_profile("motet")


@pytest.fixture(params=["native", "torch"])
def lora_form(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """LoRA on a CPU in native code, and in torch as without a C compiler."""
    if request.param == "torch":
        monkeypatch.setattr("kernels.lora.ops.has_native", lambda *tensors: False)
    return str(request.param)


@pytest.fixture(scope="session", autouse=True)
def planted_secrets() -> Iterator[SecretScan]:
    """The secrets of this run. Every record that is logged meanwhile is searched for them."""
    handler = ScanningHandler(SCAN)
    logging.getLogger().addHandler(handler)
    yield SCAN
    logging.getLogger().removeHandler(handler)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Search what was captured while a test ran; the test fails in which a planted secret was found."""
    report = yield
    judge(report, SCAN)
    return report
