"""What every client command shares: where the server is, how to connect, where output goes."""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Callable
from typing import Any, TypeAlias

from motet.client import Client
from motet.connection.contact import check_target
from motet.errors import InvalidArgument
from motet.retries import RetryPolicy

DEFAULT_SERVER = "127.0.0.1:50051"
MAX_SECONDS = 1e6  # some eleven days
CONNECT_TIMEOUT_S = 2.0

_TLS_FLAGS = (
    ("--tls-ca", "FILE", "authorities that sign the server's certificate, PEM; turns TLS on"),
    ("--tls-cert", "FILE", "certificate of this client, PEM, where the server needs one"),
    ("--tls-key", "FILE", "private key of --tls-cert, PEM"),
)

Command: TypeAlias = Callable[[argparse.Namespace], int]
Subparsers: TypeAlias = Any  # argparse's own type is private


def server_option(*, is_top: bool = False) -> argparse.ArgumentParser:
    """The --server option and those of TLS as a parent parser, allowed before and behind the command."""
    parent = argparse.ArgumentParser(add_help=False)
    default = os.environ.get("MOTET_SERVER") or DEFAULT_SERVER
    parent.add_argument(
        "--server",
        metavar="HOST:PORT",
        type=_target,
        # Below a command it sets nothing unless given, so that it does not undo the one before the command.
        default=default if is_top else argparse.SUPPRESS,
        help=f"address of the control plane (default: $MOTET_SERVER, else {DEFAULT_SERVER})",
    )
    for flag, metavar, about in _TLS_FLAGS:
        variable = f"MOTET_{flag.strip('-').upper().replace('-', '_')}"
        parent.add_argument(
            flag,
            metavar=metavar,
            default=os.environ.get(variable) or None if is_top else argparse.SUPPRESS,
            help=f"{about} (default: ${variable})",
        )
    return parent


def _target(text: str) -> str:
    """The argparse type of the server's address."""
    try:
        return check_target(text)
    except InvalidArgument as error:
        raise argparse.ArgumentTypeError(error.field_violations[0].description) from error


def seconds(text: str) -> float:
    """The argparse type of a flag in seconds: above 0, at most MAX_SECONDS."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value <= MAX_SECONDS:  # NaN fails this too
        raise argparse.ArgumentTypeError(f"{text}: seconds above 0 and at most {MAX_SECONDS:g} are expected")
    return value


def connect(arguments: argparse.Namespace) -> Client:
    """A client for the server that the command line names. Fails soon when nothing responds there."""
    return Client(
        arguments.server,
        tls_ca=arguments.tls_ca,
        tls_cert=arguments.tls_cert,
        tls_key=arguments.tls_key,
        retry=RetryPolicy(connect_timeout_s=CONNECT_TIMEOUT_S),
    )
