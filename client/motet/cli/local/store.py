"""`motet store`: checks an artifact store, carries adapters from one to another, and tidies it. Needs no server."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

from motet.cli import exits, server_parts
from motet.cli.context import Subparsers

Action = Callable[[argparse.Namespace, Any], int]  # with the opened store; the exit code

_TOOLS = "control_plane.registry.store_tools"
_STANDARD = "-"  # standard input or output, instead of a file


def add_parser(commands: Subparsers) -> None:
    """Declares the group."""
    about = "check an artifact store, carry adapters from one to another, tidy it; needs no server"
    group = commands.add_parser("store", help=about, description=f"{about.capitalize()}.")
    actions = group.add_subparsers(title="actions", metavar="ACTION", required=True)
    verify = _add_action(
        actions, "verify", "read every byte of the store and say what is wrong", _verify, is_changing=False
    )
    verify.add_argument("names", nargs="*", metavar="NAME", help="these adapters only (default: all)")
    export = _add_action(
        actions, "export", "write adapters with all their versions to one file", _export, is_changing=False
    )
    export.add_argument("file", metavar="FILE", help="a new file; - for standard output")
    export.add_argument("names", nargs="*", metavar="NAME", help="these adapters only (default: all)")
    imports = _add_action(
        actions,
        "import",
        "register the adapters of an exported file; stop the server before",
        _import,
        is_changing=True,
    )
    imports.add_argument("file", metavar="FILE", help="a file of `motet store export`; - for standard input")
    imports.add_argument("names", nargs="*", metavar="NAME", help="these adapters only (default: all)")
    gc = _add_action(actions, "gc", "remove what no adapter uses; stop the server before", _gc, is_changing=True)
    gc.add_argument("--dry-run", action="store_true", help="only show it; the server may run")


def _add_action(actions: Any, name: str, about: str, action: Action, *, is_changing: bool) -> Any:
    parser = actions.add_parser(name, help=about, description=f"{about[0].upper()}{about[1:]}.")
    parser.add_argument(
        "--store",
        metavar="PLACE",
        help="a directory, or a URL of s3://, gs:// or az:// (default: MOTET_STORE, then `store` in MOTET_DATA_DIR)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object at the end")
    parser.set_defaults(run=partial(_run, action, is_changing=is_changing))
    return parser


def _run(action: Action, arguments: argparse.Namespace, *, is_changing: bool) -> int:
    """Open the store, locked if it is to be changed, and do it; what goes wrong is one line."""
    errors = server_parts.load("control_plane.errors")
    artifact_store = server_parts.load("control_plane.registry.store.artifact_store")
    inspection, archive = (server_parts.load(f"{_TOOLS}.{name}") for name in ("inspection", "archive"))
    try:
        with contextlib.ExitStack() as stack:
            store = artifact_store.ArtifactStore(_place(arguments.store))
            if is_changing and not getattr(arguments, "dry_run", False):
                store.acquire()
                stack.callback(store.close)
            else:
                store.format.check()
            return action(arguments, store)
    except (inspection.WrongDocument, archive.WrongArchive) as error:
        return _refused(error, exits.CORRUPT)
    except (ValueError, FileExistsError) as error:
        return _refused(error, exits.REFUSED)
    except BrokenPipeError:
        raise
    except (errors.MotetError, OSError) as error:
        return _refused(error, exits.UNAVAILABLE)


def _refused(error: Exception, code: int) -> int:
    print(f"motet store: {error}", file=sys.stderr)
    return code


def _place(given: str | None) -> str:
    """The directory or URL of the store. Raises ValueError where there is none."""
    place = given or os.environ.get("MOTET_STORE")
    if place is None and (data_dir := os.environ.get("MOTET_DATA_DIR")):
        place = str(Path(data_dir) / "store")
    if place is None:
        raise ValueError("no store is named; give --store PLACE, or set MOTET_STORE or MOTET_DATA_DIR")
    if "://" not in place and not Path(place).is_dir():
        raise ValueError(f"--store: {place} is not a directory; make it first, or correct the path")
    return place


def _verify(arguments: argparse.Namespace, store: Any) -> int:
    inspection = server_parts.load(f"{_TOOLS}.inspection")
    checked, found = inspection.Checked(), []
    for problem in inspection.problems(store, arguments.names, checked):
        found.append(problem)
        if not arguments.json:
            print(f"{problem.resource}: {problem.text}", flush=True)
    if arguments.json:
        problems = [dataclasses.asdict(problem) for problem in found]
        print(json.dumps(dataclasses.asdict(checked) | {"problems": problems}))
    else:
        versions = _counted(checked.num_versions, "version")
        print(
            f"{_counted(checked.num_adapters, 'adapter')}, {versions}, {_counted(checked.num_blobs, 'blob')} of "
            f"{checked.size_bytes} bytes: {_counted(len(found), 'problem')}"
        )
    return exits.CORRUPT if found else exits.OK


def _export(arguments: argparse.Namespace, store: Any) -> int:
    archive = server_parts.load(f"{_TOOLS}.archive")
    if arguments.file == _STANDARD:
        carried = archive.export(store, arguments.names, sys.stdout.buffer)
    else:
        with _new_file(Path(arguments.file)) as target:
            carried = archive.export(store, arguments.names, target)
    _report(arguments, carried, "exported")
    return exits.OK


@contextlib.contextmanager
def _new_file(path: Path) -> Iterator[BinaryIO]:
    """A file that is there when the block ends well. Raises FileExistsError."""
    if path.exists():
        raise FileExistsError(f"{path} exists; name a new file, or remove it")
    unfinished = path.with_name(f"{path.name}.part")
    try:
        with unfinished.open("xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        unfinished.rename(path)
    except FileExistsError as error:
        raise FileExistsError(f"{unfinished} exists; another export writes it, or was broken off: remove it") from error
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise


def _import(arguments: argparse.Namespace, store: Any) -> int:
    archive = server_parts.load(f"{_TOOLS}.archive")
    if arguments.file == _STANDARD:
        carried = archive.import_archive(store, sys.stdin.buffer, arguments.names)
    else:
        with Path(arguments.file).open("rb") as source:
            carried = archive.import_archive(store, source, arguments.names)
    _report(arguments, carried, "imported")
    return exits.OK


def _report(arguments: argparse.Namespace, carried: Any, done: str) -> None:
    # Standard output may be the archive.
    out = sys.stderr if arguments.file == _STANDARD else sys.stdout
    if arguments.json:
        print(json.dumps(dataclasses.asdict(carried)), file=out)
        return
    present = f"; {_counted(len(carried.present), 'adapter')} there already" if carried.present else ""
    written = _counted(len(carried.adapters), "adapter")
    blobs = _counted(carried.num_blobs, "blob")
    print(f"{done} {written} with {blobs} of {carried.size_bytes} bytes{present}", file=out)


def _gc(arguments: argparse.Namespace, store: Any) -> int:
    removed: tuple[str, ...] = ()
    if arguments.dry_run:
        left = server_parts.load(f"{_TOOLS}.inspection").find_strays(store)
    else:
        collected = server_parts.load(f"{_TOOLS}.collection").collect(store)
        removed, left = collected.removed.blobs, collected.left
    if arguments.json:
        print(json.dumps({"removed": removed, "left": dataclasses.asdict(left)}))
        return exits.OK
    for digest in removed:
        print(f"removed blobs/{digest}")
    for digest in left.blobs:
        print(f"no adapter uses blobs/{digest}")
    for name in left.unreadable:
        print(f"adapters/{name} cannot be read, and no blob is removed while that is so: register or delete it")
    print(f"{_counted(len(removed), 'blob')} removed, {len(left.blobs)} left that no adapter uses")
    return exits.OK


def _counted(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"
