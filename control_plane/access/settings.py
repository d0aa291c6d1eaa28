"""Settings of who may reach the server and what they may do. They are flags of the control plane."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from motet.command_line import byte_size

from contract.settings import flags
from contract.settings.addresses import is_loopback
from contract.settings.flags import optional_path, setting


@dataclass(frozen=True, slots=True, kw_only=True)
class AccessSettings:
    """Raises ValueError, whose text begins with the flag, for values that cannot be used."""

    tls_cert: Path | None = setting(
        "certificate of the clients' port, PEM, followed by its chain; turns TLS on there",
        None,
        shown_default="no TLS",
        parse=optional_path,
        metavar="FILE",
    )
    tls_key: Path | None = setting(
        "private key of --tls-cert, PEM", None, shown_default="none", parse=optional_path, metavar="FILE"
    )
    tls_client_ca: Path | None = setting(
        "certificates that sign those of clients, PEM; every client must present one",
        None,
        shown_default="clients present none",
        parse=optional_path,
        metavar="FILE",
    )
    worker_tls_cert: Path | None = setting(
        "certificate of the workers' port, PEM, followed by its chain; turns TLS on there",
        None,
        shown_default="no TLS",
        parse=optional_path,
        metavar="FILE",
    )
    worker_tls_key: Path | None = setting(
        "private key of --worker-tls-cert, PEM", None, shown_default="none", parse=optional_path, metavar="FILE"
    )
    worker_tls_client_ca: Path | None = setting(
        "certificates that sign those of workers, PEM; every worker must present one with its id",
        None,
        shown_default="workers present none",
        parse=optional_path,
        metavar="FILE",
    )
    worker_allow: Path | None = setting(
        "ids of the workers that may attach, one a line",
        None,
        shown_default="every worker with a certificate",
        parse=optional_path,
        metavar="FILE",
    )
    scaler_tls_client_ca: Path | None = setting(
        "certificates that sign those of autoscalers, PEM; whoever calls the scaler's port must present one",
        None,
        shown_default="autoscalers present none",
        parse=optional_path,
        metavar="FILE",
    )
    tls_deny: Path | None = setting(
        "certificates that are refused on every port: names or sha256:FINGERPRINT, one a line",
        None,
        shown_default="none",
        parse=optional_path,
        metavar="FILE",
    )
    api_keys: Path | None = setting(
        "JSON file of API keys, written by `motet keys`; turns authentication on",
        None,
        shown_default="none",
        parse=optional_path,
        metavar="FILE",
    )
    jwt_issuer: str | None = setting("issuer of JSON Web Tokens; turns authentication on", None, shown_default="none")
    jwt_audience: str | None = setting("audience that tokens must be for", None, shown_default="none")
    jwt_jwks: str | None = setting(
        "keys that sign tokens, a JSON Web Key Set", None, shown_default="none", metavar="FILE|URL"
    )
    jwt_tenant_claim: str = setting("claim with the tenant, or a list of tenants", "tenant")
    jwt_roles_claim: str = setting("claim with roles, a list or a text with spaces between them", "roles")
    client_identities: Path | None = setting(
        "JSON file of names in clients' certificates, and what each allows",
        None,
        shown_default="whoever has a certificate may do everything",
        parse=optional_path,
        metavar="FILE",
    )
    audit_log: str | None = setting(
        "file of the audit log; - is standard output, after the ready line", None, shown_default="off", metavar="FILE"
    )
    audit_max_bytes: int = setting(
        "size from which the audit log goes on in a new file",
        256 << 20,
        unit="bytes",
        lowest=64 << 10,
        parse=byte_size,
    )
    audit_keep: int | None = setting(
        "older files of the audit log that are kept", None, unit="a count", shown_default="all", lowest=1
    )
    audit_text: bool = setting("the audit log has prompts and completions, too", False)
    trusted_signers: Path | None = setting(
        "JSON file of keys and certificates whose signatures of adapters are verified, by tenant",
        None,
        shown_default="signatures are not looked at",
        parse=optional_path,
        metavar="FILE",
    )
    require_signature: bool = setting("register adapters with a valid signature only", False)
    insecure: bool = setting(
        "listen without TLS, or without authentication, where other machines reach the port", False
    )

    def __post_init__(self) -> None:
        if (mistake := flags.find_mistake(self)) is not None:
            raise ValueError(mistake)
        self._check_tls()
        self._check_tokens()
        if self.require_signature and self.trusted_signers is None:
            raise ValueError("--require-signature: needs --trusted-signers; otherwise no signature is valid")
        if self.audit_text and self.audit_log in (None, "-"):
            # What reads standard output cuts long lines.
            raise ValueError("--audit-text: needs --audit-log with the name of a file")

    @property
    def has_authentication(self) -> bool:
        """Whether clients have to prove who they are."""
        return self.api_keys is not None or self.has_tokens or self.tls_client_ca is not None

    @property
    def has_tokens(self) -> bool:
        """Whether JSON Web Tokens are accepted."""
        return bool(self.jwt_issuer)

    @property
    def has_jwks_url(self) -> bool:
        """Whether the keys of tokens are at a URL and not in a file."""
        return self.jwt_jwks is not None and "://" in self.jwt_jwks

    @property
    def worker_port_is_private(self) -> bool:
        """Whether a message on the workers' port is read by a worker of the operator and by nobody else."""
        return self.worker_tls_client_ca is not None

    def check_addresses(self, listen: str, worker_listen: str, scaler_listen: str | None = None) -> None:
        """Raise ValueError if a port would be open to other machines without protection."""
        if self.insecure:
            return
        if not is_loopback(listen):
            self._check_protection(
                f"--listen: {listen}",
                (self.tls_cert is not None, "no TLS: give --tls-cert and --tls-key"),
                (self.has_authentication, "no authentication: give --api-keys, --jwt-issuer or --tls-client-ca"),
            )
        if not is_loopback(worker_listen):
            self._check_protection(
                f"--worker-listen: {worker_listen}",
                (self.worker_tls_cert is not None, "no TLS: give --worker-tls-cert and --worker-tls-key"),
                (self.worker_tls_client_ca is not None, "no certificates of workers: give --worker-tls-client-ca"),
                (self.worker_allow is not None, "no list of the workers: give --worker-allow"),
            )
        if scaler_listen is not None and not is_loopback(scaler_listen):
            self._check_protection(
                f"--scaler-listen: {scaler_listen}",
                (self.tls_cert is not None, "no TLS: give --tls-cert and --tls-key"),
                (self.scaler_tls_client_ca is not None, "no certificates of callers: give --scaler-tls-client-ca"),
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
        if self.scaler_tls_client_ca is not None and self.tls_cert is None:
            raise ValueError("--scaler-tls-client-ca: needs --tls-cert and --tls-key, which turn TLS on")
        authorities = (self.tls_client_ca, self.worker_tls_client_ca, self.scaler_tls_client_ca)
        if self.tls_deny is not None and not any(authorities):
            raise ValueError(
                "--tls-deny: needs --tls-client-ca, --worker-tls-client-ca or --scaler-tls-client-ca; else there is "
                "nothing to deny"
            )
        if self.client_identities is not None and self.tls_client_ca is None:
            raise ValueError("--client-identities: needs --tls-client-ca; otherwise clients present no certificate")
        for name in flags.flags_of(AccessSettings):
            path = getattr(self, name)
            if isinstance(path, Path) and not path.is_file():
                raise ValueError(f"{_flag(name)}: {path} is not a file that can be read")

    def _check_tokens(self) -> None:
        flags_given = {
            "--jwt-issuer": self.jwt_issuer,
            "--jwt-audience": self.jwt_audience,
            "--jwt-jwks": self.jwt_jwks,
        }
        missing = [flag for flag, value in flags_given.items() if not value]
        if 0 < len(missing) < len(flags_given):
            (first, *_) = (flag for flag in flags_given if flag not in missing)
            raise ValueError(f"{first}: needs {' and '.join(missing)} too; tokens are verified by all three")
        if self.jwt_jwks is not None and self.has_jwks_url:
            _check_jwks_url(self.jwt_jwks)


def _flag(name: str) -> str:
    return flags.flag_of(AccessSettings, name)


_URL = re.compile(r"(https?)://([A-Za-z0-9.-]+|\[[0-9A-Fa-f:]+\])(:\d{1,5})?(/[!-~]*)?")


def _check_jwks_url(url: str) -> None:
    # The URL is not repeated: it may have a password, which this form does not allow.
    match = _URL.fullmatch(url)
    if match is None or "\\" in url:
        raise ValueError("--jwt-jwks: is not a URL of the form https://HOST[:PORT]/PATH, without a user name")
    if match[1] == "http" and not is_loopback(f"{match[2]}:0"):
        raise ValueError(
            f"--jwt-jwks: {match[2]} is another machine, and http lets everybody on the way replace the keys; use https"
        )
    if urlsplit(url).port == 0:
        raise ValueError("--jwt-jwks: has port 0; give the port of the server")
