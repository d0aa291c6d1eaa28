"""Named stretches of a thread's time: `span` marks one, `collecting` keeps them. No torch.

Where nobody collects, a span costs a call. Called by the plan client and the engine; collected by profile.py.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from types import TracebackType

from kernels.native import clock_ns


@dataclass(frozen=True, slots=True)
class Span:
    """What a thread did; times are of CLOCK_MONOTONIC, which native code takes its own from."""

    name: str
    thread: int  # threading.get_ident of it
    began_ns: int
    ended_ns: int


_NOTHING: AbstractContextManager[None] = nullcontext()
_keep: Callable[[Span], None] | None = None


def span(name: str) -> AbstractContextManager[None]:
    """What the block does, under this name."""
    return _NOTHING if _keep is None else _Open(name, _keep)


@contextmanager
def collecting(keep: Callable[[Span], None]) -> Iterator[None]:
    """Call `keep` with every span of the process that ends; on the span's thread."""
    global _keep
    assert _keep is None, "spans are being collected already"
    _keep = keep
    try:
        yield
    finally:
        _keep = None


class _Open(AbstractContextManager[None]):
    def __init__(self, name: str, keep: Callable[[Span], None]) -> None:
        self._name = name
        self._keep = keep

    def __enter__(self) -> None:
        self._began_ns = clock_ns()

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._keep(Span(self._name, threading.get_ident(), self._began_ns, clock_ns()))
