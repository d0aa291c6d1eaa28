"""The process that computes merged float32 weights for a verification, and the directory that it works in."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import shutil
import tempfile
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from contract.fingerprint import NOT_QUANTIZED
from control_plane.child_process import ChildProcess, module_command
from control_plane.directory_lock import PRIVATE
from control_plane.errors import PreconditionFailed, StoreUnavailable
from control_plane.host_cache.packed import read_layout
from control_plane.host_cache.weights import AdapterWeights

logger = logging.getLogger(__name__)

TIMEOUT_S = 1800.0  # a model of 8B parameters takes minutes on a CPU
_PREFIX = "verify-"
_ROW_IDS = ".row_ids"  # ends the name of the tensor that has the tokens of replaced rows
_REFUSED = 3  # data_plane/verify.py
_LINE_CHARS = 500


class Prompt(NamedTuple):
    """One prompt of a verification."""

    token_ids: tuple[int, ...]
    active_from: int = 0  # tokens before those on which the adapter acts


class Reference(NamedTuple):
    """Log-probabilities of the tokens of each prompt from the second on."""

    base: list[list[float]]
    merged: list[list[float]]
    # With inputs of linears rounded as the workers' FP8 linears do; the same as above where they do not.
    base_rounded: list[list[float]]
    merged_rounded: list[list[float]]


class PackedFiles:
    """A version's packed files in a directory of their own."""

    def __init__(self, directory: Path, num_chunks: int, model_dir: Path, quantization: str = NOT_QUANTIZED) -> None:
        self._quantization = quantization
        self._directory = directory
        self._num_chunks = num_chunks
        self._model_dir = model_dir

    def changed_token_ids(self) -> list[int]:
        """The tokens whose rows of embedding or head the version replaces or adds, rising."""
        found: set[int] = set()
        for path in (self._directory / str(index) for index in range(self._num_chunks)):
            with path.open("rb") as file:
                header_size = int.from_bytes(file.read(8), "little")  # as safetensors writes: this server wrote it
                header = json.loads(file.read(header_size))
                for name, entry in header.items():
                    if name.endswith(_ROW_IDS):
                        begin, end = entry["data_offsets"]
                        file.seek(8 + header_size + begin)
                        found.update(np.frombuffer(file.read(end - begin), dtype="<i4").tolist())
        return sorted(found)

    async def compute(self, prompts: Sequence[Prompt]) -> Reference:
        """Run the process. Raises PreconditionFailed for a version that cannot be merged, or StoreUnavailable."""
        described = [prompt._asdict() for prompt in prompts]
        (self._directory / "prompts.json").write_text(json.dumps(described), encoding="utf-8")
        argv, environment = module_command(
            "data_plane.verify", str(self._model_dir), str(self._directory), self._quantization
        )
        with (self._directory / "log").open("wb") as log:
            child = ChildProcess(argv, stderr=log, environment=environment)
            try:
                async with asyncio.timeout(TIMEOUT_S):
                    status = await child.wait()
            except TimeoutError:
                raise StoreUnavailable(f"the verifying process did not end within {TIMEOUT_S:g} s") from None
            finally:
                if child.returncode is None:
                    child.kill()
        if status:
            raise self._failure(status)
        result: dict[str, Any] = json.loads((self._directory / "result.json").read_text("utf-8"))
        return Reference(*(result[name] for name in Reference._fields))

    def _failure(self, status: int) -> PreconditionFailed | StoreUnavailable:
        """What the client sees. The process's own words may have paths of this machine: they stay in this log."""
        refusal = self._directory / "refusal.txt"
        if status == _REFUSED and refusal.exists():
            return PreconditionFailed(refusal.read_text("utf-8"))
        lines = (self._directory / "log").read_text("utf-8", "replace").strip().splitlines()
        logger.error(
            "verifying process failed status=%d: %s", status, lines[-1][:_LINE_CHARS] if lines else "no message"
        )
        return StoreUnavailable(
            f"the verifying process ended with status {status}, and the server's log says why; the server's machine "
            "needs torch, transformers and 4 bytes of memory for each parameter"
        )


class ReferenceProcess:
    """Makes directories for such processes."""

    def __init__(
        self, model_dir: Path, work_dir: Path, weights: AdapterWeights, quantization: str = NOT_QUANTIZED
    ) -> None:
        """`quantization`: how workers hold the base model's linears, of contract.fingerprint."""
        self._quantization = quantization
        self._model_dir = model_dir
        self._work_dir = work_dir
        self._weights = weights

    def remove_leftovers(self) -> int:
        """Remove what a server that was killed left here. Call this at a start. Returns a count."""
        left = list(self._work_dir.glob(f"{_PREFIX}*"))
        for directory in left:
            shutil.rmtree(directory, ignore_errors=True)
        if left:
            logger.info("directories of verifications that were cut off removed count=%d", len(left))
        return len(left)

    @contextlib.asynccontextmanager
    async def packed(self, digest: str) -> AsyncIterator[PackedFiles]:
        """A version's packed files, until the block ends."""
        self._work_dir.mkdir(mode=PRIVATE, parents=True, exist_ok=True)
        directory = Path(tempfile.mkdtemp(dir=self._work_dir, prefix=_PREFIX))
        try:
            yield PackedFiles(directory, await self._write(digest, directory), self._model_dir, self._quantization)
        finally:
            with contextlib.suppress(OSError):
                shutil.rmtree(directory)

    async def _write(self, digest: str, directory: Path) -> int:
        packed = await self._weights.open_packed(digest)
        layout = read_layout(digest, packed.manifest)
        assert layout is not None, "an opened adapter has a manifest of ours"
        (directory / "manifest.json").write_bytes(packed.manifest)
        parts = packed.parts()
        for index, size in enumerate(layout.sizes):
            with (directory / str(index)).open("wb") as out:
                while out.tell() < size:
                    await asyncio.to_thread(out.write, await anext(parts))
        return len(layout.sizes)
