"""What a terminal shows of a server's log, and what a file gets."""

from __future__ import annotations

import io
import logging
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest

from contract import process_log
from contract.process_log import PROGRESS_EVERY_S, Progress, printable, settings_line, shown

logger = logging.getLogger("motet.test_process_log")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def restored_logging(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("NO_COLOR", "1")
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    packages = [logging.getLogger(name) for name in ("contract", "control_plane", "data_plane", "kernels", "motet")]
    levels = [package.level for package in packages]
    root.handlers = []  # pytest's own are not ours to close
    hooks = sys.excepthook, threading.excepthook
    yield
    sys.excepthook, threading.excepthook = hooks
    root.handlers = handlers
    for each, former in zip([root, *packages], [level, *levels], strict=True):
        each.setLevel(former)


def written(stream: io.StringIO, act: Callable[[], None], level: str = "info") -> list[str]:
    process_log.configure_logging(level, process="worker", stream=stream)
    act()
    return stream.getvalue().splitlines()


def act() -> None:
    logger.debug("detail n=%d", 1)
    logger.info("blocks n=%d", 2)
    logger.info("ready n=%d", 3, extra=shown("ready for 3 things"))
    logger.warning("session ended reason=%s", "gone")
    logging.getLogger("motet.audit").info("verb=upload")


def test_terminal_shows_sentences_warnings_and_the_audit_log() -> None:
    lines = written(Terminal(), act)
    assert [re.sub(r"^\d\d:\d\d:\d\d ", "", line) for line in lines] == [
        "worker        ready for 3 things",
        "worker        warning: session ended reason=gone",
        "worker        verb=upload",
    ]


def test_terminal_at_debug_shows_everything() -> None:
    lines = written(Terminal(), act, "debug")
    assert len(lines) == 5 and lines[0].endswith("worker        detail n=1")


def test_debug_lines_of_other_packages_are_left_out() -> None:
    """Those of clients of stores have paths with credentials, headers and signatures."""

    def log() -> None:
        for name in ("redis.client", "control_plane.registry"):
            logging.getLogger(name).debug("detail of %s", name)
        logging.getLogger("redis.client").info("started")

    lines = written(io.StringIO(), log, "debug")
    assert [line.partition(": ")[2] for line in lines] == ["detail of control_plane.registry", "started"]
    lines = written(io.StringIO(), log, "warning")
    assert not lines


def test_file_gets_every_record_as_keys_and_values() -> None:
    lines = written(io.StringIO(), act)
    assert [line.partition(",")[2][4:] for line in lines] == [
        "INFO motet.test_process_log: blocks n=2",
        "INFO motet.test_process_log: ready n=3",
        "WARNING motet.test_process_log: session ended reason=gone",
        "INFO motet.audit: verb=upload",
    ]


def test_terminal_at_error_keeps_the_audit_log() -> None:
    assert [line.rpartition(" ")[2] for line in written(Terminal(), act, "error")] == ["verb=upload"]


def test_terminal_shows_tracebacks_and_colours_what_needs_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR")
    monkeypatch.setenv("TERM", "xterm")

    def fail() -> None:
        try:
            raise ValueError("why")
        except ValueError:
            logger.exception("failed")

    text = "\n".join(written(Terminal(), fail))
    assert "\x1b[31merror: failed\x1b[0m\nTraceback" in text and "ValueError: why" in text


@pytest.mark.parametrize("stream", [Terminal, io.StringIO])
def test_what_has_the_form_of_a_secret_is_hidden_in_messages_arguments_and_tracebacks(
    stream: type[io.StringIO],
) -> None:
    def leak() -> None:
        logger.warning("url=%s", "redis://me:planted@host")
        try:
            raise ValueError("no route to redis://me:planted@host, header Bearer planted")
        except ValueError:
            logger.exception("failed", extra=shown("failed at https://planted@host"))

    text = "\n".join(written(stream(), leak))
    assert "planted" not in text and "redis://***@host, header Bearer ***" in text and text.count("***") >= 3


def test_errors_that_nobody_caught_are_logged_and_not_printed() -> None:
    """By the interpreter they were printed as they are."""
    program = """if True:
        import sys, threading
        from contract.process_log import configure_logging
        configure_logging("info", process="worker")
        def fail(where):
            raise RuntimeError(f"{where} redis://me:planted@host")
        thread = threading.Thread(target=fail, args=("in a thread",))
        thread.start()
        thread.join()
        fail("in the main thread")
    """
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=60)
    assert ended.returncode == 1
    for where in ("in a thread", "in the main thread"):
        assert f"RuntimeError: {where} redis://***@host" in ended.stderr
    assert "planted" not in ended.stderr


def test_progress_is_logged_now_and_then_and_not_at_the_end() -> None:
    now_s = 0.0
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append  # type: ignore[assignment, method-assign]
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        progress = Progress(logger, "loading weights", 10, clock=lambda: now_s)
        for _ in range(10):
            now_s += PROGRESS_EVERY_S * 0.4
            progress.advance()
    finally:
        logger.removeHandler(handler)
    assert [record.getMessage() for record in records] == [
        "loading weights done=3 total=10",
        "loading weights done=6 total=10",
        "loading weights done=9 total=10",
    ]
    assert next(vars(record)["shown"] for record in records) == "loading weights: 30%"


def test_settings_line_leaves_defaults_out() -> None:
    @dataclass
    class Config:
        model: str
        rows: int = 4
        url: str | None = None

    config = Config("m", url="secret")
    assert settings_line(config, only_changed=True, show=lambda value: str(value).upper()) == "model=M url=SECRET"
    assert settings_line(config, only_changed=False) == "model=m rows=4 url=secret"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain: ~é中", "plain: ~é中"),
        ("a\nb\r\tc\0", r"a\nb\r\tc\x00"),
        ("\x1b[31m\u2028\u202e\u200b", r"\x1b[31m\u2028\u202e\u200b"),
        ("", ""),
    ],
)
def test_what_does_not_print_is_escaped(text: str, shown: str) -> None:
    assert printable(text) == shown


def test_a_secret_is_hidden_before_a_long_text_is_cut_off() -> None:
    key = "motet_k1_" + "A" * 43
    assert printable(f"operations/{key}", 40) == "operations/motet_k1_***"
    assert printable(f"{'x' * 20}/{key}{'.' * 100}", 40) == f"{'x' * 20}/motet_k1_***{'.' * 7}… (173 characters)"


def test_what_is_long_is_cut_off_and_says_so() -> None:
    assert printable("x" * 300) == "x" * 300
    assert printable("x" * 301) == "x" * 300 + "… (301 characters)"
    assert printable("\n" * 70, 63) == r"\n" * 63 + "… (70 characters)"
