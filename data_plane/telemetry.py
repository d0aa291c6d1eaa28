"""Logging of a worker process: one record per event on stderr, so that stdout carries the ready lines alone."""

from __future__ import annotations

from motet import process_log

LOG_LEVELS = process_log.LOG_LEVELS


def configure_logging(level: str) -> None:
    """Send every record of `level` and above to stderr."""
    process_log.configure(level, process="worker")
