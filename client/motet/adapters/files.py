"""The files of an adapter, in a directory that PEFT or TensorRT-LLM's tools wrote, or in memory.

Everything that can be wrong with the directory is found before the first chunk. The files are streamed from disk.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from motet.errors import InvalidArgument, invalid_field
from motet.v1 import adapters_pb2

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
_PICKLE_FILE = "adapter_model.bin"
# What others write in place of WEIGHTS_FILE, with what to do.
_FILES_OF_OTHERS = {
    "adapter_model.tensors": "tensorizer; load the adapter with PEFT and save it again with save_pretrained",
    "adapters.safetensors": "mlx-lm, with names and an order of its own; convert the adapter to PEFT's form",
}
_LFS_POINTER = b"version https://git-lfs"


@dataclass(frozen=True)
class AdapterFile:
    """One file of an adapter."""

    name: str
    source: Path | bytes  # where it lies, or its content
    size_bytes: int
    sha256: str

    def listed(self) -> adapters_pb2.UploadFile:
        """What a header says of it."""
        return adapters_pb2.UploadFile(name=self.name, size_bytes=self.size_bytes, sha256=self.sha256)

    def chunks(self, index: int, begin: int = 0) -> Iterator[adapters_pb2.UploadChunk]:
        """Its bytes from `begin` on, as file `index` of an upload. Raises InvalidArgument if the file changed."""
        for offset in range(begin, self.size_bytes, CHUNK_BYTES):
            yield adapters_pb2.UploadChunk(file_index=index, offset=offset, data=self._read(offset))

    def _read(self, offset: int) -> bytes:
        expected = min(CHUNK_BYTES, self.size_bytes - offset)
        if isinstance(self.source, bytes):
            return self.source[offset : offset + expected]
        # Opened per chunk, so that an abandoned upload leaves no open file behind.
        try:
            with self.source.open("rb") as opened:
                opened.seek(offset)
                data = opened.read(expected)
            if len(data) != expected:
                raise OSError(f"{expected} bytes expected at {offset}, {len(data)} there")
        except OSError as error:
            raise InvalidArgument(f"{self.name} changed during the upload: {error}") from error
        return data


def files_of(directory: str | Path) -> list[AdapterFile]:
    """The files of the adapter in a directory. Reads and hashes them. Raises InvalidArgument."""
    return [_describe(path) for path in paths_of(Path(directory))]


def files_in_memory(files: Mapping[str, bytes]) -> list[AdapterFile]:
    """The files, by their names. Raises InvalidArgument or TypeError."""
    if not files:
        raise invalid_field("weights", "is empty; give the content of the adapter's files by their names")
    for name, content in files.items():
        if not isinstance(content, bytes):
            raise TypeError(f"weights[{name!r}] is {type(content).__name__}; give bytes")
    return [
        AdapterFile(name, content, len(content), hashlib.sha256(content).hexdigest()) for name, content in files.items()
    ]


def paths_of(directory: Path) -> list[Path]:
    """The files of the adapter in a directory. Reads none of them. Raises InvalidArgument."""
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
        if not _is_there(path):
            raise invalid_field(
                "directory", f"{directory} has no {path.name}; {_way_on(directory)}", reason="ADAPTER_INVALID"
            )
    return [config, weights, *_present(directory, (*COMPANION_FILES, SIGNATURE_FILE))]


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
    beside = _present(directory, (CONFIG_FILE, EXACT_ARRAY, SIGNATURE_FILE))
    return [directory / WEIGHTS_ARRAY, directory / ROWS_ARRAY, *beside]


def _present(directory: Path, names: tuple[str, ...]) -> list[Path]:
    """The files with these names that exist. Raises InvalidArgument for a name of something else."""
    return [directory / name for name in names if _is_there(directory / name)]


def _is_there(path: Path) -> bool:
    """Whether there is such a file. Raises InvalidArgument for a link that leads nowhere, or no file."""
    if path.is_file():
        return True
    if not (path.is_symlink() or path.exists()):
        return False
    what = "is not a file" if path.exists() else "is a link to a file that is not there"
    raise invalid_field(
        "directory", f"{path} {what}; put the file in its place, or remove it", reason="ADAPTER_INVALID"
    )


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
    for name, writer in _FILES_OF_OTHERS.items():
        if (directory / name).is_file():
            return f"there is {name} of {writer}"
    return f"an adapter is {CONFIG_FILE} and {WEIGHTS_FILE}, as PEFT's save_pretrained writes them"


def _describe(path: Path) -> AdapterFile:
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
            return AdapterFile(path.name, path, opened.tell(), digest)
    except OSError as error:
        raise invalid_field("directory", f"{path.name} cannot be read: {error.strerror}") from error
