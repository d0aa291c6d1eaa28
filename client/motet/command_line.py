"""How every program of Motet reads its command line: one way to refuse it, one form of a size in bytes.

Standard library only. Used by the `motet` command, the control plane and the worker.
"""

from __future__ import annotations

import argparse
import re
from typing import Any, NoReturn

from motet import __version__

WRONG_COMMAND_LINE = 2  # exit code, argparse's own

_UNITS = {"": 1, "B": 1, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30, "TIB": 1 << 40}


class Parser(argparse.ArgumentParser):
    """Says on one line what is wrong. The usage, which can fill a screen, is what --help is for."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """argparse's. What a command does not know it refuses itself, so that the line names its own --help."""
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        return found, unknown

    def error(self, message: str) -> NoReturn:
        """End the process: argparse cannot read the command line."""
        # argparse writes "argument --flag: reason", our own checks "--flag: reason".
        self.refuse(f"{message.removeprefix('argument ')}; see {self.prog} --help")

    def add_version(self) -> None:
        """Add --version, which prints Motet's version and ends the process."""
        self.add_argument("--version", action="version", version=f"motet {__version__}")

    def refuse(self, reason: str) -> NoReturn:
        """End the process: a flag's value cannot be used. `reason` names the flag and ends with what to do."""
        self.exit(WRONG_COMMAND_LINE, f"{self.prog}: {reason}\n")


def parse_bytes(text: str) -> int:
    """Bytes from "1048576", "512KiB", "64MiB" or "2GiB". Raises ValueError otherwise."""
    match = re.fullmatch(r"(\d+)\s*([A-Za-z]*)", text.strip())
    if match is None or match[2].upper() not in _UNITS:
        raise ValueError(f"{text!r} is not a valid size in bytes: write 1048576, 512KiB, 64MiB or 2GiB")
    return int(match[1]) * _UNITS[match[2].upper()]


def byte_size(text: str) -> int:
    """The argparse type of a flag in bytes."""
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def size(num_bytes: int) -> str:
    """Bytes for people."""
    amount = float(num_bytes)
    for unit in ("B", "KiB", "MiB"):
        if amount < 1024:
            return f"{amount:.0f} {unit}" if unit == "B" else f"{amount:.1f} {unit}"
        amount /= 1024
    return f"{amount:.1f} GiB"
