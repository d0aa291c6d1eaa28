"""Who may use the workers' port, by certificate, list and time."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from cryptography import x509

from control_plane.access.name_lists import parse_deny_list, parse_worker_list
from control_plane.access.peer_certificate import read_certificate
from control_plane.access.watched_files import WatchedFiles
from control_plane.access.worker_access import AuthContext, WorkerAccess
from control_plane.errors import PermissionDenied, Unauthenticated
from tests.fakes.authority import UNREADABLE_NAME, Authority, Issued

CA = Authority()
GPU_1 = CA.issue("spiffe://lab.example/motet/worker/gpu-1")
BOTH = CA.issue("gpu-1", "gpu-2")


def connection(own: Issued) -> AuthContext:
    return {"x509_pem_cert": [own.cert], "x509_subject_alternative_name": [b"whatever"]}


def listed(path: Path, text: str, time_s: int = 1) -> Path:
    path.write_text(text, "utf-8")
    os.utime(path, (time_s, time_s))
    return path


def test_a_certificate_with_the_workers_id_is_enough_without_lists() -> None:
    credential = WorkerAccess().credential(connection(GPU_1))
    credential.require("gpu-1")
    with pytest.raises(
        PermissionDenied, match=r"the certificate is not that of worker gpu-2: it has spiffe://lab.exam"
    ):
        credential.require("gpu-2")
    both = WorkerAccess().credential(connection(BOTH))
    assert both.refusal("gpu-1") is None and both.refusal("gpu-2") is None


def test_an_id_that_a_worker_claims_is_shown_in_one_short_line() -> None:
    refusal = WorkerAccess().credential(connection(GPU_1)).refusal("g\n\0" + "x" * 100_000)
    assert refusal is not None and len(refusal) < 500 and refusal.isprintable()


def test_a_connection_without_a_workers_certificate_is_refused() -> None:
    connections: list[AuthContext | None] = [None, {}, {"x509_pem_cert": []}]
    for empty in connections:
        with pytest.raises(
            Unauthenticated, match="this port needs a certificate; start the worker with --control-plane"
        ):
            WorkerAccess().credential(empty)
    with pytest.raises(PermissionDenied, match=r"names no worker; it has spiffe://lab\.example/user/alice, and needs"):
        WorkerAccess().credential(connection(CA.issue("spiffe://lab.example/user/alice")))
    with pytest.raises(PermissionDenied, match=r"names no worker; it has sha256:[0-9a-f]{64}, and needs"):
        WorkerAccess().credential(connection(CA.issue()))


@pytest.mark.parametrize(
    "name",
    [
        x509.UniformResourceIdentifier("gpu-1"),
        x509.RFC822Name("gpu-1"),
        x509.RFC822Name("spiffe://lab.example/motet/worker/gpu-1"),
        x509.DNSName("spiffe://lab.example/motet/worker/gpu-1"),
    ],
)
def test_a_name_of_another_type_proves_no_worker(name: x509.GeneralName) -> None:
    with pytest.raises(PermissionDenied, match=r"names no worker; it has sha256:"):
        WorkerAccess().credential(connection(CA.issue(name)))


def test_a_certificate_that_cannot_be_read_is_refused() -> None:
    with pytest.raises(Unauthenticated, match="the certificate of this connection cannot be parsed: it, or its ext"):
        WorkerAccess().credential(connection(CA.issue(extensions=[UNREADABLE_NAME])))
    with pytest.raises(Unauthenticated, match="has a subject alternative name with a control character; connect with"):
        WorkerAccess().credential(connection(CA.issue(x509.DNSName("gpu-1\0.evil.com"))))


def test_only_listed_workers_are_allowed_and_the_list_may_change(tmp_path: Path) -> None:
    path = listed(tmp_path / "workers", "gpu-2\n")
    allowed = WatchedFiles([path], parse_worker_list, what="list of workers")
    access = WorkerAccess(allowed=allowed)
    with pytest.raises(PermissionDenied, match="worker gpu-1 is not on the list of --worker-allow"):
        access.credential(connection(GPU_1))
    both = access.credential(connection(BOTH))  # one of its ids is listed
    assert both.refusal("gpu-2") is None and "not on the list" in str(both.refusal("gpu-1"))
    listed(path, "gpu-1\n", 2)
    assert allowed.refresh()
    access.credential(connection(GPU_1)).require("gpu-1")
    assert "not on the list" in str(both.refusal("gpu-2"))


@pytest.mark.parametrize("entry", ["gpu-1", f"sha256:{GPU_1.fingerprint}"], ids=["id", "fingerprint"])
def test_a_denied_worker_is_refused_from_then_on(tmp_path: Path, entry: str) -> None:
    path = listed(tmp_path / "denied", "")
    denied = WatchedFiles([path], parse_deny_list, what="deny list")
    access = WorkerAccess(denied=denied)
    credential = access.credential(connection(GPU_1))
    credential.require("gpu-1")
    listed(path, entry, 2)
    assert denied.refresh()
    assert credential.refusal("gpu-1") == "worker gpu-1 or its certificate is on the list of --tls-deny"
    with pytest.raises(PermissionDenied, match="is on the list of --tls-deny"):
        access.credential(connection(GPU_1))


def test_a_certificate_is_refused_from_its_end_on() -> None:
    now_s = 0.0
    access = WorkerAccess(wall_clock=lambda: now_s)
    credential = access.credential(connection(GPU_1))
    end_s = read_certificate(GPU_1.cert).not_after_s
    now_s = end_s - 0.1
    assert credential.refusal("gpu-1") is None
    now_s = end_s
    assert str(credential.refusal("gpu-1")).startswith("the worker's certificate has expired: it was valid until 20")
    with pytest.raises(PermissionDenied, match="has expired"):
        access.credential(connection(GPU_1))
