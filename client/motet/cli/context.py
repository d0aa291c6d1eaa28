"""What every client command shares: where the server is, how to connect, where output goes."""

from __future__ import annotations

import argparse
import math
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

from motet.client import Client
from motet.connection.contact import check_target
from motet.connection.credential import API_KEY_VARIABLE, MAX_KEY_CHARS, ApiKey
from motet.errors import InvalidArgument, invalid_field
from motet.retries import RetryPolicy

DEFAULT_SERVER = "127.0.0.1:50051"
MAX_SECONDS = 1e6  # some eleven days
CONNECT_TIMEOUT_S = 2.0
# A key of Motet, or a JSON Web Token: given in place of the name of a file.
_KEY = re.compile(r"motet_[0-9A-Za-z-]{1,64}_[0-9A-Za-z]{43}|eyJ[\w-]+\.[\w-]+\.[\w-]*")

_TLS_FLAGS = (
    ("--tls-ca", "FILE", "authorities that sign the server's certificate, PEM; turns TLS on"),
    ("--tls-cert", "FILE", "certificate of this client, PEM, where the server needs one"),
    ("--tls-key", "FILE", "private key of --tls-cert, PEM"),
)

Command: TypeAlias = Callable[[argparse.Namespace], int]
Subparsers: TypeAlias = Any  # argparse's own type is private


def server_option(*, is_top: bool = False) -> argparse.ArgumentParser:
    """The options of the server, TLS and the API key as a parent parser, allowed before and after the command."""
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
    parent.add_argument(
        "--api-key-file",
        metavar="FILE",
        default=None if is_top else argparse.SUPPRESS,
        help=f"file with the API key or token (default: the key in ${API_KEY_VARIABLE}, else $MOTET_API_KEY_FILE)",
    )
    parent.add_argument(
        "--insecure",
        action="store_true",
        default=False if is_top else argparse.SUPPRESS,
        help="send the key without TLS to another machine: everybody on the way can read it",
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


def _api_key(arguments: argparse.Namespace) -> ApiKey | None:
    """The key of --api-key-file, of MOTET_API_KEY, or of the file that MOTET_API_KEY_FILE names, in this order."""
    file = arguments.api_key_file
    if file is None and not os.environ.get(API_KEY_VARIABLE):
        file = os.environ.get("MOTET_API_KEY_FILE")
    if not file:
        return None  # the SDK takes that of MOTET_API_KEY
    read_key(file)  # a file that cannot be used is said before anything is sent
    return lambda: read_key(file)


def read_key(file: str) -> str:
    """The key in a file, which may be replaced at any time. Raises InvalidArgument."""
    if _KEY.fullmatch(file):
        description = (
            "is a key or a token, and the name of a file is expected; other users of this machine may have seen it in "
            "the list of processes: replace it, and give the new one in a file or in MOTET_API_KEY"
        )
        raise invalid_field("--api-key-file", description)
    try:
        with Path(file).open(encoding="utf-8") as opened:
            key = opened.read(2 * MAX_KEY_CHARS).strip()
    except (OSError, UnicodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise invalid_field("--api-key-file", f"{file} cannot be read: {reason}") from error
    if not key:
        raise invalid_field("--api-key-file", f"{file} is empty; put the key into it")
    return key


def connect(arguments: argparse.Namespace) -> Client:
    """A client for the server that the command line names. Fails soon when nothing responds there."""
    return Client(
        arguments.server,
        tls_ca=arguments.tls_ca,
        tls_cert=arguments.tls_cert,
        tls_key=arguments.tls_key,
        api_key=_api_key(arguments),
        allow_plaintext_key=arguments.insecure,
        retry=RetryPolicy(connect_timeout_s=CONNECT_TIMEOUT_S),
    )
