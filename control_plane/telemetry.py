"""Logging of the control plane: one record per change of state on stderr; stdout carries the ready line alone."""

from __future__ import annotations

from motet import process_log

LOG_LEVELS = process_log.LOG_LEVELS


def printable(text: str, most: int = 300) -> str:
    """Text from outside as it may stand in one line of the log: escaped, and cut off after so many characters."""
    shown = "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text[:most])
    return shown if len(text) <= most else f"{shown}… ({len(text)} characters)"


def configure_logging(level: str) -> None:
    """Send every record of `level` and above to stderr. The audit log is written at every level."""
    process_log.configure(level, process="control plane")
