"""Makes the checkpoint and as many adapters as a rig wants: one by PEFT, others of its shapes with other weights."""

from __future__ import annotations

import shutil
import zlib
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file

from tests.makers import make_adapter, make_checkpoint, make_tokenizer


class AdapterMaker:
    """Adapters by version name, made once each; the same name gives the same bytes in every run."""

    def __init__(self, directory: Path, *, is_real: bool) -> None:
        self._directory = directory
        self._is_real = is_real
        self._version_of: dict[str, str] = {}  # digest -> version
        self.model_dir = make_tokenizer(make_checkpoint(directory / "model", arch="llama"))
        targets = ["q_proj", "v_proj", "down_proj"]
        self._first = make_adapter(directory / "first", self.model_dir, rank=8, alpha=16, targets=targets, seed=1)

    def make(self, version: str) -> Path:
        """The directory of one version."""
        directory = self._directory / "versions" / version
        if not directory.exists():
            shutil.copytree(self._first, directory)
            generator = np.random.default_rng(zlib.crc32(version.encode()))
            weights = load_file(directory / "adapter_model.safetensors")
            drawn = {name: _drawn(values, generator) for name, values in weights.items()}
            save_file(drawn, directory / "adapter_model.safetensors", metadata={"format": "pt"})
        return directory

    def note(self, digest: str, version: str) -> None:
        """Remember which version a digest is of."""
        self._version_of[digest] = version

    def directory_of(self, digest: str) -> Path:
        """The version with this digest."""
        return self.make(self._version_of[digest])


def _drawn(values: np.ndarray, generator: np.random.Generator) -> np.ndarray:
    return (generator.standard_normal(values.shape) * values.std()).astype(values.dtype)
