"""The operator's adapter roots, opened: directories, and places on a Hub or in buckets, with downloads."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from control_plane.adapters.roots import AdapterRoots
from control_plane.adapters.sources.adapter_source import RemoteRoots
from control_plane.adapters.sources.hub import open_hub
from control_plane.adapters.sources.locations import remote_root
from control_plane.adapters.sources.partial_files import PartialFiles


def open_roots(
    named: Sequence[tuple[str, Path | str]], downloads: Path, *, max_adapter_bytes: int, hub_hosts: tuple[str, ...]
) -> AdapterRoots:
    """What --adapter-root lists, a string being a URL. Raises ValueError. Nothing is sent yet."""
    local = {name: place for name, place in named if isinstance(place, Path)}
    urls = {name: remote_root(name, place) for name, place in named if isinstance(place, str)}
    if not urls:
        return AdapterRoots(local)
    # Beside what runs, broken downloads keep the bytes of two of the largest adapters.
    partial = PartialFiles(downloads, max_kept_bytes=2 * max_adapter_bytes)
    partial.sweep()
    remote = RemoteRoots(urls, partial, max_bytes=max_adapter_bytes, hub=open_hub(hub_hosts))
    return AdapterRoots(local, remote=remote)
