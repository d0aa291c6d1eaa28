"""Settings of who may reach the server and what they may do. They are flags of the control plane."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from pathlib import Path

from contract import flags
from contract.flags import setting


def _file(text: str) -> Path | None:
    """The type of a flag that names a file; an empty variable of the environment names none."""
    return Path(text) if text else None


@dataclass(frozen=True, slots=True, kw_only=True)
class AccessSettings:
    """Raises ValueError, whose text begins with the flag, for values that cannot be used."""

    tls_cert: Path | None = setting(
        "certificate of the clients' port, PEM, followed by its chain; turns TLS on there",
        None,
        shown_default="no TLS",
        parse=_file,
        metavar="FILE",
    )
    tls_key: Path | None = setting(
        "private key of --tls-cert, PEM", None, shown_default="none", parse=_file, metavar="FILE"
    )
    tls_client_ca: Path | None = setting(
        "certificates that sign those of clients, PEM; every client must present one",
        None,
        shown_default="clients present none",
        parse=_file,
        metavar="FILE",
    )
    worker_tls_cert: Path | None = setting(
        "certificate of the workers' port, PEM, followed by its chain; turns TLS on there",
        None,
        shown_default="no TLS",
        parse=_file,
        metavar="FILE",
    )
    worker_tls_key: Path | None = setting(
        "private key of --worker-tls-cert, PEM", None, shown_default="none", parse=_file, metavar="FILE"
    )
    worker_tls_client_ca: Path | None = setting(
        "certificates that sign those of workers, PEM; every worker must present one with its id",
        None,
        shown_default="workers present none",
        parse=_file,
        metavar="FILE",
    )
    worker_allow: Path | None = setting(
        "ids of the workers that may attach, one a line",
        None,
        shown_default="every worker with a certificate",
        parse=_file,
        metavar="FILE",
    )
    tls_deny: Path | None = setting(
        "certificates that are refused on both ports: names or sha256:FINGERPRINT, one a line",
        None,
        shown_default="none",
        parse=_file,
        metavar="FILE",
    )
    insecure: bool = setting(
        "listen without TLS, or without authentication, where other machines reach the port", False
    )

    def __post_init__(self) -> None:
        if (mistake := flags.find_mistake(self)) is not None:
            raise ValueError(mistake)
        self._check_tls()

    @property
    def has_authentication(self) -> bool:
        """Whether clients have to prove who they are."""
        return self.tls_client_ca is not None

    def check_addresses(self, listen: str, worker_listen: str) -> None:
        """Raise ValueError if a port would be open to other machines without protection."""
        if self.insecure:
            return
        if not is_loopback(listen):
            self._check_protection(
                f"--listen: {listen}",
                (self.tls_cert is not None, "no TLS: give --tls-cert and --tls-key"),
                (self.has_authentication, "no authentication: give --tls-client-ca"),
            )
        if not is_loopback(worker_listen):
            self._check_protection(
                f"--worker-listen: {worker_listen}",
                (self.worker_tls_cert is not None, "no TLS: give --worker-tls-cert and --worker-tls-key"),
                (self.worker_tls_client_ca is not None, "no certificates of workers: give --worker-tls-client-ca"),
                (self.worker_allow is not None, "no list of the workers: give --worker-allow"),
            )

    @staticmethod
    def _check_protection(port: str, *needs: tuple[bool, str]) -> None:
        for is_met, what in needs:
            if not is_met:
                raise ValueError(
                    f"{port} is reached from other machines and has {what}, or an address of 127.0.0.1; where only "
                    "trusted machines reach the port, --insecure does without"
                )

    def _check_tls(self) -> None:
        for cert, key, client_ca in (
            ("tls_cert", "tls_key", "tls_client_ca"),
            ("worker_tls_cert", "worker_tls_key", "worker_tls_client_ca"),
        ):
            for name, other in ((cert, key), (key, cert)):
                if getattr(self, name) is not None and getattr(self, other) is None:
                    raise ValueError(f"{_flag(name)}: needs {_flag(other)}, too; give both")
            if getattr(self, client_ca) is not None and getattr(self, cert) is None:
                raise ValueError(f"{_flag(client_ca)}: needs {_flag(cert)} and {_flag(key)}, which turn TLS on")
        if self.worker_allow is not None and self.worker_tls_client_ca is None:
            raise ValueError("--worker-allow: needs --worker-tls-client-ca; only a certificate proves a worker's id")
        if self.tls_deny is not None and self.tls_client_ca is None and self.worker_tls_client_ca is None:
            raise ValueError(
                "--tls-deny: needs --tls-client-ca or --worker-tls-client-ca; else there is nothing to deny"
            )
        for name in flags.flags_of(AccessSettings):
            path = getattr(self, name)
            if isinstance(path, Path) and not path.is_file():
                raise ValueError(f"{_flag(name)}: {path} is not a file that can be read")


def _flag(name: str) -> str:
    return flags.flag_of(AccessSettings, name)


def is_loopback(address: str) -> bool:
    """Whether only this machine reaches HOST:PORT. A name other than localhost may be anything."""
    host = address.rpartition(":")[0].strip("[]")
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
