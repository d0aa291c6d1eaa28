"""How a checkpoint directory is named on the wire, so that both server sides agree on what "the base model" is.

Standard library only. Reads no weights in full: configuration, safetensors headers, sizes, and 64 windows of
4 KiB spread over each shard, so that two fine-tunes of one architecture differ while 100 GB take milliseconds.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

_WINDOWS = 64
_WINDOW_BYTES = 4096
# How the linears of a base model are held while it is served: --quantization of the control plane and of all workers.
NOT_QUANTIZED, FP8_WEIGHTS = "none", "fp8"
QUANTIZATIONS = (NOT_QUANTIZED, FP8_WEIGHTS)
# Keys of config.json that do not change what the model computes.
_VOLATILE_KEYS = {"_name_or_path", "architectures", "dtype", "torch_dtype", "transformers_version", "use_cache"}


def checkpoint_fingerprint(model_dir: Path) -> str:
    """SHA-256 that names the checkpoint, 64 lower-case hexadecimal digits.

    Raises FileNotFoundError if there is no config.json or no *.safetensors file.
    """
    config = json.loads((model_dir / "config.json").read_text(encoding="utf-8"))
    canonical = {key: value for key, value in config.items() if key not in _VOLATILE_KEYS}
    digest = hashlib.sha256(json.dumps(canonical, sort_keys=True, separators=(",", ":")).encode())
    shards = sorted(model_dir.glob("*.safetensors"))
    if not shards:
        raise FileNotFoundError(f"{model_dir} holds no *.safetensors file")
    for shard in shards:
        size = shard.stat().st_size
        digest.update(f"\n{shard.name} {size}\n".encode())
        with shard.open("rb") as file:
            header_size = int.from_bytes(file.read(8), "little")
            if header_size > size - 8:
                raise ValueError(f"{shard.name}: header of {header_size} bytes in a file of {size} bytes")
            digest.update(file.read(header_size))
            data_start = 8 + header_size
            step = max((size - data_start - _WINDOW_BYTES) // max(_WINDOWS - 1, 1), 1)
            for start in range(data_start, max(size - _WINDOW_BYTES, data_start) + 1, step):
                file.seek(start)
                digest.update(file.read(_WINDOW_BYTES))
    return digest.hexdigest()


def served_fingerprint(checkpoint: str, quantization: str) -> str:
    """Names what computes the tokens: the checkpoint's fingerprint, or another one if its weights are quantised.

    Adapters belong to the checkpoint, whichever way it is held.
    """
    if quantization == NOT_QUANTIZED:
        return checkpoint
    return hashlib.sha256(f"{checkpoint} {quantization}".encode()).hexdigest()
