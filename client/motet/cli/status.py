"""`motet status`: the system at a glance."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable

from motet.cli import exits
from motet.cli.context import Subparsers, connect, seconds, server_option
from motet.cli.output import json_line, size, table
from motet.types import ServerStatus
from motet.v1.status import AuditStatus

_CLEAR_SCREEN = "\x1b[H\x1b[2J"


def add_parser(commands: Subparsers) -> None:
    """Declares the command."""
    parser = commands.add_parser(
        "status",
        help="workers, queues, KV blocks, adapters by tier",
        description="Show workers, queues, KV blocks and adapters by tier; without the role admin, your tenant's use.",
        parents=[server_option()],
    )
    parser.add_argument("--json", action="store_true", help="print one JSON line")
    parser.add_argument("--watch", action="store_true", help="again and again until Ctrl-C")
    parser.add_argument(
        "--interval-s", type=seconds, default=2.0, metavar="S", help="with --watch, seconds (default: 2)"
    )
    parser.set_defaults(run=run_status)


def run_status(arguments: argparse.Namespace, *, sleep: Callable[[float], None] = time.sleep) -> int:
    """Prints the status once, or until interrupted with --watch."""
    with connect(arguments) as client:
        while True:
            status = client.status()
            text = json_line(status) if arguments.json else render(status)
            if arguments.watch and not arguments.json and sys.stdout.isatty():
                text = _CLEAR_SCREEN + text
            print(text, flush=True)
            if not arguments.watch:
                return exits.OK
            sleep(arguments.interval_s)


def render(status: ServerStatus) -> str:
    """The status as tables, with those that the caller may see."""
    if status.own_tenant_only:
        note = f"adapters\n{status.adapters.num_registered} that you may read"
        return "\n\n".join([_render_model(status), _render_tenants(status), note])
    queues, adapters = status.queues, status.adapters
    arena_rows = [
        (f"arena of {w.worker_id}", w.num_adapters_loaded, size(w.arena_used_bytes), size(w.arena_bytes))
        for w in status.workers
    ]
    error = f": {adapters.host_cache_error}" if adapters.host_cache_error else ""
    cache_state = "" if adapters.host_cache_available else f" (not responding{error})"
    sections = [
        _render_model(status),
        "requests\n"
        + table(
            ("WAITING", "RUNNING", "ACCEPTED", "FINISHED", "REJECTED", "MIGRATED"),
            [
                (
                    queues.num_waiting,
                    queues.num_running,
                    queues.num_accepted,
                    queues.num_finished,
                    queues.num_rejected,
                    queues.num_migrated,
                )
            ],
        ),
        _render_workers(status),
        *_render_memory(status),
        *([_render_tenants(status)] if status.tenants else []),
        *([_render_audit(status.audit)] if status.audit is not None and status.audit.is_on else []),
        f"adapters ({adapters.num_registered} registered)\n"
        + table(
            ("TIER", "ADAPTERS", "USED", "BUDGET"),
            [
                ("store", adapters.num_stored, "", ""),
                (
                    f"host cache{cache_state}",
                    adapters.num_host_cached,
                    size(adapters.host_cache_bytes),
                    size(adapters.host_cache_budget_bytes),
                ),
                *arena_rows,
            ],
        ),
    ]
    return "\n\n".join(sections)


def _render_model(status: ServerStatus) -> str:
    model = status.model
    context = f"{model.max_model_len} tokens" if model.max_model_len else "not known before a worker attaches"
    return (
        f"motet {status.server_version}, model {model.name} ({model.dtype}, context {context}, "
        f"fingerprint {model.fingerprint[:12]})"
    )


def _render_tenants(status: ServerStatus) -> str:
    def of(used: int, limit: int | None) -> str:
        return str(used) if limit is None else f"{used}/{limit}"

    rows = [
        (
            tenant.tenant,
            f"{tenant.weight:g}",
            of(tenant.num_requests, tenant.max_running_requests),
            of(tenant.num_queued_tokens, tenant.max_queued_tokens),
            "" if tenant.num_tokens_left is None else of(tenant.num_tokens_left, tenant.tokens_per_minute),
            "" if tenant.num_requests_left is None else of(tenant.num_requests_left, tenant.requests_per_minute),
            tenant.num_accepted,
            tenant.num_rejected,
            tenant.num_input_tokens,
            tenant.num_generated_tokens,
        )
        for tenant in status.tenants
    ]
    header = (
        "TENANT",
        "WEIGHT",
        "REQUESTS",
        "QUEUED TOKENS",
        "TOKENS LEFT",
        "REQUESTS LEFT",
        "ACCEPTED",
        "REJECTED",
        "PROMPT TOKENS",
        "GENERATED",
    )
    others = f"\nand {status.num_other_tenants} less busy ones" if status.num_other_tenants else ""
    return "tenants\n" + table(header, rows) + others


def _render_audit(audit: AuditStatus) -> str:
    state = f"cannot be written, changes are refused: {audit.error}" if audit.error else "is written"
    lost = f", {audit.num_lost} records of generations and refusals lost" if audit.num_lost else ""
    return f"audit log\n{state}, {audit.num_lines} lines since the start{lost}"


def _render_workers(status: ServerStatus) -> str:
    if not status.workers:
        return "workers\nnone attached"
    rows = []
    for worker in status.workers:
        hit_rate = worker.prefix_hit_tokens / worker.prefix_query_tokens if worker.prefix_query_tokens else 0.0
        rows.append(
            (
                worker.worker_id,
                worker.device,
                worker.num_running,
                worker.num_waiting,
                worker.max_model_len,
                f"{worker.num_blocks_held}+{worker.num_blocks_cached}/{worker.num_blocks}",
                f"{hit_rate:.0%}",
                worker.num_preemptions,
                worker.num_tokens_sampled,
                f"{worker.step_time_ms:.1f}",
                size(worker.resident_bytes),
            )
        )
    header = (
        "WORKER",
        "DEVICE",
        "RUNNING",
        "WAITING",
        "CONTEXT",
        "KV HELD+CACHED/ALL",
        "PREFIX HITS",
        "PREEMPTED",
        "TOKENS",
        "STEP MS",
        "MEMORY",
    )
    return "workers\n" + table(header, rows)


def _render_memory(status: ServerStatus) -> list[str]:
    """Where the memory of each worker's device went; nothing if no worker reported it."""
    rows = [
        (
            worker.worker_id,
            size(worker.memory_bytes),
            size(worker.weights_bytes),
            size(worker.arena_bytes),
            size(worker.step_memory_bytes) if worker.step_memory_bytes else "not measured",
            size(worker.kv_bytes),
            size(worker.host_kv_bytes),
            size(worker.pinned_bytes),
            size(worker.graph_bytes),
            size(worker.headroom_bytes),
        )
        for worker in status.workers
        if worker.memory_bytes
    ]
    header = ("WORKER", "DEVICE", "WEIGHTS", "ARENA", "LARGEST STEP", "KV", "HOST KV", "PINNED", "GRAPHS", "HEADROOM")
    return ["memory\n" + table(header, rows)] if rows else []
