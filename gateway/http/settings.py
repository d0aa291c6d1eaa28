"""Settings of the gateway that belong to no protocol: where it listens, which server it speaks to, its limits."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from motet.command_line import byte_size
from motet.connection.contact import check_target
from motet.connection.credential import is_this_machine
from motet.errors import InvalidArgument
from motet.tls import TlsError, tls_files

from contract.process_log import LOG_FORMATS, LOG_LEVELS
from contract.settings import flags
from contract.settings.addresses import is_loopback
from contract.settings.flags import optional_path, setting

SERVER_TLS_FLAGS = ("--server-tls-ca", "--server-tls-cert", "--server-tls-key")


_ORIGIN = re.compile(r"https?://[a-z0-9.\[\]:-]+")


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpSettings:
    """Everything that an operator sets about the gateway, whatever protocol it speaks."""

    listen: str = setting("address of the HTTP port", "127.0.0.1:8000", metavar="HOST:PORT")
    server: str = setting("address of Motet's port for clients", "127.0.0.1:50051", metavar="HOST:PORT")
    base_model_names: tuple[str, ...] = setting(
        "further name of the base model, such as Qwen/Qwen3-8B; clients see the first one",
        (),
        name="--base-model-name",
        shown_default="none",
        parse=str,
        is_repeatable=True,
        metavar="NAME",
    )
    tls_cert: Path | None = setting(
        "certificate of the HTTP port, PEM, with its chain; turns TLS on",
        None,
        shown_default="no TLS",
        parse=optional_path,
        metavar="FILE",
    )
    tls_key: Path | None = setting(
        "private key of --tls-cert, PEM", None, shown_default="none", parse=optional_path, metavar="FILE"
    )
    server_tls_ca: Path | None = setting(
        "authorities that sign the certificate of --server, PEM; turns TLS to it on",
        None,
        shown_default="no TLS",
        parse=optional_path,
        metavar="FILE",
    )
    server_tls_cert: Path | None = setting(
        "certificate of the gateway, PEM, where the server needs one",
        None,
        shown_default="none",
        parse=optional_path,
        metavar="FILE",
    )
    server_tls_key: Path | None = setting(
        "private key of --server-tls-cert, PEM", None, shown_default="none", parse=optional_path, metavar="FILE"
    )
    allow_keyless: bool = setting(
        "requests without a key are calls of the gateway's own certificate, with all that it may do", False
    )
    insecure: bool = setting("listen, and send keys to --server, without TLS where other machines are reached", False)
    processes: int = setting(
        "processes that serve the port together; each has its own bounds of connections, bodies and samples",
        1,
        unit="a count",
        lowest=1,
        highest=64,
    )
    allowed_origins: tuple[str, ...] = setting(
        "origin of web pages that may use this server, such as https://chat.example.org, or *; may be repeated",
        (),
        name="--allow-origin",
        metavar="ORIGIN",
        shown_default="none",
        parse=str,
        is_repeatable=True,
    )
    allowed_hosts: tuple[str, ...] = setting(
        "further name under which clients reach a server that listens on loopback; may be repeated",
        (),
        name="--allow-host",
        metavar="NAME",
        shown_default="names of this machine",
        parse=str,
        is_repeatable=True,
    )
    max_connections: int = setting(
        "connections of a process at once; above it a new one takes the place of one without a request",
        1024,
        unit="a count",
        lowest=8,
    )
    max_body_bytes: int = setting(
        "longest body of a request", 32 << 20, unit="bytes", parse=byte_size, lowest=1024, metavar="SIZE"
    )
    request_timeout_s: float = setting("longest time that one generation may take", 3600.0, unit="seconds", lowest=1)
    server_absence_s: float = setting(
        "requests wait so long for a server that cannot be reached", 30.0, unit="seconds", lowest=0
    )
    drain_timeout_s: float = setting("open requests get this long at the end", 30.0, unit="seconds", lowest=0)
    log_level: str = setting("what is logged", "info", choices=LOG_LEVELS)
    log_format: str = setting("form of the log: text, or json with an object on each line", "text", choices=LOG_FORMATS)

    def __post_init__(self) -> None:
        if (mistake := flags.find_mistake(self)) is not None:
            raise ValueError(mistake)
        for origin in self.allowed_origins:
            if origin != "*" and not _ORIGIN.fullmatch(origin):
                raise ValueError(
                    f"--allow-origin: {origin!r} is not an origin; give SCHEME://HOST or SCHEME://HOST:PORT"
                )
        for name in self.allowed_hosts:
            if not name or name != name.lower() or set(name) & set(":/* "):
                raise ValueError(f"--allow-host: {name!r} is not a host's name in lower case, without a port")
        host, port = split_address(self.listen)
        try:
            check_target(self.server)
        except InvalidArgument as error:
            raise ValueError(f"--server: {error.field_violations[0].description}") from error
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ValueError("--tls-cert and --tls-key: give both, or none")
        if not self.insecure and self.tls_cert is None and not is_loopback(self.listen):
            raise ValueError(
                f"--listen: {host}:{port} is reached by other machines and has no TLS: give --tls-cert and --tls-key, "
                "or --insecure"
            )
        if not self.insecure and self.server_tls_ca is None and not is_this_machine(self.server):
            raise ValueError(
                f"--server: keys would be sent in plaintext to {self.server}, which is another machine: give "
                "--server-tls-ca, or --insecure"
            )
        try:
            tls_files(self.server_tls_ca, self.server_tls_cert, self.server_tls_key, SERVER_TLS_FLAGS)
        except TlsError as error:
            raise ValueError(str(error)) from error

    @property
    def known_hosts(self) -> tuple[str, ...] | None:
        """Names beside those of this machine that requests may be for; None: any, as other machines reach the port."""
        return self.allowed_hosts if is_loopback(self.listen) else None


def split_address(text: str) -> tuple[str, int]:
    """Host and port of HOST:PORT; an IPv6 address is in brackets. Raises ValueError."""
    host, colon, port = text.rpartition(":")
    if not colon or not host or not port.isascii() or not port.isdecimal() or int(port) > 65535:
        raise ValueError(f"--listen: {text!r} is not HOST:PORT with a port up to 65535")
    return host.strip("[]"), int(port)
