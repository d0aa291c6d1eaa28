"""A client's channel whose bidirectional streams deliver every message some time after it was sent, either way.

Messages wait in sleeping threads, so the delay takes no processor from whoever is being measured.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from queue import SimpleQueue
from typing import Any

import grpc


class DelayedStream:
    """What `source` gives, each item `delay_s` after source gave it; its end and its error come as late."""

    def __init__(self, source: Iterator[Any], delay_s: float) -> None:
        self._source = source
        self._delay_s = delay_s
        self._items: SimpleQueue[tuple[float, Any, BaseException | None]] = SimpleQueue()
        threading.Thread(target=self._pump, name="delayed-stream", daemon=True).start()

    def __iter__(self) -> DelayedStream:
        return self

    def __next__(self) -> Any:  # a message
        due_s, item, error = self._items.get()
        if (rest_s := due_s - time.monotonic()) > 0:
            time.sleep(rest_s)
        if error is not None:
            raise error
        return item

    def __getattr__(self, name: str) -> Any:
        return getattr(self._source, name)  # cancel, code, details of a call

    def _pump(self) -> None:
        try:
            for item in self._source:
                self._items.put((time.monotonic() + self._delay_s, item, None))
            end: BaseException = StopIteration()
        except Exception as error:  # the thread's edge: it is raised where the stream is read
            end = error
        self._items.put((time.monotonic() + self._delay_s, None, end))


class _DelayBoth(grpc.StreamStreamClientInterceptor):  # type: ignore[type-arg]  # no generic class at run time
    def __init__(self, delay_s: float) -> None:
        self._delay_s = delay_s

    def intercept_stream_stream(self, continuation: Any, client_call_details: Any, request_iterator: Any) -> Any:
        call = continuation(client_call_details, DelayedStream(request_iterator, self._delay_s))
        return DelayedStream(call, self._delay_s)


def delayed_channel(delay_s: float) -> Callable[[str], grpc.Channel]:
    """Opens channels whose streams take `delay_s` each way."""
    return lambda address: grpc.intercept_channel(grpc.insecure_channel(address), _DelayBoth(delay_s))
