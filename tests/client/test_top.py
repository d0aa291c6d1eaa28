"""`motet top`: rates between two looks, what a frame has, and whom it is shown."""

from __future__ import annotations

import argparse
import builtins
from collections.abc import Iterator
from typing import Any

import pytest
from motet import Client, Unavailable
from motet.cli import exits
from motet.cli.context import server_option
from motet.cli.live.frame import frame, room_of
from motet.cli.live.rates import rates_of
from motet.cli.live.top import add_parser, run_top
from motet.cli.main import main
from rich.console import Console
from rich.live import Live

from tests.client.scripted_server import ScriptedServer

Capture = pytest.CaptureFixture[str]
DIGEST = "ab" * 32


class Time:
    """A clock that moves while somebody sleeps. `server` goes on meanwhile."""

    def __init__(self, server: ScriptedServer, looks: int = 1) -> None:
        self.now_s = 0.0
        self._server = server
        self._looks = looks

    def clock(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        if not self._looks:
            raise KeyboardInterrupt
        self._looks -= 1
        self.now_s += seconds
        status = self._server.status
        for worker in status.workers:
            worker.num_tokens_sampled += 500
            worker.num_steps += 10
        for tenant in status.tenants:
            tenant.num_generated_tokens += 250
        status.queues.num_finished += 5


def top(server: ScriptedServer, time: Time, *flags: str) -> int:
    parser = argparse.ArgumentParser(parents=[server_option(is_top=True)])
    add_parser(parser.add_subparsers())
    arguments = parser.parse_args(["--server", server.target, "top", *flags])
    return run_top(arguments, clock=time.clock, sleep=time.sleep)


@pytest.fixture
def busy(server: ScriptedServer) -> Iterator[ScriptedServer]:
    status = server.status
    status.workers.add(worker_id="w0", device="cpu", epoch=1, num_running=6, num_blocks=8, num_blocks_held=4)
    status.workers.add(worker_id="w1", device="cpu", epoch=2, step_time_ms=2.5, num_adapters_loaded=3)
    status.drained_worker_ids.append("w1")
    status.queues.num_running = 6
    status.active_adapters.add(adapter="[red]pirate", digest=DIGEST, num_running=3, num_waiting=9)
    status.active_adapters.add(num_running=2)
    status.active_adapters.add(digest="cd" * 32, num_running=1)
    status.num_other_active_adapters = 4
    status.tenants.add(tenant="acme", num_requests=7)
    return server


def lines_with(output: str, word: str) -> list[list[str]]:
    return [line.split() for line in output.splitlines() if word in line]


def test_a_frame_has_workers_batches_tiers_tenants_and_their_rates(busy: ScriptedServer, capsys: Capture) -> None:
    assert top(busy, Time(busy), "--once", "--interval-s", "5") == exits.OK
    output = capsys.readouterr().out
    assert "200 tokens/s  0.0 accepted/s  1.0 finished/s  0.0 rejected/s  6 running" in output
    assert "2 workers  1 drained" in output
    assert lines_with(output, "w0")[0][:7] == ["w0", "cpu", "6", "0", "100", "2.0", "0.0"]
    assert lines_with(output, "w1")[0][:4] == ["w1", "drained", "cpu", "0"]
    assert lines_with(output, "pirate") == [["[red]pirate", DIGEST[:12], "3", "50%", "9"]], "no markup of rich"
    assert lines_with(output, "(base model)") == [["(base", "model)", "2", "33%", "0"]]
    assert lines_with(output, "(no name)")[0][2] == "cdcdcdcdcdcd"
    assert "and 4 more" in output
    assert lines_with(output, "acme") == [["acme", "7", "0", "50", "0"]]
    assert [line[0] for line in lines_with(output, "B ") if line[0] in ("host", "arenas")] == ["host", "arenas"]


def test_frames_come_until_the_user_interrupts(busy: ScriptedServer, capsys: Capture) -> None:
    with pytest.raises(KeyboardInterrupt):
        top(busy, Time(busy, looks=3))
    assert capsys.readouterr().out.count("tokens/s  0.0 accepted/s") == 3


def test_a_server_that_is_away_for_a_while_is_waited_for(
    busy: ScriptedServer, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks, status = iter([True, True, False, True]), Client.status

    def look(client: Client) -> Any:
        if next(looks):
            return status(client)
        raise Unavailable("no Motet server responds")

    monkeypatch.setattr(Client, "status", look)
    with pytest.raises(KeyboardInterrupt):
        top(busy, Time(busy, looks=3))
    output = capsys.readouterr().out
    assert output.count("tokens/s  0.0 accepted/s") == 2
    assert output.count("no Motet server responds\ntrying again until Ctrl-C") == 1


def test_once_ends_with_the_error_of_a_server_that_went_away(
    busy: ScriptedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks, status = iter([True, False]), Client.status

    def look(client: Client) -> Any:
        if next(looks):
            return status(client)
        raise Unavailable("no Motet server responds")

    monkeypatch.setattr(Client, "status", look)
    with pytest.raises(Unavailable):
        top(busy, Time(busy, looks=1), "--once")


def test_what_began_between_two_looks_has_no_rate(busy: ScriptedServer, capsys: Capture) -> None:
    class Restarting(Time):
        def sleep(self, seconds: float) -> None:
            super().sleep(seconds)
            busy.status.workers[0].epoch = 9
            busy.status.workers[0].num_tokens_sampled = 3
            busy.status.tenants.add(tenant="new", num_generated_tokens=1000)

    assert top(busy, Restarting(busy), "--once") == exits.OK
    output = capsys.readouterr().out
    assert lines_with(output, "w0")[0][4:6] == ["-", "-"]
    assert lines_with(output, "new ")[0] == ["new", "0", "0", "-", "0"]


@pytest.mark.parametrize(("width", "height"), [(80, 24), (100, 30), (200, 60)])
@pytest.mark.parametrize("is_drained", [True, False])
def test_a_frame_fits_into_a_terminal_with_whole_words(
    busy: ScriptedServer, width: int, height: int, is_drained: bool
) -> None:
    status = busy.status
    for number in range(40):
        status.workers.add(worker_id=f"gpu-{number}", device="NVIDIA H100 80GB HBM3", resident_bytes=5 << 30)
        status.active_adapters.add(adapter="long-" * 12 + f"{number:02}", digest=f"{number:064x}", num_running=1)
        status.tenants.add(tenant=f"名前-{number}-" + "x" * 50, num_requests=1)
    if not is_drained:
        del status.drained_worker_ids[:]
    screen = Live(console=Console(width=width, height=height, force_terminal=True), screen=True)
    with Client(busy.target) as client:
        seen = client.status()
    console = Console(width=width, highlight=False)
    with console.capture() as captured:
        console.print(frame(seen, rates_of(seen, seen, 1.0), room_of(screen)))
    lines = captured.get().splitlines()
    assert len(lines) <= height, "the tenants at the end are there"
    headings = [line.split() for line in lines]
    for first, others in {
        "WORKER": ["RUNNING", "WAITING", "TOKENS/S"],
        "ADAPTER": ["RUNNING", "WAITING"],
        "TIER": ["ADAPTERS", "USED", "ROOM"],
        "TENANT": ["REQUESTS", "QUEUED", "TOKENS", "TOKENS/S", "REJECTED"],
    }.items():
        (found,) = (words for words in headings if words[:1] == [first])
        assert [word for word in others if word not in found] == []
        assert not any("…" in word for word in found), "a heading is whole or left out"
    assert ("PREFIX HITS" in captured.get()) == (width == 200)


def test_a_terminal_shows_as_many_rows_as_fit(
    busy: ScriptedServer, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown: list[Any] = []
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setattr(Live, "update", lambda _live, frame, *, refresh: shown.append(frame))
    for number in range(40):
        busy.status.active_adapters.add(adapter=f"a{number}", digest=f"{number:064x}", num_running=1)
    with pytest.raises(KeyboardInterrupt):
        top(busy, Time(busy, looks=2))
    assert len(shown) == 2
    tables = {str(part.title): part for part in shown[0].renderables if hasattr(part, "title")}
    batch = tables["requests by adapter"]
    assert 1 <= batch.row_count < 43
    assert batch.caption == f"and {4 + 43 - batch.row_count} more"


def test_without_the_role_admin_the_own_tenant_is_shown(server: ScriptedServer, capsys: Capture) -> None:
    server.status.own_tenant_only = True
    server.status.tenants.add(tenant="acme", num_requests=7)
    assert top(server, Time(server), "--once") == exits.OK
    output = capsys.readouterr().out
    assert "acme" in output and "role admin" in output and "WORKER" not in output


def test_without_rich_the_command_says_what_to_install(
    server: ScriptedServer, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    imported = builtins.__import__

    def without_rich(name: str, *arguments: Any, **named: Any) -> Any:
        if name.partition(".")[0] == "rich" or (name == "motet.cli.live" and "frame" in (arguments[2] or ())):
            raise ModuleNotFoundError(f"No module named {name!r}", name="rich")
        return imported(name, *arguments, **named)

    monkeypatch.setattr(builtins, "__import__", without_rich)
    assert main(["--server", server.target, "top", "--once"]) == exits.FAILED
    assert "pip install 'motet[top]'" in capsys.readouterr().err
