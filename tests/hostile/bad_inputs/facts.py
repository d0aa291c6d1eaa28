"""What the tables know of the server that they are sent to: sizes, limits, adapters. Also its flags.

One definition: the process is started with FLAGS, and the limits in the tables are those that follow from them.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

from contract.fingerprint import checkpoint_fingerprint
from tests.makers import make_adapter, make_checkpoint, make_tokenizer

VOCAB_SIZE = 256
MAX_MODEL_LEN = 512
NUM_BLOCKS, BLOCK_SIZE = 64, 4  # a cache of 256 tokens: less than the longest context
MAX_ROWS = 12
MAX_ADAPTER_BYTES = 4 << 20
MAX_CHUNK_BYTES = 1 << 20
MAX_MESSAGE_BYTES = MAX_CHUNK_BYTES + (64 << 10)
CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
ROOT_NAME = "shared"

WORKER_FLAGS = ["--num-blocks", str(NUM_BLOCKS), "--block-size", str(BLOCK_SIZE), "--max-rows", str(MAX_ROWS)]


@dataclass(frozen=True)
class Facts:
    """One server's."""

    model_dir: Path
    work_dir: Path
    files: dict[str, bytes]  # a good adapter, by file name
    secrets: tuple[str, ...] = ()  # paths that no response may hold
    good_digest: str = ""  # of the adapter, once it is registered

    @property
    def fingerprint(self) -> str:
        return checkpoint_fingerprint(self.model_dir)

    @property
    def control_flags(self) -> list[str]:
        return [
            *("--max-adapter-bytes", str(MAX_ADAPTER_BYTES), "--tenants", str(self.work_dir / "tenants.json")),
            "--trust-tenant-names",
            *("--adapter-root", f"{ROOT_NAME}={self.work_dir / 'root'}"),
        ]


def make_facts(work_dir: Path) -> Facts:
    """Write a checkpoint, an adapter, a root with adapters and a table of tenants below `work_dir`."""
    model_dir = make_tokenizer(make_checkpoint(work_dir / "model", arch="llama"))
    adapter = make_adapter(work_dir / "good", model_dir, rank=4, alpha=8, targets=["q_proj", "v_proj"], seed=1)
    files = {name: (adapter / name).read_bytes() for name in (CONFIG_FILE, WEIGHTS_FILE)}
    root = work_dir / "root"
    for folder in ("good", "empty", "half"):
        (root / folder).mkdir(parents=True)
    for name, data in files.items():
        (root / "good" / name).write_bytes(data)
    (root / "half" / CONFIG_FILE).write_bytes(files[CONFIG_FILE])
    (root / "out").symlink_to(adapter)
    (root / "loop").symlink_to(root / "loop")
    (root / "folder").mkdir()
    for name in files:
        (root / "folder" / name).mkdir()
    tenants = {"metered": {"weight": 2, "tokens_per_minute": 60, "max_queued_tokens": 40}}
    (work_dir / "tenants.json").write_text(json.dumps(tenants), encoding="utf-8")
    return Facts(model_dir, work_dir, files, (str(work_dir), str(model_dir)))


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
