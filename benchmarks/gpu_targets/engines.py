"""Engines of random weights that are made on the device, and packed adapters for them."""

from __future__ import annotations

import gc
import hashlib
import json
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.engine.random_model import hollow_checkpoint, random_weights
from benchmarks.engine.step_times import BLOCK_SIZE, RANK, adapter_values
from benchmarks.serving.checkpoints import SHAPES, llama_config, make_ranked_adapter
from control_plane.registry.model.base_model import BaseModel
from control_plane.registry.peft.ingest import ingest
from data_plane.adapters.format.manifest import read_manifest, verify_chunk
from data_plane.config import WorkerConfig
from data_plane.engine.build import build_engine
from data_plane.engine.engine import TorchEngine

MAX_ADAPTER_BYTES = 1 << 30
TOKEN_BUDGET = 4096  # of a step


@dataclass(frozen=True)
class Setup:
    """What all measurements of one run share."""

    device: torch.device
    shape: str  # of SHAPES
    dtype: str
    folder: Path  # for the checkpoint and the adapter
    num_rows: int  # that decode, in most measurements
    context: int  # tokens of each row
    num_steps: int  # of one run

    @property
    def model_dir(self) -> Path:
        """The checkpoint, whose weights are never read."""
        return self.folder / "model"

    def make_checkpoint(self) -> None:
        """Write what a control plane and a registration read of the checkpoint."""
        self.model_dir.mkdir(parents=True, exist_ok=True)
        hollow_checkpoint(self.model_dir, llama_config(SHAPES[self.shape]), self.dtype)

    def arena_bytes(self, num_adapters: int) -> int:
        """An arena for so many adapters of RANK."""
        values = adapter_values(SHAPES[self.shape], num_adapters)
        # A quarter more than the values: pages are of whole tiles.
        return values * getattr(torch, self.dtype).itemsize * 5 // 4 + (1 << 20) if num_adapters else 0

    def make_engine(
        self,
        *,
        num_adapters: int,
        num_blocks: int,
        max_rows: int,
        max_model_len: int,
        graph_rows: Sequence[int],
        token_budget: int = 1024,
    ) -> TorchEngine:
        """An engine with room for so many adapters, which has none yet. Without room it serves the base model alone."""
        config = WorkerConfig(
            control_plane="127.0.0.1:1",
            model_dir=self.model_dir,
            worker_id="benchmark",
            device=self.device.type,
            dtype=self.dtype,
            num_blocks=num_blocks,
            block_size=BLOCK_SIZE,
            max_rows=max_rows,
            token_budget=max(token_budget, max_rows),
            num_slots=256,
            arena_bytes=self.arena_bytes(num_adapters),
            max_model_len=max_model_len,
            warm_up="off",
            cuda_graphs=",".join(map(str, graph_rows)) if self.device.type == "cuda" else "off",
        )
        return build_engine(config, read_weights=random_weights(self.device))


class PackedVariants:
    """Adapters of RANK on every linear that differ in one scaling, so that they share their chunks (AdapterSource).

    Each is read as a source of a worker reads it: every chunk is hashed.
    """

    def __init__(self, setup: Setup, num_adapters: int) -> None:
        adapter_dir = make_ranked_adapter(setup.shape, RANK, setup.folder)
        files = {path.name: path for path in adapter_dir.glob("adapter_*")}
        base_model = BaseModel.load(setup.model_dir)
        with tempfile.TemporaryDirectory(dir=setup.folder) as directory:
            info = ingest(files, base_model, max_adapter_bytes=MAX_ADAPTER_BYTES, directory=Path(directory))
            self.chunks = [chunk.path.read_bytes() for chunk in info.chunks]
        document: dict[str, Any] = json.loads(info.manifest)
        module = document["chunks"][0]["modules"][0]
        scaling = module["scaling"]
        self._manifests = {}
        for index in range(num_adapters):
            module["scaling"] = scaling * (1 + index / 1024)
            manifest = json.dumps(document, sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode("ascii")
            self._manifests[hashlib.sha256(manifest).hexdigest()] = manifest
        self.digests = list(self._manifests)
        self.size_bytes = info.size_bytes  # of one

    def open(self, digest: str) -> tuple[bytes, Iterator[bytes]]:
        """See AdapterSource."""
        manifest = self._manifests[digest]
        return manifest, self._verified(manifest, digest)

    def _verified(self, manifest: bytes, digest: str) -> Iterator[bytes]:
        for entry, chunk in zip(read_manifest(manifest, digest).chunks, self.chunks, strict=True):
            verify_chunk(entry, chunk, digest)
            yield chunk


def blocks_of(num_rows: int, num_tokens: int) -> int:
    """KV blocks of so many rows of so many tokens."""
    return num_rows * -(-num_tokens // BLOCK_SIZE)


def free_memory(device: torch.device) -> None:
    """Give back what engines held that nobody refers to. An engine is part of cycles."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
