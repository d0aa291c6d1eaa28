"""Pinned memory takes the bytes that are wanted, is registered once, and let go of with its last tensor."""

from __future__ import annotations

import gc
import re

import pytest
import torch

from data_plane.engine.memory.pinned import ALIGNMENT, pinned_bytes, pinned_zeros
from data_plane.errors import ConfigError

SHAPES = [((18, 16, 3, 5), torch.bfloat16), ((18, 16, 3, 5), torch.float8_e4m3fn), ((18, 16, 3), torch.float32)]
PAGE = 4096


class FakeRegistry:
    """Keeps what is registered; refuses with an error that is not 0."""

    def __init__(self, error: int = 0) -> None:
        self.error = error
        self.registered: dict[int, int] = {}

    def register(self, address: int, num_bytes: int) -> int:
        if not self.error:
            assert address % PAGE == 0 and num_bytes % PAGE == 0
            self.registered[address] = num_bytes
        return self.error

    def unregister(self, address: int) -> None:
        del self.registered[address]


def test_tensors_take_their_bytes_and_not_the_next_power_of_two() -> None:
    registry = FakeRegistry()
    tensors = pinned_zeros(SHAPES * 8, "--host-kv-bytes", registry)
    assert [(tuple(tensor.shape), tensor.dtype) for tensor in tensors] == SHAPES * 8
    wanted = sum(tensor.nbytes for tensor in tensors)
    [(address, num_bytes)] = registry.registered.items()
    assert wanted <= num_bytes < wanted + len(tensors) * ALIGNMENT + PAGE
    rounded = sum(1 << (tensor.nbytes - 1).bit_length() for tensor in tensors)
    assert num_bytes < 0.7 * rounded
    assert all(address <= tensor.data_ptr() < address + num_bytes for tensor in tensors)
    assert all(tensor.data_ptr() % ALIGNMENT == 0 for tensor in tensors)


def test_tensors_begin_as_zeros_and_do_not_overlap() -> None:
    tensors = pinned_zeros(SHAPES, "--host-kv-bytes", FakeRegistry())
    assert all((tensor.float() == 0).all() for tensor in tensors)
    for index, tensor in enumerate(tensors):
        tensor.fill_(index + 1)
    assert all((tensor.float() == index + 1).all() for index, tensor in enumerate(tensors))


def test_memory_is_let_go_of_with_its_last_tensor() -> None:
    registry = FakeRegistry()
    first, *rest = pinned_zeros(SHAPES, "--host-kv-bytes", registry)
    view = first[3:7]
    del first, rest
    gc.collect()
    assert registry.registered, "a view still reads it"
    view += 1
    del view
    gc.collect()
    assert not registry.registered


def test_memory_that_the_driver_does_not_pin_names_the_flag() -> None:
    with pytest.raises(ConfigError, match=r"^--host-kv-bytes: CUDA cannot pin \d+ bytes .* \(error 2\); lower it, or"):
        pinned_zeros(SHAPES, "--host-kv-bytes", FakeRegistry(error=2))


def test_bytes_are_as_many_as_are_wanted() -> None:
    registry = FakeRegistry()
    whole = pinned_bytes(PAGE + 1, "--pinned-bytes", registry)
    assert (whole.dtype, tuple(whole.shape), int(whole.sum())) == (torch.uint8, (PAGE + 1,), 0)
    assert registry.registered == {whole.data_ptr(): 2 * PAGE}
    del whole
    gc.collect()
    assert not registry.registered


def test_more_than_the_host_has_is_refused_before_its_pages_are_taken() -> None:
    """The driver takes every page: Linux would end the worker."""
    registry = FakeRegistry()
    with pytest.raises(ConfigError) as caught:
        pinned_bytes(1 << 50, "--pinned-bytes", registry)
    assert re.fullmatch(
        rf"--pinned-bytes: {1 << 50} bytes of host memory are to be pinned, and \d+ are free; lower it",
        str(caught.value),
    )
    with pytest.raises(ConfigError, match=r"^--host-kv-bytes: \d+ bytes of host memory are to be pinned, and \d+ are "):
        pinned_zeros([((1 << 48,), torch.float32)], "--host-kv-bytes", registry)
    assert not registry.registered


def test_memory_that_cannot_be_mapped_names_the_flag(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: int) -> None:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr("data_plane.engine.memory.pinned.mmap.mmap", refuse)
    with pytest.raises(ConfigError, match=r"^--pinned-bytes: 9 bytes of host memory cannot be had: .*; lower it$"):
        pinned_bytes(9, "--pinned-bytes", FakeRegistry())
