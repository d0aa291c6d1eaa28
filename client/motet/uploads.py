"""Turns an adapter's directory into the messages of an upload, which goes on where a broken one ended."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from motet.adapters.files import files_of
from motet.calls import UnaryCall
from motet.errors import InvalidArgument, MotetError, ServerError
from motet.types import Adapter, AdapterVisibility, VersionRollout
from motet.v1 import adapters_pb2
from motet.wire import adapter_from, rollout_message, visibility_message

_MAX_STEPS_MISSED = 5  # further GetUpload calls because the server's files changed after its response

Progress = Callable[[int, int], None]  # (bytes sent, bytes in all)


def upload_state(upload_id: str) -> UnaryCall[list[int]]:
    """How many bytes of each file the server has of an upload. NotFound: this caller has no upload of this id."""
    return UnaryCall(
        method="/motet.v1.AdapterService/GetUpload",
        request=adapters_pb2.GetUploadRequest(upload_id=upload_id),
        response_type=adapters_pb2.GetUploadResponse,
        read=lambda response: list(response.received_bytes),
        is_repeatable=True,
    )


class AdapterUpload:
    """One upload. `failure` says afterwards what broke on this side, if anything did."""

    method = "/motet.v1.AdapterService/UploadAdapter"
    request_type = adapters_pb2.UploadAdapterRequest
    response_type = adapters_pb2.UploadAdapterResponse

    def __init__(
        self,
        name: str,
        directory: str | Path,
        *,
        display_name: str = "",
        labels: Mapping[str, str] | None = None,
        visibility: AdapterVisibility | str | None = None,
        shared_with: Sequence[str] = (),
        owner: str = "",
        rollout: VersionRollout | None = None,
        validate_only: bool = False,
        progress: Progress | None = None,
    ) -> None:
        """Reads and hashes the files: seconds for gigabytes. Raises InvalidArgument if they cannot be an adapter."""
        self.failure: MotetError | None = None
        self._progress = progress
        self._files = files_of(directory)
        self._total_bytes = sum(file.size_bytes for file in self._files)
        self._header = adapters_pb2.UploadHeader(
            adapter_id=name.removeprefix("adapters/"),
            display_name=display_name,
            labels=dict(labels or {}),
            files=[file.listed() for file in self._files],
            visibility=visibility_message(visibility),
            shared_with=shared_with,
            owner=owner,
            rollout=rollout_message(rollout),
            validate_only=validate_only,
            request_id=uuid.uuid4().hex,
            upload_id=uuid.uuid4().hex,
        )
        self._was_sent = self._was_resumed = False
        self._received = [0] * len(self._files)  # bytes of each file that the server has
        self._num_steps_missed = 0

    def read(self, response: adapters_pb2.UploadAdapterResponse) -> Adapter:
        """What the caller gets."""
        return adapter_from(response.adapter)

    def resumption(self) -> UnaryCall[list[int]] | None:
        """The call that returns how many bytes of each file the server has from an earlier attempt."""
        if not self._was_sent:
            return None
        return upload_state(self._header.upload_id)

    def resume(self, received: Sequence[int] | None) -> None:
        """Go on after `received` bytes of each file. None: begin again."""
        received = received or [0] * len(self._files)
        sizes = [file.size_bytes for file in self._files]
        if len(received) != len(sizes) or any(have > size for have, size in zip(received, sizes, strict=True)):
            raise ServerError(f"the server has {list(received)} bytes of files of {sizes} bytes; send them again")
        self._received = list(received)

    def is_out_of_step(self, error: MotetError) -> bool:
        """Whether an attempt was refused because the server has another number of bytes than it said before."""
        fields = {violation.field for violation in error.field_violations} if isinstance(error, InvalidArgument) else ()
        if not self._was_resumed or not {"chunk.offset", "chunk.file_index"} & set(fields):
            return False
        self._num_steps_missed += 1
        return self._num_steps_missed <= _MAX_STEPS_MISSED

    def messages(self) -> Iterator[adapters_pb2.UploadAdapterRequest]:
        """Header first, then the chunks that the server does not have, in order."""
        self._was_resumed, self._was_sent = self._was_sent, True
        yield adapters_pb2.UploadAdapterRequest(header=self._header)
        num_sent = sum(self._received)
        try:
            for index, (file, begin) in enumerate(zip(self._files, self._received, strict=True)):
                for chunk in file.chunks(index, begin):
                    yield adapters_pb2.UploadAdapterRequest(chunk=chunk)
                    num_sent += len(chunk.data)
                    if self._progress is not None:
                        self._progress(num_sent, self._total_bytes)
        except InvalidArgument as error:
            self.failure = error
            raise
