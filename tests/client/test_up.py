"""`motet up` over small stand-ins for the server processes."""

from __future__ import annotations

import asyncio
import json
import os
import select
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from motet import InvalidArgument
from motet.cli import server_parts
from motet.cli.supervisor import FIRST_RESTART_S, STEADY_S, Supervisor, describe
from motet.cli.up import Side, run_up

from tests.client.up_stage import Naps, Stage, is_alive, when_printed, when_reported
from tests.control_plane.server_processes import checkpoint


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    made = Stage(tmp_path)
    yield made
    for pid in made.pids("control-started") + made.pids("worker-started"):
        assert not is_alive(pid), "a child was left behind"


async def test_both_start_and_stop_in_order(stage: Stage, capsys: pytest.CaptureFixture[str]) -> None:
    run = asyncio.create_task(stage.supervisor().run())
    reported = await when_printed(capsys, "motet ready")
    assert "motet ready: clients at 127.0.0.1:7001, worker w0 attached to 127.0.0.1:7002\n" in reported
    os.kill(os.getpid(), signal.SIGINT)
    assert await asyncio.wait_for(run, 30) == 0
    assert stage.words() == ["control-started", "worker-started", "control-stopped", "worker-stopped"]
    assert stage.reported()[1][2:] == ["127.0.0.1:7002"]


async def test_a_gateway_starts_beside_them_and_stops_first(
    stage: Stage, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [0.0]
    secrets = {
        "AWS_SECRET_ACCESS_KEY": "planted",
        "HF_TOKEN": "planted",
        "MOTET_REDIS_URL": "redis://motet:planted@127.0.0.1:6379/0",
    }
    for name, value in {**secrets, "MOTET_LOG_LEVEL": "info"}.items():
        monkeypatch.setenv(name, value)
    supervisor = stage.supervisor(
        gateway_command=lambda address: [*stage.command("gateway.py"), address],
        sleep=Naps(2, clock),
        clock=lambda: clock[0],
    )
    run = asyncio.create_task(supervisor.run())
    await when_printed(capsys, "motet ready: HTTP at 127.0.0.1:7003\n")
    await when_reported(stage, "worker-started")
    [gateway] = stage.pids("gateway-started")
    os.kill(gateway, signal.SIGKILL)
    await when_printed(capsys, "the gateway is at 127.0.0.1:7003 again\n")
    os.kill(os.getpid(), signal.SIGINT)
    assert await asyncio.wait_for(run, 30) == 0
    assert stage.words()[-3:] == ["gateway-stopped", "control-stopped", "worker-stopped"]
    started = [line for line in stage.reported() if line[0] == "gateway-started"]
    assert [line[2:] for line in started] == [["127.0.0.1:7001"]] * 2
    [environment] = [set(line[2:]) for line in stage.reported() if line[0] == "gateway-stopped"]
    assert "MOTET_LOG_LEVEL" in environment and not environment & secrets.keys()


async def test_a_gateway_that_never_gets_ready_ends_everything(
    stage: Stage, capsys: pytest.CaptureFixture[str]
) -> None:
    supervisor = stage.supervisor(gateway_command=lambda address: [*stage.command("gateway.py", "broken"), address])
    assert await asyncio.wait_for(supervisor.run(), 30) == 1
    assert "the gateway did not start (exit code 3)" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--http", "8000"], "--http: '8000' is not HOST:PORT"),
        (["--http", "0.0.0.0:8000"], "--http: 0.0.0.0:8000 is reached by other machines and has no TLS"),
        (["--http", "--http-processes", "0"], "--http-processes: 0 is below 1"),
        (["--http", "--http-processes", "1000"], "--http-processes: 1000 is above 64"),
        (["--http-processes", "2"], "--http-processes: is for a gateway; give --http, too"),
        (["--http", "--tls-cert", "x"], "--http: is for a system without TLS"),
    ],
)
def test_an_address_of_the_gateway_that_cannot_be_used_ends_before_anything_starts(
    stage: Stage, capsys: pytest.CaptureFixture[str], argv: list[str], said: str
) -> None:
    both = (Side(declare("--tls-cert"), stage.command("control.py")), Side(declare(), stage.command("worker.py")))
    with pytest.raises(SystemExit) as caught:
        run_up(argv, sides=both)
    assert caught.value.code == 2 and stage.words() == []
    assert capsys.readouterr().err.startswith(f"motet up: {said}")


async def test_worker_that_dies_is_started_again_with_growing_delays(
    stage: Stage, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = [0.0]
    naps = Naps(4, clock)

    async def sleep(seconds: float) -> None:
        await naps(seconds)

    run = asyncio.create_task(stage.supervisor(sleep=sleep, clock=lambda: clock[0]).run())
    reported = await when_printed(capsys, "motet ready")
    for number in range(4):
        if number == 2:
            clock[0] += STEADY_S  # this one ran long enough to be trusted again
        os.kill(stage.pids("worker-started")[number], signal.SIGKILL)
        if number < 3:
            reported += await when_printed(capsys, "worker w0 attached again")
    assert await asyncio.wait_for(run, 30) == 0
    first = FIRST_RESTART_S
    assert naps.seconds == [first, 2 * first, first, 2 * first]
    assert "the worker ended with SIGKILL; starting it again in 0.5 s" in reported


async def test_worker_that_never_gets_ready_ends_everything(stage: Stage, capsys: pytest.CaptureFixture[str]) -> None:
    assert await asyncio.wait_for(stage.supervisor(worker="broken").run(), 30) == 1
    assert stage.words() == ["control-started", "worker-started", "control-stopped"]
    captured = capsys.readouterr()
    assert captured.out == ""
    last = captured.err.splitlines()[-1]
    assert last == "motet up: the worker did not start (exit code 3); the reason is above"


async def test_control_plane_that_cannot_start_ends_everything(
    stage: Stage, capsys: pytest.CaptureFixture[str]
) -> None:
    assert await asyncio.wait_for(stage.supervisor(control="broken").run(), 30) == 1
    assert stage.words() == ["control-started"]
    last = capsys.readouterr().err.splitlines()[-1]
    assert last == "motet up: the control plane did not start (exit code 1); the reason is above"


async def test_child_that_refuses_its_command_line_gives_its_exit_code(stage: Stage) -> None:
    assert await asyncio.wait_for(stage.supervisor(control="misused").run(), 30) == 2


async def test_end_of_the_control_plane_ends_the_worker(stage: Stage, capsys: pytest.CaptureFixture[str]) -> None:
    run = asyncio.create_task(stage.supervisor().run())
    await when_printed(capsys, "motet ready")
    os.kill(stage.pids("control-started")[0], signal.SIGKILL)
    assert await asyncio.wait_for(run, 30) == 1
    assert stage.words() == ["control-started", "worker-started", "worker-stopped"]
    assert "the control plane ended with SIGKILL" in capsys.readouterr().err


async def test_worker_that_ignores_sigterm_is_killed(stage: Stage, capsys: pytest.CaptureFixture[str]) -> None:
    run = asyncio.create_task(stage.supervisor(worker="stubborn", worker_stop_s=0.2).run())
    await when_printed(capsys, "motet ready")
    os.kill(os.getpid(), signal.SIGTERM)
    assert await asyncio.wait_for(run, 30) == 0
    assert stage.words()[-1] == "worker-stopped", "it was requested first"


def declare(*flags: str) -> Any:
    def add_arguments(parser: Any) -> None:
        for flag in flags:
            if flag == "--no-reflection":
                parser.add_argument(flag, action="store_true", help="a switch")
            else:
                parser.add_argument(flag, default=None, help=f"about {flag}")

    return add_arguments


def sides(stage: Stage) -> tuple[Side, Side]:
    return (
        Side(declare("--model", "--listen", "--no-reflection"), stage.command("control.py", "broken")),
        Side(declare("--model", "--control-plane", "--threads"), stage.command("worker.py")),
    )


def test_flags_reach_the_side_that_knows_them(stage: Stage) -> None:
    argv = ["--threads", "2", "--model=m", "--no-reflection", "--listen", "127.0.0.1:0"]
    assert run_up(argv, sides=sides(stage)) == 1
    assert stage.reported()[0][2:] == ["--model=m", "--no-reflection", "--listen", "127.0.0.1:0"]


def test_checkpoint_may_be_the_first_word(stage: Stage) -> None:
    assert run_up(["m", "--listen", "127.0.0.1:0"], sides=sides(stage)) == 1
    assert stage.reported()[0][2:] == ["--model", "m", "--listen", "127.0.0.1:0"]


@pytest.mark.parametrize("flags", [["--log-format", "json", "--log-level=debug"], ["--log-level", "warning"], []])
def test_flags_of_the_log_reach_the_gateway_too(
    flags: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[Any] = []

    class Started(Supervisor):
        def __init__(self, **settings: Any) -> None:
            started.append(settings)
            super().__init__(**settings)

        async def run(self) -> int:
            return 0

    monkeypatch.setattr("motet.cli.supervisor.Supervisor", Started)
    assert run_up([str(checkpoint(tmp_path / "model")), "--http", "127.0.0.1:0", *flags]) == 0
    [settings] = started
    gateway = settings["gateway_command"]("127.0.0.1:1")
    assert gateway[len(gateway) - len(flags) :] == flags
    for command in (settings["control_command"], settings["worker_command"]("127.0.0.1:2")):
        assert command[len(command) - len(flags) :] == flags
    assert settings["log_format"] == ("json" if "json" in flags else "text")


async def test_its_own_lines_are_json_where_those_of_the_parts_are(
    stage: Stage, capsys: pytest.CaptureFixture[str]
) -> None:
    running = asyncio.create_task(stage.supervisor(log_format="json").run())
    await when_printed(capsys, "motet ready")
    os.kill(stage.pids("worker-started")[0], signal.SIGKILL)
    said = await when_printed(capsys, "the worker ended with SIGKILL")
    os.kill(os.getpid(), signal.SIGTERM)
    assert await asyncio.wait_for(running, 30) == 0
    said += capsys.readouterr().err
    lines = [json.loads(line) for line in said.splitlines() if not line.startswith("motet ready")]
    assert {line["process"] for line in lines} == {"motet up"}
    assert lines[-1]["message"] == "stopping; once more to stop at once"


@pytest.mark.parametrize("flags", [["--model", "n"], ["--model=n"]])
def test_checkpoint_given_twice_is_refused_before_anything_starts(stage: Stage, flags: list[str]) -> None:
    with pytest.raises(InvalidArgument, match=r"DIR: m is given beside --model; give the checkpoint directory once"):
        run_up(["m", *flags], sides=sides(stage))
    assert stage.words() == []


def test_value_that_a_side_refuses_ends_before_anything_starts(
    stage: Stage, capsys: pytest.CaptureFixture[str]
) -> None:
    def find_mistake(arguments: Any) -> str | None:
        return f"--threads: {arguments.threads} is below 1" if arguments.threads == "0" else None

    control, worker = sides(stage)
    picky = replace(worker, find_mistake=find_mistake)
    with pytest.raises(SystemExit) as caught:
        run_up(["--threads", "0"], sides=(control, picky))
    assert caught.value.code == 2 and stage.words() == []
    assert capsys.readouterr().err == "motet up: --threads: 0 is below 1\n"
    assert run_up(["--threads", "1"], sides=(control, picky)) == 1, "the stand-in of the control plane fails"


@pytest.mark.parametrize(
    ("argv", "reason"),
    [
        (["--model", "none"], "--model: there is no directory none; give"),
        (["--model", "model", "--max-rows", "0"], "--max-rows: 0 is below 1"),
        (["--model", "model", "--device", "gpu"], "--device: 'gpu' is not valid: use one of auto, cpu, cuda"),
        (["--model", "model", "--plan-depth", "0"], "--plan-depth: 0 is below 1"),
        (["--model", "model", "--control-plane", "a:1"], "unrecognized arguments: --control-plane a:1"),
    ],
)
def test_values_of_both_real_sides_are_checked_first_and_returned_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], argv: list[str], reason: str
) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as caught:
        run_up(argv)
    assert caught.value.code == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.startswith(f"motet up: {reason}") and captured.err.count("\n") == 1


@pytest.mark.parametrize("argv", [["--nonsense"], ["--control-plane", "a:1"], ["--mod", "x"]])
def test_unknown_flags_are_refused_before_anything_starts(stage: Stage, argv: list[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        run_up(argv, sides=sides(stage))
    assert caught.value.code == 2 and stage.words() == []


def test_help_shows_both_sides(stage: Stage, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        run_up(["--help"], sides=sides(stage))
    text = capsys.readouterr().out
    assert text.count("about --model") == 1
    assert text.index("control plane and worker:") < text.index("about --listen") < text.index("about --threads")
    assert "--control-plane" not in text


def test_no_orphan_stays_when_the_supervisor_is_killed(stage: Stage) -> None:
    program = f"""
        import asyncio, os
        from motet.cli.supervisor import Supervisor
        supervisor = Supervisor(
            control_command={stage.command("control.py")!r},
            worker_command=lambda address: {stage.command("worker.py")!r},
            environment=dict(os.environ), drain_timeout_s=20.0,
        )
        asyncio.run(supervisor.run())
    """
    with subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(program)],
        env=server_parts.child_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("motet ready")
        children = [os.pidfd_open(pid) for pid in stage.pids("control-started") + stage.pids("worker-started")]
        process.kill()
        for child in children:
            assert select.select([child], [], [], 30)[0], "readable once the process has ended"
            os.close(child)
    assert sorted(stage.words()[2:]) == ["control-stopped", "worker-stopped"]


def test_client_without_the_server_says_how_to_install_the_server() -> None:
    with pytest.raises(
        server_parts.ServerPartMissing, match=r"pip install 'motet\[server\]', or run `make setup` in a"
    ):
        server_parts.load("no_such_part.config")


def test_exit_codes_are_described() -> None:
    assert (describe(3), describe(-9)) == ("exit code 3", "SIGKILL")
