"""Examines where a gateway would run: its port, its certificates, its folder of uploads, the way to the server."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from motet.tls import TlsError, TlsFiles

from contract.settings.findings import Finding, State
from contract.settings.probes import examine_connection, examine_folder, examine_port, examine_validity
from gateway.config import GatewayConfig
from gateway.http.certificate import Certificate
from gateway.http.settings import HttpSettings


def examine(config: GatewayConfig, wall_clock: Callable[[], float] = time.time) -> Iterator[Finding]:
    """Everything that can be looked at beside a gateway that runs."""
    http = config.http
    if http.tls_cert is not None and http.tls_key is not None:
        yield _own_certificate(http.tls_cert, http.tls_key, wall_clock)
    if http.server_tls_cert is not None:
        yield _certificate_for_server(http, wall_clock)
    yield examine_port("gateway's --listen", http.listen)
    yield _upload_folder(config.registry.upload_dir)
    advice = "start the control plane, or correct --server; requests wait for it for --server-absence-s"
    yield examine_connection(f"server at {http.server}", http.server, advice)


def _own_certificate(cert: Path, key: Path, wall_clock: Callable[[], float]) -> Finding:
    what = "certificate of the HTTP port"
    try:
        Certificate(cert, key)
        not_after_s = TlsFiles(cert, cert, key).not_after_s()
    except (OSError, TlsError, ValueError) as error:  # OSError: ssl's own, too
        reason = getattr(error, "reason", None) or getattr(error, "strerror", None) or error
        advice = "give --tls-cert its whole chain in PEM, and --tls-key the key of it, without a password"
        return Finding(what, State.WRONG, f"{cert}: {reason}", advice)
    assert not_after_s is not None, "a certificate is given"
    return examine_validity(what, cert, not_after_s, wall_clock())


def _certificate_for_server(http: HttpSettings, wall_clock: Callable[[], float]) -> Finding:
    assert http.server_tls_ca is not None and http.server_tls_cert is not None, "checked with the settings"
    what = "certificate of the gateway for the server"
    try:
        not_after_s = TlsFiles(http.server_tls_ca, http.server_tls_cert, http.server_tls_key).not_after_s()
    except (TlsError, ValueError) as error:
        return Finding(what, State.WRONG, str(error), "renew it")
    assert not_after_s is not None, "a certificate is given"
    return examine_validity(what, http.server_tls_cert, not_after_s, wall_clock())


def _upload_folder(folder: Path | None) -> Finding:
    place = folder or Path(tempfile.gettempdir())
    advice = "let the gateway's user write there, or name another folder with --upload-dir"
    if not place.is_dir():
        return Finding(f"folder of uploads {place}", State.WRONG, "No such file or directory", advice)
    return examine_folder(f"folder of uploads {place}", place, advice)
