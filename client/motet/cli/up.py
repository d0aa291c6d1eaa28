"""`motet up`: the whole system with one command. Sorts the flags of both sides; `supervisor.py` runs the processes."""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from typing import Any

from motet.cli import server_parts
from motet.command_line import Parser
from motet.errors import invalid_field

# Set by this command itself, from the control plane's ready line.
_OWN_FLAG = "--control-plane"
_ANY_ADDRESS = "127.0.0.1:1"  # stands for it until it is known
_MODEL_FLAG = "--model"
_HTTP_FLAG = "--http"
_HTTP_PROCESSES_FLAG = "--http-processes"
_HTTP_ADDRESS = "127.0.0.1:8000"
_LOG_FLAGS = ("--log-level", "--log-format")  # of all three parts
_DEFAULT_DRAIN_TIMEOUT_S = 30.0
_DESCRIPTION = (
    "Run a control plane, one worker and with --http a gateway on this machine, until Ctrl-C. "
    "`motet up DIR` is short for `motet up --model DIR`."
)


def _nothing_wrong(_arguments: argparse.Namespace) -> str | None:
    return None


@dataclass(frozen=True)
class Side:
    """One of the two kinds of process that this command starts."""

    add_arguments: Callable[[Any], None]  # declares its flags
    command: Sequence[str]  # starts it; its flags are appended
    # What is wrong with the values of its flags, or None. Checked before anything is started.
    find_mistake: Callable[[argparse.Namespace], str | None] = _nothing_wrong


class _Flags:
    """Stands in for a parser and keeps what is declared, so that both sides' flags can be sorted."""

    def __init__(self, side: Side) -> None:
        self.declared: dict[str, dict[str, Any]] = {}  # flag -> keyword arguments of add_argument
        side.add_arguments(self)

    def add_argument(self, flag: str, **settings: Any) -> None:
        self.declared[flag] = settings


def default_sides(argv: Sequence[str]) -> tuple[Side, Side]:
    """Control plane and worker, with what the environment and the file of --config say of their flags.

    Raises ServerPartMissing, and ValueError for a file or a variable that cannot be used.
    """
    return _side("control_plane", argv), _side("data_plane", argv)


def _side(package: str, argv: Sequence[str]) -> Side:
    config = server_parts.load(f"{package}.config")
    environ = config.environment(argv)

    def find_mistake(arguments: argparse.Namespace) -> str | None:
        try:
            config.from_args(arguments)
        except config.ConfigError as error:
            return str(error)
        return None

    return Side(lambda flags: config.add_arguments(flags, environ), (sys.executable, "-m", package), find_mistake)


def run_up(argv: Sequence[str], *, sides: tuple[Side, Side] | None = None) -> int:
    """Runs until stopped or until the control plane ends; the exit code."""
    argv = _with_model_flag(argv)
    parser = Parser(prog="motet up", description=_DESCRIPTION, allow_abbrev=False)
    try:
        control_side, worker_side = sides or default_sides(argv)
        control, worker = _Flags(control_side), _Flags(worker_side)
        http = _http_of_file(argv)
    except ValueError as error:
        parser.refuse(str(error))
    worker.declared.pop(_OWN_FLAG, None)
    _declare(parser, control, worker, http)
    arguments = parser.parse_args(argv)
    arguments.control_plane = _ANY_ADDRESS
    for side in (control_side, worker_side):
        if (mistake := side.find_mistake(arguments)) is not None:
            parser.refuse(mistake)
    drain_timeout_s = float(getattr(arguments, "drain_timeout_s", _DEFAULT_DRAIN_TIMEOUT_S))
    gateway_flags = _gateway_flags(arguments, parser, drain_timeout_s)
    if gateway_flags is not None:
        gateway_flags += _argv_of(_LOG_FLAGS, argv)
    from motet.cli.supervisor import Supervisor  # needs the server's packages, as the two sides do

    control_argv, worker_argv = _argv_of(control.declared, argv), _argv_of(worker.declared, argv)
    supervisor = Supervisor(
        control_command=[*control_side.command, *control_argv],
        worker_command=lambda address: [*worker_side.command, _OWN_FLAG, address, *worker_argv],
        gateway_command=None
        if gateway_flags is None
        else lambda address: [sys.executable, "-m", "gateway", "--server", address, *gateway_flags],
        environment=server_parts.child_environment(),
        drain_timeout_s=drain_timeout_s,
        log_format=getattr(arguments, "log_format", "text"),
    )
    return asyncio.run(supervisor.run())


def declare_flags(parser: Parser) -> None:
    """Add every flag of this command. Raises ServerPartMissing."""
    control_side, worker_side = default_sides([])
    control, worker = _Flags(control_side), _Flags(worker_side)
    worker.declared.pop(_OWN_FLAG, None)
    _declare(parser, control, worker, None)


def _gateway_flags(arguments: argparse.Namespace, parser: Parser, drain_timeout_s: float) -> list[str] | None:
    """The gateway's flags but the address of its server; None: no gateway. Ends the process for what cannot be used."""
    if arguments.http is None:
        if arguments.http_processes is not None:
            parser.refuse(f"{_HTTP_PROCESSES_FLAG}: is for a gateway; give {_HTTP_FLAG}, too")
        return None
    if getattr(arguments, "tls_cert", None) is not None:
        parser.refuse(
            f"{_HTTP_FLAG}: is for a system without TLS; run `motet gateway` by itself, with --tls-cert, --tls-key and "
            "--server-tls-ca"
        )
    is_insecure = bool(getattr(arguments, "insecure", False))
    settings: dict[str, Any] = {"listen": arguments.http, "insecure": is_insecure}
    flags = ["--listen", arguments.http, "--drain-timeout-s", f"{drain_timeout_s:g}"]
    if arguments.http_processes is not None:
        settings["processes"] = arguments.http_processes
        flags += ["--processes", str(arguments.http_processes)]
    try:
        server_parts.load("gateway.http.settings").HttpSettings(**settings)
    except ValueError as error:
        said = str(error).replace("--listen", _HTTP_FLAG, 1)
        parser.refuse(said.replace("--processes", _HTTP_PROCESSES_FLAG, 1))
    if (config := getattr(arguments, "config", None)) is not None:
        flags += ["--config", config]
    return [*flags, "--insecure"] if is_insecure else flags


def _http_of_file(argv: Sequence[str]) -> str | None:
    """What the file of --config says of this command's own flag. Raises ValueError."""
    config_file = server_parts.load("contract.settings.config_file")
    path = config_file.path_of(argv)
    return None if path is None else config_file.read(path).get(config_file.UP, {}).get("http")


def _declare(parser: Parser, control: _Flags, worker: _Flags, http: str | None) -> None:
    parser.add_version()
    shared = control.declared.keys() & worker.declared.keys()
    groups = (
        ("control plane and worker", {flag: control.declared[flag] for flag in control.declared if flag in shared}),
        ("control plane", {flag: control.declared[flag] for flag in control.declared if flag not in shared}),
        ("worker", {flag: worker.declared[flag] for flag in worker.declared if flag not in shared}),
    )
    for title, flags in groups:
        group = parser.add_argument_group(title)
        for flag, settings in flags.items():
            group.add_argument(flag, **settings)
    gateway = parser.add_argument_group("gateway")
    gateway.add_argument(
        _HTTP_FLAG,
        nargs="?",
        const=_HTTP_ADDRESS,
        default=http,
        metavar="HOST:PORT",
        help=f"run the HTTP gateway, too, with the OpenAI-compatible API (default without a value: {_HTTP_ADDRESS})",
    )
    gateway.add_argument(
        _HTTP_PROCESSES_FLAG,
        type=int,
        metavar="N",
        help="processes of the gateway, on one port (default: 1, or what the file of --config says)",
    )


def _with_model_flag(argv: Sequence[str]) -> Sequence[str]:
    """`argv` with the flag that a checkpoint directory given as its first word stands for. Raises InvalidArgument."""
    if not argv or argv[0].startswith("-"):
        return argv
    if any(item.partition("=")[0] == _MODEL_FLAG for item in argv):
        raise invalid_field("DIR", f"{argv[0]} is given beside {_MODEL_FLAG}; give the checkpoint directory once")
    return [_MODEL_FLAG, *argv]


def _argv_of(flags: Container[str], argv: Sequence[str]) -> list[str]:
    """The part of a checked command line that one side understands, which has these flags.

    Worked example: ["--model", "m", "--listen=:1"] gives ["--model", "m"] for a side without --listen.
    """
    mine: list[str] = []
    is_mine = False
    for item in argv:
        # No positional argument is left: what is not a flag is the value of the flag before it.
        if item.startswith("--"):
            is_mine = item.partition("=")[0] in flags
        if is_mine:
            mine.append(item)
    return mine
