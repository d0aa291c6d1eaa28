"""How long a registry with many names, or with many versions of one name, takes to start; its pages and its memory.

    python -m benchmarks.control_plane.many_adapters --names 100000
    python -m benchmarks.control_plane.many_adapters --names 1 --versions 1000

Writes the documents of a store into a temporary directory, then opens a registry on it in a process of its own. Every
version has its own digest and the target modules of a model with so many layers. Nothing of the adapters is served.
The first start reads every document and keeps what it read; the second one reads what changed since then: nothing.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from control_plane.api import wire
from control_plane.registry.catalog import versions_page
from control_plane.registry.model.base_model import BaseModel
from control_plane.registry.model.worker_reports import WorkerReports
from control_plane.registry.records import AdapterRecord, AdapterState, AdapterVersion
from control_plane.registry.registry import Registry
from control_plane.registry.snapshot.known_documents import KnownDocuments
from control_plane.registry.store.artifact_store import ArtifactStore
from control_plane.registry.store.record_documents import encode_record, encode_version
from control_plane.store_calls import StoreCalls

FINGERPRINT = "ab" * 32
LINEARS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")
MLPS = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
NUM_PAGES = 200


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--names", type=int, default=100_000)
    parser.add_argument("--versions", type=int, default=1, help="of each name")
    parser.add_argument("--layers", type=int, default=32, help="of the base model, with 7 adapted linears each")
    parser.add_argument("--store", type=Path, help="a store that an earlier run wrote (default: a new one)")
    parser.add_argument("--keep", type=Path, help="write the store there and keep it")
    parser.add_argument("--snapshot", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        asyncio.run(_measure(arguments.store, arguments.snapshot))
        return
    with tempfile.TemporaryDirectory() as directory:
        store = arguments.store or arguments.keep or Path(directory)
        if arguments.store is None:
            _write_store(store, arguments.names, arguments.versions, arguments.layers)
        command = [sys.executable, "-m", "benchmarks.control_plane.many_adapters", "--measure", "--store", str(store)]
        for start in ("first", "second"):
            print(start, "start:", flush=True)
            subprocess.run([*command, "--snapshot", str(Path(directory, "registry.snapshot"))], check=True)


def _write_store(store: Path, num_names: int, num_versions: int, num_layers: int) -> None:
    modules = tuple(
        sorted(f"model.layers.{layer}.{linear}" for layer in range(num_layers) for linear in (*LINEARS, *MLPS))
    )
    for directory in ("adapters", "versions", "blobs"):
        (store / directory).mkdir(parents=True)
    for number in range(num_names):
        adapter_id = f"customer-{number:06d}"
        (store / "versions" / adapter_id).mkdir()
        versions = []
        for version_number in range(num_versions, 0, -1):
            digest = hashlib.sha256(f"{number} {version_number}".encode()).hexdigest()
            version = AdapterVersion(
                digest=digest,
                kind="lora",
                max_rank=16,
                dtype="bfloat16",
                size_bytes=80_000_000,
                arena_bytes=80_000_000,
                target_modules=modules,
                create_time_s=1.7e9,
                base_fingerprint=FINGERPRINT,
                number=version_number,
            )
            versions.append(version)
            (store / "versions" / adapter_id / f"{digest}.json").write_bytes(encode_version(version))
            (store / "blobs" / digest).mkdir()
            (store / "blobs" / digest / "manifest.json").write_bytes(b"{}")
        record = AdapterRecord(
            adapter_id=adapter_id,
            uid=hashlib.md5(adapter_id.encode(), usedforsecurity=False).hexdigest(),
            display_name=f"adapter of customer {number}",
            labels={"team": f"team-{number % 100}"},
            state=AdapterState.ACTIVE,
            state_reason="",
            versions=tuple(versions),
            active_digest=versions[0].digest,
            is_pinned=False,
            create_time_s=1.7e9,
            update_time_s=1.7e9,
            last_number=num_versions,
        )
        (store / "adapters" / f"{adapter_id}.json").write_bytes(encode_record(record))


async def _measure(store: Path, snapshot: Path) -> None:
    base_model = BaseModel(
        name="benchmark",
        fingerprint=FINGERPRINT,
        dtype="bfloat16",
        config={},
        vocab_size=32000,
        max_model_len=4096,
        eos_token_ids=(0,),
        linear_shapes={},
        embedding_modules={},
        num_layers=32,
        model_dir=store,
    )
    known = KnownDocuments(snapshot, str(store))
    rss_before = _rss_bytes()
    started_s = time.perf_counter()
    registry = await Registry.open(
        store=ArtifactStore(str(store)),
        base_model=base_model,
        calls=StoreCalls(timeout_s=60.0),
        max_adapter_bytes=1 << 30,
        reports=WorkerReports(),
        known=known,
    )
    start_s = time.perf_counter() - started_s
    counts = registry.stats()
    results: dict[str, object] = {
        "names": counts.num_registered,
        "blobs": counts.num_stored,
        "start_s": round(start_s, 2),
        "documents_read": known.num_read,
        "rss_before_mb": round(rss_before / 1e6),
        "rss_mb": round(_rss_bytes() / 1e6),
        "peak_rss_mb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6),
    }
    first = registry.list_part("", 1)[0][0]
    for size in (100, 1000):
        results[f"adapters_page_{size}_ms"] = _page_ms(partial(_adapters_page, registry, size))
        if len(first.versions) > 1:
            results[f"versions_page_{size}_ms"] = _page_ms(partial(_versions_page, first, size))
    print(json.dumps(results), flush=True)
    known.wait()
    await registry.close()


def _adapters_page(registry: Registry, size: int) -> object:
    return [wire.adapter_message(record).SerializeToString() for record in registry.list_part("customer-0005", size)[0]]


def _versions_page(record: AdapterRecord, size: int) -> object:
    return [wire.version_message(version).SerializeToString() for version in versions_page(record, size)[0]]


def _page_ms(make: Callable[[], object]) -> dict[str, float]:
    times_ms = []
    for _ in range(NUM_PAGES):
        started_s = time.perf_counter()
        make()
        times_ms.append(1000 * (time.perf_counter() - started_s))
    return {"median": round(statistics.median(times_ms), 2), "p99": round(sorted(times_ms)[-3], 2)}


def _rss_bytes() -> int:
    fields = Path("/proc/self/statm").read_text(encoding="ascii").split()
    return int(fields[1]) * resource.getpagesize()


if __name__ == "__main__":
    main()
