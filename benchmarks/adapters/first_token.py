"""Time to the first token of an adapter that lies in the arena, in the host cache, or on the control plane's disk.

Each request has a prompt of its own and one token. The time is the client's, from the call to the token. Before each
request the adapter is taken out of the tiers above the one that is measured; its placements are checked then.
Files that were read before come from the page cache of the operating system.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

from motet import AdapterTier
from rich.table import Table

from benchmarks.adapters.rig import Rig, percentile, title
from benchmarks.serving.checkpoints import make_ranked_adapter

TIERS = ("base model", "arena", "host cache", "disk")
_ABOVE = {  # the tiers that the adapter is taken out of
    "arena": [],
    "host cache": [AdapterTier.ARENA],
    "disk": [AdapterTier.ARENA, AdapterTier.HOST_CACHE],
}
_LIES_IN = {
    "arena": {AdapterTier.ARENA},
    "host cache": {AdapterTier.HOST_CACHE},
    "disk": set[AdapterTier](),
}


@dataclass(frozen=True)
class FirstToken:
    """The times of one adapter in one tier."""

    rank: int
    size_bytes: int  # of its packed weights; 0 for the base model
    tier: str
    times_ms: list[float]


def measure(shape: str, cache: Path, work_dir: Path, *, ranks: list[int], repeats: int) -> list[FirstToken]:
    """Every rank in every tier."""
    directories = [make_ranked_adapter(shape, rank, cache) for rank in ranks]
    with Rig(shape, cache, work_dir) as rig:
        rig.start_worker(num_slots=4)
        for _ in range(3):
            _first_token_ms(rig, "")
        found = [FirstToken(0, 0, "base model", [_first_token_ms(rig, "") for _ in range(repeats)])]
        for rank, directory in zip(ranks, directories, strict=True):
            name = f"rank-{rank}"
            version = rig.client.adapters.register(name, directory).active_version
            assert version is not None
            _first_token_ms(rig, name)
            for tier in TIERS[1:]:
                times_ms = []
                for _ in range(repeats):
                    _put(rig, name, tier)
                    times_ms.append(_first_token_ms(rig, name))
                found.append(FirstToken(rank, version.size_bytes, tier, times_ms))
            rig.client.adapters.delete(name)
    return found


def _put(rig: Rig, name: str, tier: str) -> None:
    for above in _ABOVE[tier]:
        rig.client.adapters.unload(name, tier=above)
    if tier == "arena":
        rig.client.adapters.load(name)
    placements = {placement.tier for placement in rig.client.adapters.get(name).placements} - {AdapterTier.STORE}
    highest = placements - {AdapterTier.HOST_CACHE} if tier == "arena" else placements
    assert highest == _LIES_IN[tier], f"{name} lies in {sorted(placements)}, to be measured in: {tier}"


def _first_token_ms(rig: Rig, name: str) -> float:
    prompt, begin_s = rig.prompt(), time.perf_counter()
    rig.client.generate(prompt, adapter=name, max_tokens=1, ignore_eos=True).result()
    return 1e3 * (time.perf_counter() - begin_s)


def table(found: list[FirstToken]) -> Table:
    """A row for each tier of each size."""
    out = Table(title=title("time to first token, ms"))
    for heading in ("MB", "rank", "tier", "median", "least", "most", "over the arena"):
        out.add_column(heading, justify="left" if heading == "tier" else "right")
    warm_ms = {one.rank: percentile(one.times_ms, 50) for one in found if one.tier in ("arena", "base model")}
    for one in found:
        median_ms = percentile(one.times_ms, 50)
        figures = [f"{value:.1f}" for value in (median_ms, min(one.times_ms), max(one.times_ms))]
        over = "" if one.tier in ("arena", "base model") else f"+{median_ms - warm_ms[one.rank]:.1f}"
        size = f"{one.size_bytes / 1e6:.1f}" if one.rank else ""
        out.add_row(size, str(one.rank or ""), one.tier, *figures, over)
    return out
