"""gRPC reads connections in the way that the gateway chooses, however the gateway is started."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from gateway.polling import SETTING, VARIABLE, choose
from tests.gateway.gateway_process import Gateway

ROUND_TRIP = """
import asyncio
from gateway import polling
assert polling.choose()
import grpc.aio

async def main():
    async with grpc.aio.insecure_channel("127.0.0.1:1") as channel:
        try:
            await channel.unary_unary("/a/b")(b"", timeout=20)
        except grpc.aio.AioRpcError as error:
            print(error.code().name)

asyncio.run(main())
"""


def test_the_choice_of_the_environment_is_kept() -> None:
    environ: dict[str, str] = {}
    assert choose(environ) and environ == {VARIABLE: SETTING}
    assert not choose(environ)
    environ = {VARIABLE: "other"}
    assert not choose(environ) and environ == {VARIABLE: "other"}


def test_this_release_of_grpc_knows_the_setting() -> None:
    """It would write a line about an unknown one, and read connections in its own way."""
    environment = {name: value for name, value in os.environ.items() if name != VARIABLE}
    done = subprocess.run(
        [sys.executable, "-c", ROUND_TRIP], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout == "UNAVAILABLE\n" and "xperiment" not in done.stderr


def test_a_gateway_begins_again_with_the_setting(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`motet gateway` has loaded gRPC before the choice is made. The process id stays, for those that watch it."""
    monkeypatch.delenv(VARIABLE, raising=False)
    with Gateway("127.0.0.1:1", tmp_path_factory.mktemp("gateway")) as gateway:
        process = Path(f"/proc/{gateway.process.pid}")
        environment = (process / "environ").read_text().split("\0")
        command = (process / "cmdline").read_text().split("\0")
    assert f"{VARIABLE}={SETTING}" in environment
    assert command[1:4] == ["-P", "-m", "gateway"]
