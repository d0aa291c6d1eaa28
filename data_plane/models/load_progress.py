"""Turns transformers' progress bars into log records, so that the log shows the progress of a long load."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from typing import Any

from transformers.utils import logging as transformers_logging

from contract.process_log import Progress

_WEIGHTS = "Loading weights"  # the bar of from_pretrained over the tensors of all shards


@contextlib.contextmanager
def logging_progress(logger: logging.Logger) -> Iterator[None]:
    """While the block runs, log how many tensors of the checkpoint were read. No bar is drawn."""

    def make_bar(_factory: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        bar = transformers_logging.EmptyTqdm(*args, **kwargs)  # type: ignore[no-untyped-call]
        is_weights = kwargs.get("desc") == _WEIGHTS and args and hasattr(args[0], "__len__")
        return _LoggingBar(bar, Progress(logger, "loading weights", len(args[0]))) if is_weights else bar

    previous = transformers_logging.set_tqdm_hook(make_bar)
    try:
        yield
    finally:
        transformers_logging.set_tqdm_hook(previous)


class _LoggingBar:
    """An invisible bar that logs each iteration."""

    def __init__(self, bar: Any, progress: Progress) -> None:
        self._bar = bar
        self._progress = progress

    def __iter__(self) -> Iterator[Any]:
        for item in self._bar:
            yield item
            self._progress.advance()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._bar, name)
