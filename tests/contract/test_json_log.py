"""Log records as JSON: one object on each line, whatever the text has in it, and without secrets."""

from __future__ import annotations

import io
import json
import logging
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from contract import process_log

logger = logging.getLogger("motet.test_json_log")


@pytest.fixture(autouse=True)
def restored_logging() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    packages = [
        logging.getLogger(name) for name in ("contract", "control_plane", "data_plane", "gateway", "kernels", "motet")
    ]
    levels = [package.level for package in packages]
    root.handlers = []  # pytest's own are not ours to close
    hooks = sys.excepthook, threading.excepthook
    yield
    sys.excepthook, threading.excepthook = hooks
    root.handlers = handlers
    for each, former in zip([root, *packages], [level, *levels], strict=True):
        each.setLevel(former)


def opened(context: dict[str, str] | None = None, log_format: str = "json") -> io.StringIO:
    stream = io.StringIO()
    process_log.configure_logging(
        "info", process="worker", log_format=log_format, context=lambda: context or {}, stream=stream
    )
    return stream


def objects(stream: io.StringIO) -> list[dict[str, Any]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_a_record_has_its_event_and_its_fields() -> None:
    stream = opened({"trace_id": "ab"})
    logger.info("adapter ready slot=%d digest=%s time_s=%.1f", 3, "abc", 0.25)
    logger.warning("session ended worker_id=%s: %s", "w", "gone")
    first, second = objects(stream)
    assert first.pop("time").endswith("+00:00")
    assert first == {
        "level": "info",
        "logger": "motet.test_json_log",
        "process": "worker",
        "event": "adapter ready",
        "message": "adapter ready slot=3 digest=abc time_s=0.2",
        "fields": {"slot": 3, "digest": "abc", "time_s": 0.25},
        "trace_id": "ab",
    }
    assert second["event"] == "session ended" and second["fields"] == {"worker_id": "w"}


@pytest.mark.parametrize(
    ("message", "values", "event"),
    [
        ("settings %s", ("model_dir=/m listen=:1",), "settings ..."),
        ("metrics at http://%s/metrics", ("127.0.0.1:9400",), "metrics at http://.../metrics"),
        ("adapter load failed: %s", ("no room",), "adapter load failed: ..."),
        ("%s: adapters are slower", ("no Redis",), "...: adapters are slower"),
        ("half of it, 50% of all", (), "half of it, 50% of all"),
        ("%d%% of it name=%s", (50, "x"), "...% of it"),
    ],
)
def test_an_event_is_the_same_text_whatever_the_values(message: str, values: tuple[str, ...], event: str) -> None:
    stream = opened()
    logger.info(message, *values)
    (line,) = objects(stream)
    assert line["event"] == event


def test_an_error_has_its_traceback_on_the_same_line() -> None:
    stream = opened()
    try:
        raise ValueError("first\nsecond")
    except ValueError:
        logger.exception("failed")
    (line,) = objects(stream)
    assert line["event"] == "failed" and "ValueError: first\nsecond" in line["exception"]


@settings(max_examples=200, deadline=None)
@given(st.text())
def test_text_of_a_client_makes_no_further_line_and_no_further_field(text: str) -> None:
    stream = opened()
    logger.info("refused name=%s", text)
    lines = stream.getvalue().split("\n")
    assert len(lines) == 2 and lines[1] == ""
    assert set(json.loads(lines[0])) == {"time", "level", "logger", "process", "event", "message", "fields"}


def test_a_line_of_text_stays_one_line() -> None:
    stream = opened({"trace_id": "ab"}, log_format="text")
    logger.info("refused name=%s", "a\nERROR forged\rline")
    (line,) = stream.getvalue().splitlines()
    assert line.endswith(r"refused name=a\nERROR forged\rline trace_id=ab")


def test_secrets_are_hidden_in_every_value() -> None:
    stream = opened()
    logger.info("connect password=%s url=%s", "hunter2hunter2", "redis://user:hunter2hunter2@host/0")
    text = stream.getvalue()
    assert "hunter2hunter2" not in text and json.loads(text)["event"] == "connect"


@pytest.mark.parametrize(
    ("message", "arguments", "shown"),
    [
        ("100% of it", (), "100% of it"),
        ("100%% of %d", (3,), "100% of 3"),
        ("%s of %s", (1, 2), "1 of 2"),
        ("a=%(a)s", ({"a": 1},), "a=1"),
    ],
)
def test_messages_of_other_packages_are_taken_as_they_are(message: str, arguments: tuple[Any, ...], shown: str) -> None:
    stream = opened()
    logger.info(message, *arguments)
    (line,) = objects(stream)
    assert line["message"] == shown
