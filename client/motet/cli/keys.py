"""`motet keys`: API keys in the file that a control plane reads (`--api-keys`). No server is needed, nor called."""

from __future__ import annotations

import argparse
import os
import re
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from motet.cli import exits, server_parts
from motet.cli.context import Subparsers
from motet.cli.output import json_line, table
from motet.errors import FailedPrecondition, InvalidArgument, NotFound, invalid_field

_DAY_S = 86_400
_UNITS_S = {"m": 60, "h": 3600, "d": _DAY_S}
_MAX_DAYS = 36_500


def add_parser(commands: Subparsers) -> None:
    """Declares the group."""
    group = commands.add_parser("keys", help="make, list and revoke API keys, in the server's file of keys")
    actions = group.add_subparsers(title="actions", metavar="ACTION", required=True)

    def action(name: str, help_text: str, run: Callable[[argparse.Namespace], int]) -> argparse.ArgumentParser:
        parser: argparse.ArgumentParser = actions.add_parser(name, help=help_text, description=help_text)
        default = os.environ.get("MOTET_API_KEYS")
        parser.add_argument(
            "--file",
            type=Path,
            default=Path(default) if default else None,
            required=not default,
            metavar="FILE",
            help="file of keys, --api-keys of the control plane (default: $MOTET_API_KEYS)",
        )
        parser.set_defaults(run=run)
        return parser

    new = action("new", "make a key, add its hash to the file, and show the key, which cannot be shown again", _new)
    new.add_argument(
        "--tenant",
        action="append",
        required=True,
        metavar="NAME",
        help="tenant that calls are counted for; repeated, the first one is the default; '*': any",
    )
    new.add_argument(
        "--role",
        action="append",
        required=True,
        metavar="ROLE",
        help="infer, adapters.read, adapters.write or admin; may be repeated",
    )
    new.add_argument(
        "--adapter",
        action="append",
        metavar="PATTERN",
        help="adapter, or pattern of adapters, that the key may use; @base: the base model; may be repeated "
        "(default: all that the tenant sees)",
    )
    new.add_argument(
        "--expires",
        type=_expiry,
        metavar="TIME",
        help="after this time, such as 30d, 12h or 45m, or at 2027-01-31T12:00:00Z (default: never)",
    )
    new.add_argument("--label", default="", metavar="TEXT", help="who has the key, for people (default: none)")
    new.add_argument(
        "--out",
        type=Path,
        metavar="FILE",
        help="write the key to a new file that only you may read (default: print the key)",
    )
    action("list", "keys of the file, without their hashes", _list).add_argument(
        "--json", action="store_true", help="print JSON, one line per key"
    )
    revoke = action("revoke", "remove a key from the file: a running server refuses it within seconds", _revoke)
    revoke.add_argument("id", metavar="ID", help="of the key, its part between the two '_'")


def _new(arguments: argparse.Namespace) -> int:
    files, grants = _module("authentication.key_file"), _module("authentication.grants")
    principal = _module("principal")
    roles = {role.value: role for role in principal.Role}
    if unknown := [name for name in arguments.role if name not in roles]:
        raise invalid_field("--role", f"{unknown[0]!r} is not a role; use {', '.join(roles)}")
    grant = grants.Grant(
        tenants=tuple(dict.fromkeys(arguments.tenant)),
        roles=tuple(roles[name] for name in dict.fromkeys(arguments.role)),
        adapters=None if arguments.adapter is None else tuple(dict.fromkeys(arguments.adapter)),
    )
    out: Path | None = arguments.out
    if out is not None and out.resolve() == arguments.file.resolve():
        raise invalid_field("--out", f"{out} is the server's file of keys; give another file")
    made: list[str] = []

    def change(entries: tuple[Any, ...]) -> tuple[Any, ...]:
        taken = {entry.id for entry in entries}
        entry, key = files.new_key(taken, grant, expires_s=arguments.expires, label=arguments.label)
        if out is not None:
            _write_new(out, key)  # before the file of keys: a key that is in there and nowhere else is lost
        made[:] = [entry.id, key]
        return (*entries, entry)

    try:
        _change(arguments.file, change, may_create=True)
    except BaseException:
        if out is not None and made:
            out.unlink(missing_ok=True)  # a key that the server does not know
        raise
    key_id, key = made
    if out is None:
        print(key)
    place = "the line above is the key, shown this once" if out is None else f"the key itself is in {out} alone"
    print(f"motet: key {key_id} is in {arguments.file}; {place}", file=sys.stderr)
    return exits.OK


def _write_new(path: Path, key: str) -> None:
    """The key as a new file, readable by its owner only from the first moment. An existing file stays as it is."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except FileExistsError as error:
        raise FailedPrecondition(f"--out: {path} exists and is not replaced; give the name of a new file") from error
    except OSError as error:
        raise FailedPrecondition(f"--out: {path} cannot be made: {error.strerror}") from error
    try:
        with open(descriptor, "w", encoding="ascii") as file:  # noqa: PTH123 - of a descriptor
            file.write(f"{key}\n")
            file.flush()
            os.fsync(descriptor)
    except OSError as error:
        path.unlink(missing_ok=True)
        raise FailedPrecondition(f"--out: {path} cannot be written: {error.strerror}") from error


def _list(arguments: argparse.Namespace) -> int:
    files = _module("authentication.key_file")
    entries = _said_of(arguments.file, lambda: files.read_keys(arguments.file))
    if arguments.json:
        for entry in entries:
            print(json_line({name: value for name, value in entry.as_json().items() if name != "sha256"}))
        return exits.OK
    rows = [
        (
            entry.id,
            ",".join(entry.grant.tenants),
            ",".join(role.value for role in entry.grant.roles),
            "all" if entry.grant.adapters is None else ",".join(entry.grant.adapters) or "none",
            _shown_expiry(entry.expires_s, files.shown_time),
            entry.label,
        )
        for entry in entries
    ]
    print(table(("ID", "TENANTS", "ROLES", "ADAPTERS", "EXPIRES", "LABEL"), rows))
    return exits.OK


def _revoke(arguments: argparse.Namespace) -> int:
    def change(entries: tuple[Any, ...]) -> tuple[Any, ...]:
        rest = tuple(entry for entry in entries if entry.id != arguments.id)
        if len(rest) == len(entries):
            # The id is not repeated: somebody may have given the whole key.
            raise NotFound(f"{arguments.file} has no key of that id; `motet keys list` shows the ids")
        return rest

    _change(arguments.file, change, may_create=False)
    print(f"motet: key {arguments.id} is revoked; a running server refuses it within seconds", file=sys.stderr)
    return exits.OK


def _change(file: Path, change: Callable[[tuple[Any, ...]], tuple[Any, ...]], *, may_create: bool) -> None:
    files = _module("authentication.key_file")
    _said_of(file, lambda: files.change_keys(file, change, may_create=may_create))


def _said_of(file: Path, act: Callable[[], Any]) -> Any:
    """What `act` returns; errors of the file name it."""
    try:
        return act()
    except FileNotFoundError as error:
        raise NotFound(f"{file} is not there; `motet keys new` makes it, in a directory that exists") from error
    except OSError as error:
        raise FailedPrecondition(f"{file} cannot be read or written: {error.strerror}") from error
    except ValueError as error:
        raise InvalidArgument(f"{file}: {error}") from error


def _module(name: str) -> Any:
    """A part of the server that knows the file. Raises ServerPartMissing where there is only the client."""
    return server_parts.load(f"control_plane.access.{name}")


def _expiry(text: str) -> float:
    """The argparse type of --expires: seconds since 1970."""
    if match := re.fullmatch(r"(\d{1,9})([mhd])", text):
        after_s = int(match[1]) * _UNITS_S[match[2]]
        if not 0 < after_s <= _MAX_DAYS * _DAY_S:
            raise argparse.ArgumentTypeError(f"{text}: at least 1m and at most {_MAX_DAYS}d are expected")
        return time.time() + after_s
    try:
        moment = datetime.fromisoformat(text)
        if moment.tzinfo is not None and moment > datetime.now(UTC):
            return moment.timestamp()
    except (ValueError, OverflowError):
        pass
    raise argparse.ArgumentTypeError(
        f"{text}: give a time from now, such as 30d, 12h or 45m, or a later moment with its zone, such as "
        "2027-01-31T12:00:00Z"
    )


def _shown_expiry(expires_s: float | None, shown_time: Callable[[float], str]) -> str:
    if expires_s is None:
        return "never"
    return f"{shown_time(expires_s)}{' (expired)' if expires_s <= time.time() else ''}"
