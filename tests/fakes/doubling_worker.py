"""A worker that is wrong: it multiplies every adapter by twice its scaling. Otherwise `python -m data_plane`."""

from __future__ import annotations

from dataclasses import replace

from data_plane import worker
from data_plane.adapters.arena import adapter_arena
from data_plane.adapters.format.manifest import Manifest, read_manifest


def doubled(data: bytes, digest: str) -> Manifest:
    """The manifest as a worker with a mistake would read it."""
    manifest = read_manifest(data, digest)
    chunks = tuple(
        replace(chunk, modules=tuple(replace(module, scaling=2 * module.scaling) for module in chunk.modules))
        for chunk in manifest.chunks
    )
    return replace(manifest, chunks=chunks)


if __name__ == "__main__":
    adapter_arena.read_manifest = doubled  # type: ignore[attr-defined]  # the arena imports it by name
    raise SystemExit(worker.main())
