"""Weights that a generation brings under a number, and the messages that carry them. No I/O but reading files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from motet.adapters.files import AdapterFile, files_in_memory, files_of
from motet.errors import InvalidArgument, MotetError
from motet.inputs.scalars import uint_of
from motet.v1 import generation_pb2

NOT_CACHED = "LORA_TASK_NOT_CACHED"  # the reason of an error
_UINT64_MAX = 2**64 - 1
_Request = generation_pb2.GenerateWithTaskRequest


class LoraTask:
    """Weights for `generate(..., lora_task=...)`: sent under a number with the first request, later not sent again.

    Give one object to all requests that use the weights. The first request brings them; later requests name the number
    and the digest that the server reported, so that they never use other weights. A request whose task is no longer
    cached brings the weights again by itself. Requests that begin before the first one has started bring them, too: the
    server keeps one copy.
    """

    def __init__(self, task_id: int, weights: str | Path | Mapping[str, bytes]) -> None:
        """`task_id`: from 0 to 2**64 - 1, of your tenant. Other weights under a number that is cached are refused.

        `weights`: the directory of an adapter, as for `adapters.register`, or the content of its files by their names.
        Reads and hashes the files. Raises InvalidArgument if they cannot be an adapter.
        """
        self.task_id = uint_of("lora_task.task_id", task_id, _UINT64_MAX)
        self.digest = ""  # of the weights, once a server has reported it
        self._files = files_in_memory(weights) if isinstance(weights, Mapping) else files_of(weights)

    def __repr__(self) -> str:
        return f"LoraTask({self.task_id}, digest={self.digest!r})"

    @property
    def files(self) -> tuple[AdapterFile, ...]:
        """What is sent, in this order."""
        return tuple(self._files)

    def pinned(self, request: generation_pb2.GenerateRequest) -> generation_pb2.GenerateRequest:
        """The request for these weights alone, if their digest is known and the request names none."""
        if not self.digest or request.adapter_digest:
            return request
        pinned = generation_pb2.GenerateRequest()
        pinned.CopyFrom(request)
        pinned.adapter_digest = self.digest
        return pinned


class TaskUpload:
    """One request together with the weights of its task. `failure` says afterwards what broke on this side."""

    def __init__(self, request: generation_pb2.GenerateRequest, task: LoraTask) -> None:
        self.failure: MotetError | None = None
        self._request = request
        self._files = task.files

    def messages(self) -> Iterator[generation_pb2.GenerateWithTaskRequest]:
        """Header first, then the chunks of the files in order."""
        listed = [file.listed() for file in self._files]
        yield _Request(header=generation_pb2.GenerateWithTaskHeader(request=self._request, files=listed))
        try:
            for index, file in enumerate(self._files):
                for chunk in file.chunks(index):
                    yield _Request(chunk=chunk)
        except InvalidArgument as error:
            self.failure = error
            raise


def task_id_of(task: LoraTask | int | None) -> int | None:
    """The number that a request names. Raises InvalidArgument."""
    if task is None or isinstance(task, LoraTask):
        return None if task is None else task.task_id
    return uint_of("lora_task", task, _UINT64_MAX)
