"""`motet audit`: checks the files of an audit log, and shows lines of them. Needs no server."""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from motet.audit.chain import GENESIS, ROTATED_DIGITS, Line, Verdict, check
from motet.cli import exits
from motet.cli.context import Subparsers

_ROTATED = re.compile(rf"(.+)\.(\d{{{ROTATED_DIGITS},}})")
_DIGEST = re.compile(r"[0-9a-f]{64}")


def add_parser(commands: Subparsers) -> None:
    """Declares the commands."""
    parser = commands.add_parser(
        "audit",
        help="check the files of an audit log, show lines of them; needs no server",
        description="Check the files of an audit log, or show lines of them. Needs no server.",
    )
    verbs = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    verify = verbs.add_parser(
        "verify",
        help="check the chain of hashes",
        description="Check that each line of an audit log has the SHA-256 of the line before it. Exit code 1, and the "
        "first line that is wrong, where one does not.",
    )
    _add_files(verify)
    verify.add_argument("--json", action="store_true", help="print one JSON line")
    verify.add_argument(
        "--anchor",
        type=_digest,
        metavar="HASH",
        help="a last hash that was noted earlier: a line of the log must still have it",
    )
    verify.add_argument(
        "--whole",
        action="store_true",
        help="fail unless the files begin with the first line of the log, so that the oldest ones are not missing",
    )
    verify.set_defaults(run=run_verify)
    show = verbs.add_parser(
        "show", help="print lines that match", description="Print the lines of an audit log that match every option."
    )
    _add_files(show)
    show.add_argument("--tenant", help="of the actor")
    show.add_argument("--principal", help="of the actor")
    show.add_argument("--action", help="such as adapter.delete or generate")
    show.add_argument("--outcome", choices=("success", "denied", "failure"), help="how it ended")
    show.add_argument("--since", metavar="TIME", help="as lines have it or its beginning: 2026-07-02T10, UTC")
    show.set_defaults(run=run_show)


def _add_files(parser: Any) -> None:
    parser.add_argument(
        "files",
        nargs="+",
        type=Path,
        metavar="FILE",
        help="files of one log, the oldest first; those that were rotated away from a FILE are read before it",
    )


def _digest(text: str) -> str:
    if not _DIGEST.fullmatch(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a SHA-256: 64 digits of 0-9 and a-f are expected")
    return text


def run_verify(arguments: argparse.Namespace) -> int:
    """Prints what the check found."""
    try:
        files = with_rotated(arguments.files)
        verdict = check(lines_of(files), anchor=arguments.anchor)
    except OSError as error:
        return _cannot_read(error)
    is_missing_anchor = arguments.anchor is not None and not verdict.has_anchor
    is_missing_beginning = arguments.whole and verdict.begins_after != GENESIS
    is_ok = verdict.finding is None and not is_missing_anchor and not is_missing_beginning
    if arguments.json:
        print(json.dumps(_summary(files, verdict, is_ok=is_ok, anchor=arguments.anchor)))
    else:
        print(_sentences(files, verdict))
        if verdict.finding is None and is_missing_anchor:
            print(f"no line has the hash {arguments.anchor}: the log was cut off or written anew")
        if verdict.finding is None and is_missing_beginning:
            print("the first line of the log is not here: its oldest files were removed, or the log is empty")
    return exits.OK if is_ok else exits.FAILED


def _summary(files: Sequence[Path], verdict: Verdict, *, is_ok: bool, anchor: str | None) -> dict[str, Any]:
    finding = verdict.finding
    return {
        "ok": is_ok,
        "files": [str(file) for file in files],
        "num_lines": verdict.num_lines,
        "num_torn_lines": verdict.num_torn,
        "begins_after": verdict.begins_after,
        "is_from_beginning": verdict.begins_after == GENESIS,
        "first_time": verdict.first_time,
        "last_time": verdict.last_time,
        "last_hash": verdict.last_hash,
        "has_anchor": None if anchor is None else verdict.has_anchor,
        "first_wrong": None if finding is None else {"file": finding.file, "line": finding.line, "what": finding.what},
    }


def _sentences(files: Sequence[Path], verdict: Verdict) -> str:
    count = f"{verdict.num_lines} line{'' if verdict.num_lines == 1 else 's'} in {len(files)} file"
    count += "" if len(files) == 1 else "s"
    lines = [
        f"{count} are in order, {verdict.first_time} to {verdict.last_time}" if verdict.num_lines else "no line",
        f"last hash {verdict.last_hash}",
    ]
    if verdict.num_lines and verdict.begins_after != GENESIS:
        lines.append(f"begins in the middle of a log, after the line with the hash {verdict.begins_after}")
    if verdict.num_torn:
        lines.append(f"{verdict.num_torn} cut off by a crash, and closed by the next start")
    if verdict.finding is not None:
        lines.append(f"{verdict.finding.file}:{verdict.finding.line}: {verdict.finding.what}")
    return "\n".join(lines)


def run_show(arguments: argparse.Namespace) -> int:
    """Prints the lines that match, as they are."""
    try:
        for line in lines_of(with_rotated(arguments.files)):
            event = line.event()
            if event is not None and _matches(event, arguments):
                print(line.raw.decode("utf-8", "replace"))
    except OSError as error:
        return _cannot_read(error)
    return exits.OK


def _matches(event: Any, arguments: argparse.Namespace) -> bool:
    data = event["data"]
    actor = data.get("actor") or {}
    wanted = (
        (arguments.tenant, actor.get("tenant")),
        (arguments.principal, actor.get("principal")),
        (arguments.action, data.get("action")),
        (arguments.outcome, data.get("outcome")),
    )
    is_wanted = all(value is None or value == found for value, found in wanted)
    return is_wanted and (arguments.since is None or str(event.get("time")) >= arguments.since)


def with_rotated(files: Sequence[Path]) -> list[Path]:
    """The files in order, each once, and before each the files that were rotated away from it. Raises OSError."""
    found: list[Path] = []
    for file in files:
        rotated = []
        for other in file.parent.iterdir():
            match = _ROTATED.fullmatch(other.name)
            if match is not None and match[1] == file.name:
                rotated.append((int(match[2]), other))
        found += [other for _, other in sorted(rotated)]
        found.append(file)
    return list(dict.fromkeys(found))


def lines_of(files: Sequence[Path]) -> Iterator[Line]:
    """The lines of the files. Raises OSError."""
    for file in files:
        with file.open("rb") as opened:
            for number, raw in enumerate(opened, 1):
                yield Line(str(file), number, raw.removesuffix(b"\n"), raw.endswith(b"\n"))


def _cannot_read(error: OSError) -> int:
    print(f"motet: {error.filename} cannot be read: {error.strerror}", file=sys.stderr)
    return exits.FAILED
