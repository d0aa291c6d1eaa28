"""Turns an adapter's directory, written by PEFT or by TensorRT-LLM's tools, into the messages of an upload.

The files are streamed from disk.
Everything that can be wrong with the directory is found before the first message.
"""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from motet.calls import UnaryCall
from motet.errors import InvalidArgument, MotetError, ServerError, invalid_field
from motet.types import Adapter, AdapterVisibility, VersionRollout
from motet.v1 import adapters_pb2
from motet.wire import adapter_from, rollout_message, visibility_message

CHUNK_BYTES = 512 * 1024
CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
# TensorRT-LLM's arrays, and the exact values that `motet convert peft-to-trtllm` may write beside them.
WEIGHTS_ARRAY, ROWS_ARRAY, EXACT_ARRAY = "model.lora_weights.npy", "model.lora_config.npy", "model.lora_exact.npy"
# Sent where the directory has them: what an adapter may bring beside its weights.
COMPANION_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "generation_config.json",
)
SIGNATURE_FILE = "model.sig"  # sent where the directory has one
_MAX_STEPS_MISSED = 5  # further GetUpload calls because the server's files changed after its response
_PICKLE_FILE = "adapter_model.bin"
_LFS_POINTER = b"version https://git-lfs"

Progress = Callable[[int, int], None]  # (bytes sent, bytes in all)


@dataclass(frozen=True)
class _File:
    path: Path
    size_bytes: int
    sha256: str


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
        self._files = [_describe(path) for path in _adapter_files(Path(directory))]
        self._total_bytes = sum(file.size_bytes for file in self._files)
        self._header = adapters_pb2.UploadHeader(
            adapter_id=name.removeprefix("adapters/"),
            display_name=display_name,
            labels=dict(labels or {}),
            files=[
                adapters_pb2.UploadFile(name=file.path.name, size_bytes=file.size_bytes, sha256=file.sha256)
                for file in self._files
            ],
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
        return UnaryCall(
            method="/motet.v1.AdapterService/GetUpload",
            request=adapters_pb2.GetUploadRequest(upload_id=self._header.upload_id),
            response_type=adapters_pb2.GetUploadResponse,
            read=lambda response: list(response.received_bytes),
            is_repeatable=True,
        )

    def resume(self, received: Sequence[int] | None) -> None:
        """Go on behind `received` bytes of each file. None: begin again."""
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
        for file_index, (file, begin) in enumerate(zip(self._files, self._received, strict=True)):
            for offset in range(begin, file.size_bytes, CHUNK_BYTES):
                data = self._read(file, offset)
                chunk = adapters_pb2.UploadChunk(file_index=file_index, offset=offset, data=data)
                yield adapters_pb2.UploadAdapterRequest(chunk=chunk)
                num_sent += len(data)
                if self._progress is not None:
                    self._progress(num_sent, self._total_bytes)

    def _read(self, file: _File, offset: int) -> bytes:
        # Opened per chunk, so that an abandoned upload leaves no open file behind.
        expected = min(CHUNK_BYTES, file.size_bytes - offset)
        try:
            with file.path.open("rb") as opened:
                opened.seek(offset)
                data = opened.read(expected)
            if len(data) != expected:
                raise OSError(f"{expected} bytes expected at {offset}, {len(data)} there")
        except OSError as error:
            self.failure = InvalidArgument(f"{file.path.name} changed during the upload: {error}")
            raise self.failure from error
        return data


def _adapter_files(directory: Path) -> list[Path]:
    if not directory.is_dir():
        raise invalid_field("directory", f"{directory} is not a directory; give the one PEFT's save_pretrained wrote")
    if (directory / WEIGHTS_ARRAY).is_file():
        return _trtllm_files(directory)
    config, weights = directory / CONFIG_FILE, directory / WEIGHTS_FILE
    if not weights.is_file() and (directory / _PICKLE_FILE).is_file():
        raise invalid_field(
            "directory",
            f"{directory} has its weights only as {_PICKLE_FILE}, a pickle, which can run code and is refused; "
            f"load the adapter with PEFT where you trust it and save it again with "
            f"model.save_pretrained(DIR, safe_serialization=True)",
            reason="ADAPTER_INVALID",
        )
    for path in (config, weights):
        if not path.is_file():
            raise invalid_field(
                "directory", f"{directory} has no {path.name}; {_way_on(directory)}", reason="ADAPTER_INVALID"
            )
    beside = [directory / name for name in (*COMPANION_FILES, SIGNATURE_FILE)]
    return [config, weights, *(path for path in beside if path.is_file())]


def _trtllm_files(directory: Path) -> list[Path]:
    if (directory / WEIGHTS_FILE).is_file():
        raise invalid_field(
            "directory",
            f"{directory} has {WEIGHTS_ARRAY} and {WEIGHTS_FILE}; keep one of the two",
            reason="ADAPTER_INVALID",
        )
    if not (directory / ROWS_ARRAY).is_file():
        raise invalid_field(
            "directory",
            f"{directory} has no {ROWS_ARRAY}, which TensorRT-LLM's hf_lora_convert.py writes beside {WEIGHTS_ARRAY}",
            reason="ADAPTER_INVALID",
        )
    beside = [directory / name for name in (CONFIG_FILE, EXACT_ARRAY, SIGNATURE_FILE)]
    return [directory / WEIGHTS_ARRAY, directory / ROWS_ARRAY, *(path for path in beside if path.is_file())]


def _way_on(directory: Path) -> str:
    """What to do about a directory without an adapter, from what lies there instead."""
    shards = sorted(path.name for path in directory.glob("adapter_model-*-of-*.safetensors"))
    if shards:
        return f"its weights are in {len(shards)} shards ({shards[0]} ...): join them into one {WEIGHTS_FILE}"
    below = sorted(path.parent.name for path in directory.glob(f"*/{CONFIG_FILE}"))
    if below:
        return (
            f"there are adapters in {', '.join(below[:3])}{', ...' if below[3:] else ''}: give one of these directories"
        )
    return f"an adapter is {CONFIG_FILE} and {WEIGHTS_FILE}, as PEFT's save_pretrained writes them"


def _describe(path: Path) -> _File:
    try:
        with path.open("rb") as opened:
            if opened.read(len(_LFS_POINTER)) == _LFS_POINTER:
                raise invalid_field(
                    "directory",
                    f"{path.name} is a git-lfs pointer, not the file itself; run `git lfs pull` in the clone",
                    reason="ADAPTER_INVALID",
                )
            opened.seek(0)
            digest = hashlib.file_digest(opened, "sha256").hexdigest()
            return _File(path, opened.tell(), digest)
    except OSError as error:
        raise invalid_field("directory", f"{path.name} cannot be read: {error.strerror}") from error
