"""Adapters enter and leave the slot table beside steps that are queued: the compute thread waits for none of them."""

from __future__ import annotations

from typing import Any, NoReturn

import pytest
import torch
from torch.overrides import TorchFunctionMode

from kernels.devices import put_number
from tests.data_plane.adapters.factories import load, make_arena, pack, run_step


class NoWaits(TorchFunctionMode):
    """Refuses what waits on a GPU: torch copies a number that is assigned to an element, or by a tensor of indices."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.Tensor.__setitem__:
            _, index, value = args
            assert isinstance(value, torch.Tensor) or isinstance(index, slice), f"[{index}] = {value} waits"
        return function(*args, **(kwargs or {}))


def refuse(*_: object) -> NoReturn:
    raise AssertionError("an upload of the compute thread: behind the copies of loads it holds up the next step")


@pytest.mark.parametrize("vectors", ["", "bias", "magnitude"])
def test_an_adapter_enters_and_leaves_without_an_upload_or_a_wait(
    vectors: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    arena = make_arena()
    adapters = {slot: pack(8, seed=slot, vectors=vectors) for slot in range(3)}
    for slot, packed in adapters.items():
        load(arena, slot, 1, packed)
    with monkeypatch.context() as patched, NoWaits():
        patched.setattr(torch, "from_numpy", refuse)
        arena.list_published()
        arena.evict(1, 1)
    load(arena, 1, 2, adapters[0])
    run_step(arena, [0, 1, 2, -1], adapters | {1: adapters[0]})
    assert arena.table.generation.tolist() == [1, 2, 1, 0]
    arena.check_invariants()


def test_a_number_is_put_into_one_element() -> None:
    tensor = torch.zeros(4, dtype=torch.int64)
    put_number(tensor, 2, -7)
    put_number(tensor, 3, 1 << 40)
    assert tensor.tolist() == [0, 0, -7, 1 << 40]


def test_an_assignment_that_waits_is_noticed() -> None:
    tensor = torch.zeros(4)
    with NoWaits():
        tensor[1:2] = 5.0
        tensor[torch.tensor([0])] = torch.ones(1)
        for index in (0, torch.tensor([0])):
            with pytest.raises(AssertionError, match="waits"):
                tensor[index] = 1.0
