"""Looks for planted secrets in whatever the tests capture: logs, output of child processes, statuses, errors.

Tests and their helpers plant secrets (`SCAN.plant`) where the product takes them, and show the scan what comes out
(`SCAN.look`). tests/conftest.py shows it every record that is logged in the test process and what pytest captured, and
lets the test fail in which a secret was found. A secret is found in percent-encoding and in base64, too.
"""

from __future__ import annotations

import base64
import logging
import secrets
import string
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

import psutil
import pytest

_BASE62 = string.ascii_letters + string.digits


@dataclass(frozen=True)
class Leak:
    """One secret at one place."""

    secret: str  # what it is, never its value
    source: str
    excerpt: str  # with the secret hidden

    def __str__(self) -> str:
        return f"{self.secret} in {self.source}: ...{self.excerpt}..."


class SecretScan:
    """The secrets that were planted, and where they were found since the last `take_leaks`."""

    def __init__(self) -> None:
        self._forms: dict[str, str] = {}  # what to look for -> which secret it is
        self._leaks: list[Leak] = []
        self.num_texts = 0  # that were looked at

    def plant(self, secret: str, value: str | None = None) -> str:
        """Remember a secret from here on; a random one if no value is given. Returns the value."""
        value = "pl4nted" + random_base62(25) if value is None else value
        assert len(value) >= 16, "a short one is found where it is not"
        for form in (value, quote(value, safe=""), base64.b64encode(value.encode()).decode().rstrip("=")):
            self._forms[form] = secret
        return value

    def look(self, source: str, text: str | bytes) -> None:
        """Search a text."""
        text = text.decode("utf-8", "replace") if isinstance(text, bytes) else text
        self.num_texts += 1
        for form, secret in self._forms.items():
            at = text.find(form)
            if at >= 0:
                before, after = text[max(0, at - 80) : at], text[at + len(form) : at + len(form) + 40]
                self._leaks.append(Leak(secret, source, f"{before}<{secret}>{after}"))

    def look_at_files(self, source: str, paths: Iterable[Path]) -> None:
        """Search files."""
        for path in paths:
            self.look(f"{source} {path.name}", path.read_bytes())

    def look_at_arguments(self, pid: int) -> None:
        """Search the arguments of a process and of all that it started."""
        try:
            process = psutil.Process(pid)
            for each in (process, *process.children(recursive=True)):
                self.look(f"arguments of {each.name()}", "\0".join(each.cmdline()))
        except psutil.NoSuchProcess:
            pass

    def take_leaks(self) -> list[Leak]:
        """What was found since the last call."""
        found, self._leaks = list(dict.fromkeys(self._leaks)), []
        return found


class ScanningHandler(logging.Handler):
    """Shows a scan every record as it is: what is logged may not rely on the log's own last check."""

    def __init__(self, scan: SecretScan) -> None:
        super().__init__()
        self._scan = scan
        self.setFormatter(logging.Formatter("%(message)s"))

    def emit(self, record: logging.LogRecord) -> None:
        self._scan.look(f"the log of {record.name}", self.format(record))


def random_base62(length: int) -> str:
    return "".join(secrets.choice(_BASE62) for _ in range(length))


def judge(report: pytest.TestReport, scan: SecretScan) -> None:
    """Search what pytest captured; a leak fails the test in whose time it was found."""
    for title, text in report.sections:
        scan.look(f"{report.nodeid}, {title}", text)
    if report.when == "teardown" and (leaks := scan.take_leaks()) and report.passed:
        report.outcome = "failed"
        report.longrepr = "planted secrets were found:\n" + "\n".join(map(str, leaks))


SCAN = SecretScan()  # of this process, for the whole run
API_KEY = SCAN.plant("API key", f"motet_planted_{random_base62(43)}")
JWT = SCAN.plant("token", f"eyJhbGciOiJFUzI1NiJ9.eyJzdWIiOiJwbGFudGVkIn0.{random_base62(86)}")
# In the environment of every child process.
ENVIRONMENT = {"AWS_SECRET_ACCESS_KEY": SCAN.plant("credential of the store")}
METADATA = (("authorization", f"Bearer {JWT}"),)  # of calls by tests


def plant_redis_passwords(data_dir: Path) -> None:
    """Plant the password that an embedded Redis made up for itself."""
    for config in data_dir.glob("redis/redis.conf"):
        for line in config.read_text(encoding="utf-8").splitlines():
            for word in line.split():
                if line.startswith("user ") and word.startswith(">"):
                    SCAN.plant("password of the embedded Redis", word[1:])
