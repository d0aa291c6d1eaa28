"""One frame of `motet top`. Needs the package rich."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from motet.cli.live.rates import Rates, WorkerRates
from motet.cli.output import size
from motet.types import ServerStatus
from motet.v1.status import WorkerStatus

BASE_MODEL = "(base model)"
OTHER_LINES = 16  # of a frame: headings, totals and tiers
MIN_ROWS = 3  # of each table, however small the terminal is
DIGEST_CHARS = 12


def plain_console(width: int) -> Console:
    """Where frames go that are no screen."""
    return Console(width=width, highlight=False, markup=False)


def live_screen() -> Live:
    """A terminal's whole screen, which the caller refreshes; what was there is back when it ends."""
    return Live(screen=True, auto_refresh=False, redirect_stdout=False, redirect_stderr=False)


def rows_that_fit(screen: Live) -> int:
    """Rows of each of the three tables that a terminal has room for."""
    return max((screen.console.height - OTHER_LINES) // 3, MIN_ROWS)


def frame(status: ServerStatus, rates: Rates, *, max_rows: int | None) -> RenderableType:
    """Everything that the caller may see, with at most so many rows in each table; None: all."""
    if status.own_tenant_only:
        note = Text("Your credential shows your tenant only; the role admin shows workers and adapters.")
        return Group(_head(status), _tenants(status, rates, max_rows), note)
    return Group(
        _head(status),
        _totals(status, rates),
        _workers(status, rates, max_rows),
        _batch(status, max_rows),
        _tiers(status),
        _tenants(status, rates, max_rows),
    )


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


def _workers(status: ServerStatus, rates: Rates, max_rows: int | None) -> Table:
    ranked = sorted(status.workers, key=lambda worker: (-_rate(rates, worker).num_tokens, worker.worker_id))
    rows = [
        (
            worker.worker_id,
            "drained" if worker.worker_id in status.drained_worker_ids else "",
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
        "",
        "DEVICE",
        "*RUNNING",
        "*WAITING",
        "*TOKENS/S",
        "*STEPS/S",
        "*STEP MS",
        "*KV HELD",
        "*CACHED",
    )
    return _table("workers", (*columns, "*PREFIX HITS", "*ADAPTERS", "*MEMORY"), rows, max_rows)


def _rate(rates: Rates, worker: WorkerStatus) -> WorkerRates:
    return rates.workers.get(worker.worker_id, WorkerRates(0.0, 0.0))


def _batch(status: ServerStatus, max_rows: int | None) -> Table:
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
    return _table("requests by adapter", columns, rows, max_rows, num_others=status.num_other_active_adapters)


def _tiers(status: ServerStatus) -> Table:
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
    return _table(title, ("TIER", "*ADAPTERS", "*USED", "*ROOM"), rows, None)


def _tenants(status: ServerStatus, rates: Rates, max_rows: int | None) -> Table:
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
    return _table("tenants", columns, rows, max_rows, num_others=status.num_other_tenants)


def _table(
    title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], max_rows: int | None, *, num_others: int = 0
) -> Table:
    """A table with the first rows. A column whose name begins with * is of numbers."""
    shown = rows[:max_rows]
    num_others += len(rows) - len(shown)
    caption = f"and {num_others} more" if num_others else None
    table = Table(title=title, title_justify="left", caption=caption, caption_justify="left", box=box.SIMPLE_HEAD)
    for column in columns:
        table.add_column(column.removeprefix("*"), justify="right" if column.startswith("*") else "left", no_wrap=True)
    assert all(len(row) == len(columns) for row in rows), "a cell for each column"
    for row in shown:
        table.add_row(*map(Text, row))  # no markup: names come from clients
    return table


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.0%}" if whole else "-"
