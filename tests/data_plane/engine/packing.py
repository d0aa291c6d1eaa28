"""Packs a PEFT adapter directory as docs/protocol.md says, for tests of the worker without a control plane."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save

_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")


@dataclass(frozen=True)
class PackedAdapter:
    """One adapter, and an AdapterSource that knows it alone."""

    digest: str
    manifest: bytes
    chunks: list[bytes]

    def open(self, digest: str) -> tuple[bytes, Iterator[bytes]]:
        assert digest == self.digest
        return self.manifest, iter(self.chunks)


def pack(adapter_dir: Path, base_fingerprint: str, dtype: torch.dtype = torch.float32) -> PackedAdapter:
    """The packed form of a LoRA or rsLoRA directory without rank patterns."""
    config = json.loads((adapter_dir / "adapter_config.json").read_text())
    tensors = load_file(adapter_dir / "adapter_model.safetensors")
    groups: dict[str, dict[str, torch.Tensor]] = {}
    modules: dict[str, list[dict[str, Any]]] = {}
    root = math.sqrt if config["use_rslora"] else float
    for key in sorted(tensors):
        name, found, _ = key.removeprefix("base_model.model.").partition(".lora_A.")
        if not found:
            continue
        a = tensors[key].to(dtype).contiguous()
        b = tensors[key.replace("lora_A", "lora_B")].to(dtype).T.contiguous()
        layer = _LAYER.search(name)
        chunk = f"layers.{layer[1]}" if layer else "rest"
        groups.setdefault(chunk, {}).update({f"{name}.a": a, f"{name}.b": b})
        modules.setdefault(chunk, []).append(
            {
                "a_sha256": _sha256(_bytes(a)),
                "b_sha256": _sha256(_bytes(b)),
                "in_features": a.shape[1],
                "name": name,
                "out_features": b.shape[1],
                "rank": a.shape[0],
                "scaling": config["lora_alpha"] / root(a.shape[0]),
            }
        )
    names = sorted(groups, key=lambda chunk: int(chunk.split(".")[1]) if "." in chunk else 1 << 30)
    chunks = [save(groups[name]) for name in names]
    manifest = {
        "base_fingerprint": base_fingerprint,
        "chunks": [
            {"modules": modules[name], "name": name, "sha256": _sha256(data), "size_bytes": len(data)}
            for name, data in zip(names, chunks, strict=True)
        ],
        "dtype": str(dtype).removeprefix("torch."),
        "format": 1,
        "kind": "rslora" if config["use_rslora"] else "lora",
    }
    encoded = json.dumps(manifest, sort_keys=True, separators=(",", ":")).encode("ascii")
    return PackedAdapter(_sha256(encoded), encoded, chunks)


def _bytes(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.view(torch.uint8).numpy().tobytes())


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
