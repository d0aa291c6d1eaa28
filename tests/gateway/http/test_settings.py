"""What a gateway refuses to start with."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import pytest

from gateway.http.settings import HttpSettings, split_address
from gateway.main import main


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"listen": "8000"}, "--listen: '8000' is not HOST:PORT"),
        ({"listen": "127.0.0.1:70000"}, "not HOST:PORT"),
        ({"listen": "0.0.0.0:8000"}, "--listen: 0.0.0.0:8000 is reached by other machines and has no TLS"),
        ({"listen": "127.example.org:8000"}, "--listen: 127.example.org:8000 is reached by other machines"),
        ({"server": "127.0.0.1"}, "--server:"),
        ({"server": "10.0.0.1:50051"}, "--server: keys would be sent in plaintext to 10.0.0.1:50051"),
        ({"tls_cert": Path("cert.pem")}, "--tls-cert and --tls-key: give both"),
        ({"server_tls_cert": Path("cert.pem")}, "--server-tls-cert: needs --server-tls-ca"),
        ({"max_body_bytes": 10}, "--max-body-bytes: 10 is below 1024"),
        ({"log_level": "loud"}, "--log-level"),
    ],
)
def test_a_setting_that_cannot_be_is_refused_with_its_flag(settings: dict[str, object], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        HttpSettings(**settings)  # type: ignore[arg-type]  # of the right types, by the table


def test_what_other_machines_reach_needs_tls_or_the_operators_word() -> None:
    HttpSettings(listen="0.0.0.0:1", insecure=True, server="10.0.0.1:2")
    HttpSettings(listen="0.0.0.0:1", tls_cert=Path("c"), tls_key=Path("k"))
    assert split_address("[::1]:80") == ("::1", 80)


def test_a_wrong_command_line_is_refused_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--listen", "0.0.0.0:0"])
    assert ended.value.code == 2
    assert capsys.readouterr().err.startswith("motet gateway: --listen: 0.0.0.0:0 is reached by other machines")


def test_a_port_in_use_is_said_in_one_line() -> None:
    """In a process of its own: the command sets up the log of the whole process."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        done = subprocess.run(
            [sys.executable, "-m", "gateway", "--listen", address, "--log-level", "error"],
            capture_output=True,
            text=True,
            check=False,
        )
    assert done.returncode == 1
    assert done.stderr.startswith("motet gateway: "), done.stderr
    assert done.stderr.count("\n") == 1
