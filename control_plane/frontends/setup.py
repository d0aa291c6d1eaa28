"""What the control plane sends a front end at its start."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontendSetup:
    """Settings of one front end; of the server's own they are what the connections need."""

    index: int = 0  # from 1, for the log
    address: str = ""  # HOST:PORT that the control plane has reserved
    methods: tuple[str, ...] = ()  # "/package.Service/Method" of each that the control plane offers
    options: tuple[tuple[str, int], ...]  # of gRPC
    max_connections: int = 4096  # those that gRPC lets in, of this front end
    write_timeout_s: float  # how long a client may leave a response unread
    tls_cert: str | None = None  # files of the clients' port; None: no TLS
    tls_key: str | None = None
    tls_client_ca: str | None = None
    log_level: str = "info"
    log_format: str = "text"

    def named(self, index: int) -> FrontendSetup:
        """The setup with the number of a front end."""
        return replace(self, index=index)

    def encode(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def decode(cls, body: bytes) -> FrontendSetup:
        fields = json.loads(body)
        options = tuple((name, value) for name, value in fields["options"])
        return cls(**{**fields, "options": options, "methods": tuple(fields["methods"])})

    @property
    def tls_files(self) -> tuple[Path, Path, Path | None] | None:
        """Certificate, key, and authorities of clients' certificates."""
        if self.tls_cert is None or self.tls_key is None:
            return None
        return Path(self.tls_cert), Path(self.tls_key), None if self.tls_client_ca is None else Path(self.tls_client_ca)
