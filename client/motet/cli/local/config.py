"""`motet config check FILE`: reads a file of settings as each part would, and starts nothing."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from motet.cli import exits, server_parts
from motet.cli.context import Subparsers
from motet.command_line import Parser

# Tables of the file, and the module of each that knows its flags.
_MODULE_BY_TABLE = {
    "control-plane": "control_plane.config",
    "worker": "data_plane.config",
    "gateway": "gateway.config",
}


def add_parser(commands: Subparsers) -> None:
    """Declares the group."""
    group = commands.add_parser("config", help="check a file of settings for --config")
    actions = group.add_subparsers(title="actions", metavar="ACTION", required=True)
    about = "check every table of a file as the part that reads it would on this machine, and show what it sets"
    check = actions.add_parser("check", help=about, description=about)
    check.add_argument("file", type=Path, metavar="FILE", help="the file of --config")
    check.set_defaults(run=_check)


def _check(arguments: argparse.Namespace) -> int:
    path: Path = arguments.file
    config_file = server_parts.load("contract.settings.config_file")
    try:
        tables = config_file.read(path)
    except ValueError as error:
        print(f"motet config check: {error}", file=sys.stderr)
        return exits.REFUSED
    shared = bool(tables.get(config_file.COMMON))
    code, num_checked, num_missing = exits.OK, 0, 0
    for table, module in _MODULE_BY_TABLE.items():
        if not shared and table not in tables:
            print(f"{table}: no settings in {path}")
            continue
        try:
            config = server_parts.load(module)
        except server_parts.ServerPartMissing as error:
            print(f"{table}: not checked: {error}", file=sys.stderr)
            num_missing += 1
            continue
        num_checked += 1
        if (mistake := _find_mistake(config, path)) is not None:
            print(f"{table}: {mistake}", file=sys.stderr)
            code = exits.REFUSED
        else:
            print(f"{table}: ok")
    # One file may be for several machines: a part that this one lacks is checked elsewhere.
    return exits.FAILED if num_missing and not num_checked else code


class WrongSettings(Exception):
    """What a command line with these settings would be refused for."""


class _RaisingParser(Parser):
    def refuse(self, reason: str) -> NoReturn:
        raise WrongSettings(reason.replace(f"; see {self.prog} --help", ""))


def settings_of(config: Any, path: Path | None) -> Any:
    """What the module of one part makes of the file, under the environment. Raises WrongSettings."""
    build: Callable[[argparse.Namespace], object] = config.from_args
    parser = _RaisingParser(prog="motet", allow_abbrev=False)
    try:
        config.add_arguments(parser, config.environment([] if path is None else ["--config", os.fspath(path)]))
        return build(parser.parse_args([]))
    except Exception as error:  # of each part's own kind: the command reports it, whatever it is
        raise WrongSettings(str(error)) from error


def _find_mistake(config: Any, path: Path) -> str | None:
    """What is wrong with the settings of one part, the environment included. None: they can be used."""
    try:
        settings_of(config, path)
    except WrongSettings as error:
        return str(error)
    return None
