"""`motet convert merge`: a base checkpoint with one adapter merged into its weights, without a server."""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

from motet.cli import exits, server_parts
from motet.cli.output import json_line


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What `motet convert merge` takes beside the directories."""
    parser.add_argument(
        "--base-model", metavar="DIR", type=Path, required=True, help="the base checkpoint that the adapter is for"
    )
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    # The control plane's check of adapters and the worker's arithmetic; neither may import the other.
    model, packing = (
        server_parts.load(f"control_plane.registry.{name}") for name in ("model.base_model", "packing.directory")
    )
    control_errors, worker_errors = server_parts.load("control_plane.errors"), server_parts.load("data_plane.errors")
    weights = server_parts.load("data_plane.merging.weights")
    try:
        merged = _merged(arguments, packing)
    except control_errors.InvalidAdapter as error:
        for violation in error.violations:
            print(f"motet convert: {violation.field}: {violation.description}", file=sys.stderr)
        return exits.REFUSED
    except (weights.CannotMerge, worker_errors.WorkerError, model.BaseModelError) as error:
        print(f"motet convert: {error}", file=sys.stderr)
        return exits.REFUSED
    shown: dict[str, Any] = {
        "num_changed": merged.num_changed,
        "num_tensors": len(merged.weight_map),
        "size_bytes": merged.size_bytes,
        "vocab_size": merged.vocab_size,
        "is_untied": merged.is_untied,
    }
    if arguments.json:
        print(json_line(shown))
        return exits.OK
    files = len(set(merged.weight_map.values()))
    print(
        f"{merged.num_changed} of {len(merged.weight_map)} tensors merged, {merged.size_bytes} bytes in "
        f"{files} {'file' if files == 1 else 'files'} of {arguments.out}"
    )
    if merged.is_untied:
        print("embedding and head shared one weight in the base, and have two now: tie_word_embeddings is false")
    return exits.OK


def _merged(arguments: argparse.Namespace, packing: Any) -> Any:
    directory, module_tree, wire, reports, plan_pb2 = (
        server_parts.load(name)
        for name in (
            "data_plane.merging.directory",
            "data_plane.merging.module_tree",
            "data_plane.wire",
            "control_plane.fleet.workers.reports",
            "contract.v1.plan_pb2",
        )
    )
    directory.check_out(arguments.out)
    tree = module_tree.ModuleTree(arguments.base_model)
    # What a worker of this model would report, in its words.
    reported = reports.report_of(plan_pb2.Hello(target_modules=wire.encode_targets(tree.targets()))).modules
    with tempfile.TemporaryDirectory(dir=arguments.out.parent, prefix=f".{arguments.out.name}.packed-") as work:
        names = packing.pack_directory(arguments.directory, arguments.base_model, Path(work), reported)
        return directory.write_merged(arguments.base_model, Path(work), arguments.directory, names, arguments.out, tree)
