"""The scan finds a secret that leaks, in whatever is captured, and lets the test fail in which it leaked."""

from __future__ import annotations

import base64
import subprocess
import sys
import textwrap
from pathlib import Path
from urllib.parse import quote

import pytest

from tests.secret_scan import API_KEY, METADATA, SecretScan

ROOT = Path(__file__).resolve().parents[1]
LEAKS = """
    import logging, pytest
    from tests.secret_scan import API_KEY, JWT, SCAN
    logger = logging.getLogger("motet.leaky")

    def test_clean():
        logger.warning("nothing to see")

    def test_log():
        logger.warning("key=%s", API_KEY)

    def test_traceback():
        try:
            raise ValueError(f"of {JWT}")
        except ValueError:
            logger.exception("failed")

    def test_output():
        print("token", JWT)

    def test_status():
        SCAN.look("the status", f"error: {API_KEY}")

    @pytest.fixture(scope="module")
    def process():
        yield
        SCAN.look("the output of a process", API_KEY.encode())

    def test_process(process):
        pass
"""


@pytest.mark.parametrize("form", [str, lambda text: quote(text, safe=""), lambda text: base64.b64encode(text.encode())])
def test_a_secret_is_found_in_every_form_and_its_value_is_not_shown(form: object) -> None:
    assert callable(form)
    scan = SecretScan()
    value = scan.plant("password", "p@ssw:rd/of-the-store")
    scan.look("the log", b"before " + bytes(str(form(value)), "ascii") + b" after")
    (leak,) = scan.take_leaks()
    assert leak.secret == "password" and leak.source == "the log" and value not in str(leak) and "after" in str(leak)
    assert scan.take_leaks() == []


def test_files_and_arguments_are_searched(tmp_path: Path) -> None:
    scan = SecretScan()
    value = scan.plant("password")
    (tmp_path / "worker.log").write_text(f"url={value}")
    scan.look_at_files("the log of", tmp_path.glob("*.log"))
    program = "print(flush=True); input()"
    command = [sys.executable, "-c", program, value]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline()  # its arguments are not there before it runs
        scan.look_at_arguments(process.pid)
        process.communicate(b"\n")
    assert [leak.source.split()[0] for leak in scan.take_leaks()] == ["the", "arguments"]


def test_a_short_value_is_not_planted() -> None:
    with pytest.raises(AssertionError):
        SecretScan().plant("password", "pw")


def test_a_leak_made_on_purpose_fails_the_test_in_which_it_happened(tmp_path: Path) -> None:
    """A run of its own with this suite's conftest, whose tests pass but for the scan."""
    folder = ROOT / "tests"
    (tmp_path / "conftest.py").write_text((folder / "conftest.py").read_text(encoding="utf-8"))
    (tmp_path / "test_leaks.py").write_text(textwrap.dedent(LEAKS))
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", f"--rootdir={tmp_path}"]
    command += ["-c", str(ROOT / "pyproject.toml"), str(tmp_path / "test_leaks.py")]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=120)
    summary = [line for line in ended.stdout.splitlines() if line.startswith("ERROR ") and "::" in line]
    found = {line.partition("::")[2].split(" ")[0] for line in summary}
    assert found == {"test_log", "test_traceback", "test_output", "test_status", "test_process"}, ended.stdout
    assert "API key in the status" in ended.stdout and "API key in the output of a process" in ended.stdout
    assert ended.returncode == 1


def test_what_is_planted_has_the_form_that_the_product_knows() -> None:
    assert len(API_KEY.rpartition("_")[2]) == 43 and METADATA[0][1].startswith("Bearer eyJ")
