"""Small adapters made by hand, so that every byte of them can be bent, and registries that take them."""

from __future__ import annotations

import itertools
import json
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from control_plane.access.name_prefixes import NO_PREFIXES, NamePrefixes
from control_plane.registry.model.base_model import BaseModel
from control_plane.registry.model.served_modules import NOTHING_REPORTED, Modules
from control_plane.registry.model.worker_reports import WorkerReports
from control_plane.registry.peft.ingest import CONFIG_FILE, WEIGHTS_FILE, PackedInfo, ingest
from control_plane.registry.registry import Registry
from control_plane.registry.store.artifact_store import ArtifactStore
from control_plane.registry.store.store import FencedStore
from control_plane.store_calls import StoreCalls

CALLS = StoreCalls()  # its threads serve all registries of these tests
HIDDEN = 16
MODULES = [f"model.layers.{i}.self_attn.{name}_proj" for i in range(2) for name in "qv"]
SHAPES = {module: (8 if module.endswith("v_proj") else HIDDEN, HIDDEN) for module in MODULES}
CONFIG: dict[str, Any] = {
    "peft_type": "LORA",
    "task_type": "CAUSAL_LM",
    "r": 4,
    "lora_alpha": 8,
    "target_modules": ["q_proj", "v_proj"],
    "base_model_name_or_path": "/etc/passwd",
}


class Crash(BaseException):
    """The process dies here."""


def base_model(dtype: str = "float32", fingerprint: str = "ab" * 32) -> BaseModel:
    """A base model of two layers with two linears each."""
    return BaseModel(
        name="tiny",
        fingerprint=fingerprint,
        dtype=dtype,
        config={},
        vocab_size=256,
        max_model_len=128,
        eos_token_ids=(0,),
        linear_shapes=SHAPES,
        embedding_modules={},
        num_layers=2,
        model_dir=Path("/nowhere"),
    )


def tensors(
    seed: int = 0, rank: int = 4, modules: Sequence[str] = tuple(MODULES), *, vectors: str = ""
) -> dict[str, np.ndarray[Any, Any]]:
    """A and B of every module, by PEFT's names; with its "bias" or "magnitude" if requested."""
    generator = np.random.default_rng(seed)
    result: dict[str, np.ndarray[Any, Any]] = {}
    for module in modules:
        out_features, in_features = SHAPES[module]
        prefix = f"base_model.model.{module}.lora_"
        result[prefix + "A.weight"] = generator.standard_normal((rank, in_features)).astype("<f4")
        result[prefix + "B.weight"] = generator.standard_normal((out_features, rank)).astype("<f4")
        if vectors:
            name = {"bias": "B.bias", "magnitude": "magnitude_vector"}[vectors]
            result[prefix + name] = generator.random(out_features).astype("<f4")
    return result


def safetensors_bytes(content: Mapping[str, np.ndarray[Any, Any]]) -> bytes:
    """A safetensors file; float16 stays, everything else is float32."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    payload = b""
    for name, values in content.items():
        raw = values.tobytes()
        dtype = "F16" if values.dtype == np.float16 else "F32"
        header[name] = {
            "dtype": dtype,
            "shape": list(values.shape),
            "data_offsets": [len(payload), len(payload) + len(raw)],
        }
        payload += raw
    return with_header(json.dumps(header).encode(), payload)


def with_header(header: bytes, payload: bytes = b"") -> bytes:
    """A file with any header."""
    return len(header).to_bytes(8, "little") + header + payload


def write_adapter(directory: Path, config: Any = None, weights: bytes | None = None, **fields: Any) -> dict[str, Path]:
    """The two files of an adapter; by default a good one. `fields` change its config."""
    directory.mkdir(parents=True, exist_ok=True)
    raw = config if isinstance(config, bytes) else json.dumps((CONFIG if config is None else config) | fields).encode()
    (directory / CONFIG_FILE).write_bytes(raw)
    (directory / WEIGHTS_FILE).write_bytes(safetensors_bytes(tensors()) if weights is None else weights)
    return {name: directory / name for name in (CONFIG_FILE, WEIGHTS_FILE)}


def pack(
    files: Mapping[str, Path],
    base: BaseModel | None = None,
    *,
    max_adapter_bytes: int = 1 << 20,
    reported: Modules = NOTHING_REPORTED,
) -> tuple[PackedInfo, list[bytes]]:
    """What ingest makes of an adapter, and its chunks."""
    with tempfile.TemporaryDirectory() as directory:
        info = ingest(
            files,
            base or base_model(),
            reported=reported,
            max_adapter_bytes=max_adapter_bytes,
            directory=Path(directory),
        )
        return info, [chunk.path.read_bytes() for chunk in info.chunks]


async def open_registry(
    place: str | FencedStore,
    base: BaseModel | None = None,
    *,
    calls: StoreCalls = CALLS,
    reports: WorkerReports | None = None,
    prefixes: NamePrefixes = NO_PREFIXES,
) -> Registry:
    """A registry whose clock counts up from 1000. Without reports no worker has reported what it serves."""
    ticks = itertools.count(1000)
    return await Registry.open(
        store=ArtifactStore(place),
        base_model=base or base_model(),
        calls=calls,
        max_adapter_bytes=1 << 20,
        reports=reports or WorkerReports(),
        clock=lambda: float(next(ticks)),
        prefixes=prefixes,
    )


def files(tmp_path: Path, seed: int = 0) -> dict[str, Path]:
    """The files of a good adapter, another one for each seed."""
    return write_adapter(tmp_path / f"adapter-{seed}", weights=safetensors_bytes(tensors(seed)))
