"""`motet completion SHELL`: a script for bash, zsh or tcsh that completes commands, flags and files."""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Callable

from motet.cli import exits, server_parts, up
from motet.cli.context import Subparsers
from motet.command_line import Parser

SHELLS = ("bash", "zsh", "tcsh")
_MODULE_BY_COMMAND = {
    "control-plane": "control_plane.config",
    "worker": "data_plane.config",
    "gateway": "gateway.config",
}
_FILE_METAVARS = ("FILE", "DIR", "PATH")


def add_parser(commands: Subparsers, whole: Callable[[], argparse.ArgumentParser]) -> None:
    """Declares the command. `whole` makes the parser with every command and flag."""
    about = 'print a script that completes commands and flags: eval "$(motet completion bash)"'
    parser = commands.add_parser("completion", help=about, description=about)
    parser.add_argument("shell", choices=SHELLS, help="the shell that reads the script")
    parser.set_defaults(run=lambda arguments: _print_script(arguments.shell, whole()))


def _print_script(shell: str, parser: argparse.ArgumentParser) -> int:
    try:
        import shtab
    except ModuleNotFoundError:
        print("motet completion: needs the Python package shtab: pip install 'motet[completion]'", file=sys.stderr)
        return exits.FAILED
    _complete_files(parser)
    print(shtab.complete(parser, shell))
    return exits.OK


def declare_server_part(parser: Parser, name: str) -> None:
    """Add the flags of a command that is a server part, or none if that part is not installed."""
    with contextlib.suppress(server_parts.ServerPartMissing):
        if name == "up":
            up.declare_flags(parser)
        else:
            server_parts.load(_MODULE_BY_COMMAND[name]).add_arguments(parser)


def _complete_files(parser: argparse.ArgumentParser) -> None:
    """Mark every flag that takes a file or a folder, of all commands, in the way that shtab reads."""
    import shtab

    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for inner in action.choices.values():
                _complete_files(inner)
        elif action.metavar in _FILE_METAVARS:
            action.complete = shtab.DIRECTORY if action.metavar == "DIR" else shtab.FILE  # type: ignore[attr-defined]
