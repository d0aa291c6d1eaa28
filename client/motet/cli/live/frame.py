"""One frame of `motet top`. Needs the package rich."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from rich.cells import cell_len, set_cell_size
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from motet.cli.live.rates import Rates, WorkerRates
from motet.cli.output import size
from motet.types import ServerStatus
from motet.v1.status import WorkerStatus

BASE_MODEL = "(base model)"
OTHER_LINES = 17  # of a frame: titles, headings, counts of further rows, totals on two lines, tiers
MIN_ROWS = 1  # of each table, however small the terminal is
GAP = 2  # between two columns
MIN_NAME = 8  # of the first column, however narrow the terminal is
# What a narrow terminal does without, the first of them first.
OPTIONAL_COLUMNS = (
    *("*CACHED", "*PREFIX HITS", "*STEPS/S", "DEVICE", "DIGEST", "*OF THE BATCHES", "*MEMORY", "*STEP MS", "*ADAPTERS"),
)
DIGEST_CHARS = 12


def plain_console(width: int) -> Console:
    """Where frames go that are not a screen."""
    return Console(width=width, highlight=False, markup=False)


def live_screen() -> Live:
    """A terminal's whole screen, which the caller refreshes; what was there is back when it ends."""
    return Live(screen=True, auto_refresh=False, redirect_stdout=False, redirect_stderr=False)


class Room(NamedTuple):
    """What a frame may take."""

    max_rows: int | None = None  # of each table; None: all
    width: int | None = None  # characters; None: as many as there are


def room_of(screen: Live) -> Room:
    """The room of a terminal: how many rows each of the three tables may have."""
    return Room(max((screen.console.height - OTHER_LINES) // 3, MIN_ROWS), screen.console.width)


def frame(status: ServerStatus, rates: Rates, room: Room) -> RenderableType:
    """Everything that the caller may see and that there is room for."""
    if status.own_tenant_only:
        note = Text("Your credential shows your tenant only; the role admin shows workers and adapters.")
        return Group(_head(status), _tenants(status, rates, room), note)
    return Group(
        _head(status),
        _totals(status, rates),
        _workers(status, rates, room),
        _batch(status, room),
        _tiers(status, room),
        _tenants(status, rates, room),
    )


def absence(error: Exception) -> Text:
    """What is shown while the server does not respond."""
    return Text(f"{error}\ntrying again until Ctrl-C")


def _head(status: ServerStatus) -> Text:
    model = status.model
    return Text(
        f"motet {status.server_version}  model {model.name} ({model.dtype}, {model.fingerprint[:DIGEST_CHARS]})"
    )


def _totals(status: ServerStatus, rates: Rates) -> Text:
    queues = status.queues
    drained = f"  {len(status.drained_worker_ids)} drained" if status.drained_worker_ids else ""
    return Text(
        f"{rates.num_tokens:,.0f} tokens/s  {rates.num_accepted:,.1f} accepted/s  "
        f"{rates.num_finished:,.1f} finished/s  {rates.num_rejected:,.1f} rejected/s  "
        f"{queues.num_running} running  {queues.num_waiting} waiting  "
        f"{len(status.workers)} workers{drained}"
    )


def _workers(status: ServerStatus, rates: Rates, room: Room) -> Table:
    ranked = sorted(status.workers, key=lambda worker: (-_rate(rates, worker).num_tokens, worker.worker_id))
    is_one_drained = any(worker.worker_id in status.drained_worker_ids for worker in ranked)
    rows = [
        (
            worker.worker_id,
            *(["drained" if worker.worker_id in status.drained_worker_ids else ""] if is_one_drained else []),
            worker.device,
            str(worker.num_running),
            str(worker.num_waiting),
            f"{_rate(rates, worker).num_tokens:,.0f}" if worker.worker_id in rates.workers else "-",
            f"{_rate(rates, worker).num_steps:,.1f}" if worker.worker_id in rates.workers else "-",
            f"{worker.step_time_ms:.1f}",
            _share(worker.num_blocks_held, worker.num_blocks),
            _share(worker.num_blocks_cached, worker.num_blocks),
            _share(worker.prefix_hit_tokens, worker.prefix_query_tokens),
            str(worker.num_adapters_loaded),
            size(worker.resident_bytes),
        )
        for worker in ranked
    ]
    columns = (
        "WORKER",
        *([""] if is_one_drained else []),
        "DEVICE",
        "*RUNNING",
        "*WAITING",
        "*TOKENS/S",
        "*STEPS/S",
        "*STEP MS",
        "*KV HELD",
        "*CACHED",
    )
    return _table("workers", (*columns, "*PREFIX HITS", "*ADAPTERS", "*MEMORY"), rows, room)


def _rate(rates: Rates, worker: WorkerStatus) -> WorkerRates:
    return rates.workers.get(worker.worker_id, WorkerRates(0.0, 0.0))


def _batch(status: ServerStatus, room: Room) -> Table:
    num_running = max(status.queues.num_running, 1)
    rows = [
        (
            BASE_MODEL if not each.digest else each.adapter or "(no name)",
            each.digest[:DIGEST_CHARS],
            str(each.num_running),
            _share(each.num_running, num_running),
            str(each.num_waiting),
        )
        for each in status.active_adapters
    ]
    columns = ("ADAPTER", "DIGEST", "*RUNNING", "*OF THE BATCHES", "*WAITING")
    return _table("requests by adapter", columns, rows, room, num_others=status.num_other_active_adapters)


def _tiers(status: ServerStatus, room: Room) -> Table:
    adapters, workers = status.adapters, status.workers
    state = "host cache" if adapters.host_cache_available else "host cache (not responding)"
    rows = [
        ("store", str(adapters.num_stored), "", ""),
        (
            state,
            str(adapters.num_host_cached),
            size(adapters.host_cache_bytes),
            size(adapters.host_cache_budget_bytes),
        ),
        (
            "arenas of all workers",
            str(sum(worker.num_adapters_loaded for worker in workers)),
            size(sum(worker.arena_used_bytes for worker in workers)),
            size(sum(worker.arena_bytes for worker in workers)),
        ),
    ]
    title = f"adapters by tier, {adapters.num_registered} registered"
    return _table(title, ("TIER", "*ADAPTERS", "*USED", "*ROOM"), rows, room._replace(max_rows=None))


def _tenants(status: ServerStatus, rates: Rates, room: Room) -> Table:
    ranked = sorted(status.tenants, key=lambda tenant: (-tenant.num_requests, tenant.tenant))
    rows = [
        (
            tenant.tenant,
            str(tenant.num_requests),
            str(tenant.num_queued_tokens),
            f"{rates.generated_by_tenant[tenant.tenant]:,.0f}" if tenant.tenant in rates.generated_by_tenant else "-",
            str(tenant.num_rejected),
        )
        for tenant in ranked
    ]
    columns = ("TENANT", "*REQUESTS", "*QUEUED TOKENS", "*TOKENS/S", "*REJECTED")
    return _table("tenants", columns, rows, room, num_others=status.num_other_tenants)


def _table(
    title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], room: Room, *, num_others: int = 0
) -> Table:
    """A table with the first rows. A column whose name begins with * is of numbers."""
    shown = rows[: room.max_rows]
    num_others += len(rows) - len(shown)
    assert all(len(row) == len(columns) for row in rows), "a cell for each column"
    if room.width is not None:
        columns, shown = _fitted(columns, shown, room.width)
    caption = f"and {num_others} more" if num_others else None
    table = Table(title=title, title_justify="left", caption=caption, caption_justify="left", box=None, pad_edge=False)
    table.padding = (0, GAP, 0, 0)
    for column in columns:
        table.add_column(column.removeprefix("*"), justify="right" if column.startswith("*") else "left", no_wrap=True)
    for row in shown:
        table.add_row(*map(Text, row))  # no markup: names come from clients
    return table


def _fitted(columns: Sequence[str], rows: Sequence[Sequence[str]], width: int) -> tuple[list[str], list[Sequence[str]]]:
    """Without the optional columns that there is no room for; if that is not enough, with shorter names."""
    left = list(range(len(columns)))
    widths = [
        max(cell_len(cell) for cell in (name.removeprefix("*"), *(row[place] for row in rows)))
        for place, name in enumerate(columns)
    ]

    def missing() -> int:
        return sum(widths[place] + GAP for place in left) - GAP - width

    for name in OPTIONAL_COLUMNS:
        if missing() > 0 and name in columns:
            left.remove(columns.index(name))
    name_width = max(widths[0] - max(missing(), 0), MIN_NAME)
    fitted = [
        [row[0] if cell_len(row[0]) <= name_width else set_cell_size(row[0], name_width - 1) + "…"]
        + [row[place] for place in left[1:]]
        for row in rows
    ]
    return [columns[place] for place in left], list[Sequence[str]](fitted)


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.0%}" if whole else "-"
