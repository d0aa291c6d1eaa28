"""`motet workers`: lists workers, takes requests away from them and gives them requests again."""

from __future__ import annotations

import argparse

from motet.cli import exits
from motet.cli.context import Command, Subparsers, connect, server_option
from motet.cli.output import json_line, table
from motet.errors import PermissionDenied
from motet.types import ServerStatus


def add_parser(commands: Subparsers) -> None:
    """Declares the commands."""
    parser = commands.add_parser(
        "workers",
        help="list workers, drain one before it is stopped",
        description="List workers, or drain one before it is stopped. Needs the role admin.",
    )
    verbs = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)

    def verb(name: str, about: str, run: Command) -> argparse.ArgumentParser:
        added: argparse.ArgumentParser = verbs.add_parser(
            name, help=about, description=f"{about[0].upper()}{about[1:]}.", parents=[server_option()]
        )
        added.set_defaults(run=run)
        return added

    listing = verb("list", "show every worker and whether it is drained", run_list)
    listing.add_argument("--json", action="store_true", help="print one JSON line")
    drain = verb("drain", "move a worker's requests to others, and give it none until undrain", run_drain)
    drain.add_argument(
        "--force", action="store_true", help="also if no other worker takes requests: they wait for one then"
    )
    undrain = verb("undrain", "give a drained worker requests again", run_undrain)
    for added in (drain, undrain):
        added.add_argument("worker_id", metavar="ID", help="of the worker, as `motet workers list` shows it")


def run_list(arguments: argparse.Namespace) -> int:
    """Prints a table, or JSON."""
    with connect(arguments) as client:
        status = client.status()
    if status.own_tenant_only:
        raise PermissionDenied("workers are shown to the role admin; use a credential with it")
    if arguments.json:
        print(json_line({"workers": status.workers, "drained_worker_ids": status.drained_worker_ids}))
    else:
        print(render(status))
    return exits.OK


def render(status: ServerStatus) -> str:
    """The workers as a table, drained ones that are not attached included."""
    drained = set(status.drained_worker_ids)
    rows: list[tuple[object, ...]] = [
        (
            worker.worker_id,
            "drained" if worker.worker_id in drained else "takes requests",
            worker.device,
            worker.num_running,
            worker.num_waiting,
            worker.num_adapters_loaded,
            f"{worker.num_blocks_held}/{worker.num_blocks}",
        )
        for worker in status.workers
    ]
    absent = sorted(drained - {worker.worker_id for worker in status.workers})
    rows += [(worker_id, "drained, not attached", "", "", "", "", "") for worker_id in absent]
    if not rows:
        return "no worker is attached"
    return table(("WORKER", "STATE", "DEVICE", "RUNNING", "WAITING", "ADAPTERS", "BLOCKS"), rows)


def run_drain(arguments: argparse.Namespace) -> int:
    """Drains a worker, and says how many requests were moved."""
    with connect(arguments) as client:
        num_moved = client.workers.drain(arguments.worker_id, force=arguments.force)
    print(f"{arguments.worker_id} is drained: {num_moved} requests were moved, and it gets no others")
    return exits.OK


def run_undrain(arguments: argparse.Namespace) -> int:
    """Gives a worker requests again."""
    with connect(arguments) as client:
        client.workers.undrain(arguments.worker_id)
    print(f"{arguments.worker_id} gets requests")
    return exits.OK
