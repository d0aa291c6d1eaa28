"""The process that is killed: a registry that first reports what its store has, then makes changes for ever.

Lines on the pipe: `state {...}` once it is open, then for every change `begin TASK {...}` and `done TASK {...}`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from control_plane.errors import AdapterVersionActive, AdapterVersionHeld
from control_plane.registry.model.worker_reports import WorkerReports
from control_plane.registry.peft.ingest import PackedInfo
from control_plane.registry.registry import Registry
from control_plane.registry.snapshot.known_documents import KnownDocuments
from control_plane.registry.store.artifact_store import ArtifactStore
from control_plane.store_calls import StoreCalls
from tests.control_plane.registry.rig import base_model, files

NUM_TASKS = 2
NAMES_OF_TASK = ("a", "b")
NUM_ADAPTERS = 5


def names_of(task: int) -> list[str]:
    """The names that one task changes, and no other one."""
    return [f"{name}{task}" for name in NAMES_OF_TASK]


def adapters(directory: Path) -> None:
    """Make the files of all adapters once."""
    for seed in range(NUM_ADAPTERS):
        files(directory, seed)


async def live(directory: Path, pipe: int, seed: int, *, is_last: bool) -> None:
    """Open, report, change. `is_last`: delete all names instead, and end."""
    shutil.rmtree(directory / "scratch", ignore_errors=True)  # as a server does when it starts
    (directory / "scratch").mkdir()
    store = ArtifactStore(str(directory / "store"))
    calls = StoreCalls(timeout_s=60.0)
    registry = await Registry.open(
        store=store,
        base_model=base_model(),
        calls=calls,
        max_adapter_bytes=1 << 20,
        reports=WorkerReports(),
        scratch_dir=directory / "scratch",
        known=KnownDocuments(directory / "registry.snapshot", str(directory), min_read=1),
    )
    write(pipe, "state", state_of(registry, store, directory / "store"))
    if is_last:
        for record in registry.list_part()[0]:
            await registry.begin_delete(record.adapter_id)
            await registry.finish_delete(record.adapter_id)
        await registry.close()
        return
    paths = [
        {path.name: path for path in (directory / f"adapter-{number}").iterdir()} for number in range(NUM_ADAPTERS)
    ]
    await asyncio.gather(
        *(change_for_ever(registry, pipe, task, random.Random(f"{seed} {task}"), paths) for task in range(NUM_TASKS))
    )


async def change_for_ever(
    registry: Registry, pipe: int, task: int, generator: random.Random, paths: list[dict[str, Path]]
) -> None:
    """Register, push several versions in a row, delete a version, delete a name: one change after the other.

    A pushed version is active before it is stored.
    """
    while True:
        name = generator.choice(names_of(task))
        record = registry.find(name)
        action = generator.choice(("register", "push", "delete version", "delete")) if record else "register"
        if action in ("register", "push"):
            for _ in range(3 if action == "push" else 1):
                change: dict[str, Any] = {"name": name, "action": "register"}
                write(pipe, f"begin {task}", change)
                publish = shown if action == "push" else None
                registered = await registry.register(name, generator.choice(paths), publish=publish)
                digest = registered.record.active_digest
                write(pipe, f"done {task}", change | {"digest": digest})
        elif action == "delete":
            write(pipe, f"begin {task}", {"name": name, "action": "delete"})
            await registry.begin_delete(name)
            write(pipe, f"done {task}", {"name": name, "action": "delete"})
            await registry.finish_delete(name)
        else:
            assert record is not None
            digest = generator.choice(record.versions).digest
            write(pipe, f"begin {task}", {"name": name, "action": "delete version", "digest": digest})
            try:
                await registry.begin_delete_version(name, digest)
            except (AdapterVersionActive, AdapterVersionHeld):
                write(pipe, f"done {task}", {"name": name, "action": "none"})
                continue
            write(pipe, f"done {task}", {"name": name, "action": "delete version", "digest": digest})
            await registry.finish_delete_version(digest)


@contextlib.asynccontextmanager
async def shown(_: PackedInfo) -> AsyncIterator[None]:
    """As a push does: the name has the version before it is stored."""
    await asyncio.sleep(0)
    yield


def state_of(registry: Registry, store: ArtifactStore, root: Path) -> dict[str, Any]:
    """What is registered, what of it is not whole, and what lies in the store besides."""
    records = registry.list_part()[0]
    digests = {version.digest for record in records for version in record.versions}
    damaged = [digest for digest in digests if not is_whole(store, digest)]
    names = {record.adapter_id for record in records}
    leftovers = [path.name for path in (root / "blobs").glob("*") if path.name not in digests]
    leftovers += [path.name for path in (root / "versions").glob("*") if path.name not in names]
    leftovers += [path.name for path in (root / "adapters").glob("*") if path.stem not in names]
    leftovers += [str(path.relative_to(root)) for path in (root / "tmp").glob("*")]
    return {
        "names": {
            record.adapter_id: {
                "active": record.active_digest,
                "versions": sorted(version.digest for version in record.versions),
                "state": record.state.value,
            }
            for record in records
        },
        "damaged": damaged,
        "leftovers": leftovers,
    }


def is_whole(store: ArtifactStore, digest: str) -> bool:
    """Whether every chunk that the manifest names has the bytes that it names."""
    chunks = json.loads(store.read_manifest(digest))["chunks"]
    return all(
        store.is_whole_chunk(digest, index, chunk["size_bytes"], chunk["sha256"]) for index, chunk in enumerate(chunks)
    )


def write(pipe: int, word: str, content: dict[str, Any]) -> None:
    """A line on the pipe, at once: what was written is read although the process is killed."""
    os.write(pipe, f"{word} {json.dumps(content)}\n".encode())
