"""One row of the benchmark's table: our call, what the same costs elsewhere, and how much of it must be moved."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from benchmarks.kernels.measure import Call

ROTATED_BYTES = 256 << 20  # copies of the inputs until together they are larger than any cache
MAX_COPIES = {"cuda": 8, "cpu": 64}  # on a GPU the caches are flushed beside

# Slots of the engine's arena by default, most of which no token of a step names.
NUM_SLOTS = 256

# How far another project's result may be from ours, as a part of its largest value.
PEER_ERROR = 3e-2


class Peer(Protocol):
    """Another project's kernels."""

    @property
    def name(self) -> str:
        """The column's heading."""

    def call(self, op: str, arguments: dict[str, Any]) -> Call | None:
        """The op over these inputs, None if the peer has no such op."""


@dataclass(slots=True)
class Made:
    """Calls over one copy of the inputs."""

    ours: Call
    arguments: dict[str, Any]  # by the names of our public call, what another project's kernels are given
    peers: dict[str, Call] = field(default_factory=dict)
    outputs: Sequence[torch.Tensor] = ()  # that the call writes into; another project's must hold the same after it
    # The part of our result that another project's is compared to.
    compared: Callable[[Any], Any] = lambda result: result


@dataclass(slots=True)
class Work:
    """One row of the table."""

    op: str
    name: str
    num_bytes: int  # that must be moved once
    flops: int
    make: Callable[[], Made]
    calls: dict[str, list[Call]] = field(default_factory=dict)  # by name, one per copy of the inputs
    refused: dict[str, str] = field(default_factory=dict)  # peers that do not run here, and why

    def prepare(self, device: torch.device, peer: Peer | None) -> dict[str, list[Call]]:
        """Inputs and calls; as many copies as it takes to rotate. Peers are tried on the first."""
        copies = min(max(-(-ROTATED_BYTES // max(self.num_bytes, 1)), 1), MAX_COPIES[device.type])
        for _ in range(copies):
            made = self.make()
            if peer is not None:
                self._add(peer, made)
            if not self.calls:
                self.refused |= _try(made, None if peer is None else peer.name)
            self.calls.setdefault("ours", []).append(made.ours)
            for name, call in made.peers.items():
                if name not in self.refused:
                    self.calls.setdefault(name, []).append(call)
        return self.calls

    def _add(self, peer: Peer, made: Made) -> None:
        """The peer's call over these inputs, if it has the op and has not failed before."""
        if peer.name in self.refused:
            return
        try:
            call = peer.call(self.op, made.arguments)
        except Exception as error:  # whatever another project raises
            self.refused[peer.name] = _reason(error)
            self.calls.pop(peer.name, None)
            return
        if call is not None:
            made.peers[peer.name] = call

    def clear(self) -> None:
        """Drop the calls, and with them their inputs."""
        self.calls.clear()


def _try(made: Made, foreign: str | None) -> dict[str, str]:
    """Which peers do not run here, and why. Another project's must return what ours does."""
    refused = {}
    for name, call in made.peers.items():
        try:
            theirs = _returned_and_written(call, made.outputs)
        except Exception as error:  # whatever a torch of another version, or another project, raises
            refused[name] = _reason(error)
            continue
        if name == foreign:
            returned, *written = _returned_and_written(made.ours, made.outputs)
            difference = _difference(theirs, [made.compared(returned), *written])
            if difference is not None:
                refused[name] = difference
    return refused


def _returned_and_written(call: Call, outputs: Sequence[torch.Tensor]) -> list[object]:
    """What the call returns, and what it makes of the outputs, which then have their values back."""
    before = [output.clone() for output in outputs]
    try:
        returned = call()
        return [returned, *(output.clone() for output in outputs)]
    finally:
        for output, old in zip(outputs, before, strict=True):
            output.copy_(old)


def _difference(theirs: Sequence[object], ours: Sequence[object]) -> str | None:
    """Why the results differ, if they do."""
    for their, our in zip(theirs, ours, strict=True):
        if not isinstance(our, torch.Tensor):
            continue
        if not isinstance(their, torch.Tensor):
            return f"returns a {type(their).__name__}, we {tuple(our.shape)}"
        if their.shape != our.shape:
            return f"returns {tuple(their.shape)}, we {tuple(our.shape)}"
        largest = float(our.double().abs().max())
        distance = float((their.double() - our.double()).abs().max())
        if not distance <= PEER_ERROR * largest:
            return f"returns other values: {distance:.2g} away where the largest value is {largest:.2g}"
    return None


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"


def random(*shape: int, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(*shape, device=device, dtype=dtype)


@dataclass(frozen=True, slots=True)
class Model:
    """Sizes of the base model whose layers are timed."""

    hidden: int
    intermediate: int
    num_heads: int
    num_kv_heads: int
    dim: int
    vocab: int


LLAMA_8B = Model(4096, 14336, 32, 8, 128, 128256)
SMALL = Model(1024, 2816, 16, 8, 64, 8192)
BLOCK_SIZE = 16
