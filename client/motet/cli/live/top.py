"""`motet top`: workers, batches by adapter, tiers, tenants and tokens per second, again and again."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from motet.cli import exits
from motet.cli.context import Subparsers, connect, seconds, server_option
from motet.cli.live.rates import Rates, rates_of
from motet.errors import Unavailable
from motet.types import ServerStatus

if TYPE_CHECKING:
    from motet.client import Client

Clock = Callable[[], float]
Sleep = Callable[[float], None]
PLAIN_WIDTH = 500  # characters where the output is not a terminal: no name is cut


def add_parser(commands: Subparsers) -> None:
    """Declares the command."""
    parser = commands.add_parser(
        "top",
        help="what workers, adapters and tenants do at the moment, until Ctrl-C",
        description="Show what workers, adapters and tenants do, again and again until Ctrl-C. Needs the role admin "
        "for more than your tenant, and the Python package rich (pip install 'motet[top]').",
        parents=[server_option()],
    )
    parser.add_argument(
        "--interval-s", type=seconds, default=2.0, metavar="S", help="seconds between looks (default: 2)"
    )
    parser.add_argument("--once", action="store_true", help="show the first interval and end")
    parser.set_defaults(run=run_top)


def run_top(arguments: argparse.Namespace, *, clock: Clock = time.monotonic, sleep: Sleep = time.sleep) -> int:
    """Shows frames until interrupted, or one with --once."""
    try:
        from motet.cli.live import frame
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != "rich":
            raise
        print("motet top: needs the Python package rich: pip install 'motet[top]'", file=sys.stderr)
        return exits.FAILED
    with connect(arguments) as client:
        looks = _looks(client, arguments.interval_s, clock, sleep)
        if arguments.once or not sys.stdout.isatty():
            console = frame.plain_console(PLAIN_WIDTH)
            for look in looks:
                if isinstance(look, Unavailable) and arguments.once:
                    raise look
                console.print(_shown(frame, look, frame.Room()))
                if arguments.once:
                    break
        else:
            _show_live(frame, looks)
    return exits.OK


def _looks(
    client: Client, interval_s: float, clock: Clock, sleep: Sleep
) -> Iterator[tuple[ServerStatus, Rates] | Unavailable]:
    """Status and rates after each interval; the error while a server that was there is away, as in an upgrade."""
    before, seen_s = client.status(), clock()
    while True:
        sleep(interval_s)
        try:
            after, now_s = client.status(), clock()
        except Unavailable as error:
            yield error
            continue
        yield after, rates_of(before, after, now_s - seen_s)
        before, seen_s = after, now_s


def _show_live(frame: Any, looks: Iterator[tuple[ServerStatus, Rates] | Unavailable]) -> None:
    with frame.live_screen() as screen:
        for look in looks:
            screen.update(_shown(frame, look, frame.room_of(screen)), refresh=True)


def _shown(frame: Any, look: tuple[ServerStatus, Rates] | Unavailable, room: Any) -> Any:
    return frame.absence(look) if isinstance(look, Unavailable) else frame.frame(*look, room)
