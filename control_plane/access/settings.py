"""Settings of who may reach the server and what they may do. They are flags of the control plane."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass

from contract import flags
from contract.flags import setting


@dataclass(frozen=True, slots=True, kw_only=True)
class AccessSettings:
    """Raises ValueError, whose text begins with the flag, for values that cannot be used."""

    insecure: bool = setting(
        "listen without TLS, or without authentication, where other machines reach the port", False
    )

    def __post_init__(self) -> None:
        if (mistake := flags.find_mistake(self)) is not None:
            raise ValueError(mistake)

    def check_addresses(self, listen: str, worker_listen: str) -> None:
        """Raise ValueError if a port would be open to other machines without protection."""
        for flag, address in (("--listen", listen), ("--worker-listen", worker_listen)):
            if not self.insecure and not is_loopback(address):
                raise ValueError(
                    f"{flag}: {address} is reached from other machines, and nothing protects it; give an address "
                    "of 127.0.0.1, or --insecure where only trusted machines reach the port"
                )


def is_loopback(address: str) -> bool:
    """Whether only this machine reaches HOST:PORT. A name other than localhost may be anything."""
    host = address.rpartition(":")[0].strip("[]")
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
