"""Lists of workers and of refused certificates, one entry a line."""

from __future__ import annotations

import pytest

from control_plane.access.name_lists import DenyList, parse_deny_list, parse_worker_list, worker_ids_of
from control_plane.access.peer_certificate import read_certificate
from tests.fakes.authority import Authority

CA = Authority()
GPU_1 = CA.issue("spiffe://lab.example/motet/worker/gpu-1", "GPU-1.lab.example")
ALICE = CA.issue("spiffe://lab.example/user/alice", "alice.example", "10.0.0.7")


def test_a_worker_list_has_ids_and_comments() -> None:
    assert parse_worker_list(b"# the two in the rack\n gpu-1  # left\n\r\ngpu-2\n") == {"gpu-1", "gpu-2"}
    assert parse_worker_list(b"") == frozenset()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"gpu-1\nGPU 2\n", "line 2: 'GPU 2' has a space; write one entry a line"),
        (b"gpu-1\nGPU-2\n", "line 2: 'GPU-2' is not a valid worker id: use 1 to 63 characters"),
        (b"\xff\xfe", "is not UTF-8 text"),
    ],
)
def test_a_worker_list_that_cannot_be_used_is_refused(content: bytes, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_worker_list(content)


def test_a_certificate_proves_the_worker_ids_of_its_uris_and_dns_names() -> None:
    assert worker_ids_of(read_certificate(GPU_1.cert)) == {"gpu-1", "gpu-1.lab.example"}
    for name in (
        "spiffe://lab.example/motet/worker/",
        "spiffe://lab.example/motet/worker/gpu-1/more",
        "spiffe:///motet/worker/gpu-1",
        "spiffe://lab.example/a/motet/worker/gpu-1",
        "https://lab.example/motet/worker/gpu-1",
        "10.0.0.7",
    ):
        assert worker_ids_of(read_certificate(CA.issue(name).cert)) == set(), name
    assert worker_ids_of(read_certificate(CA.issue().cert)) == set()
    assert worker_ids_of(read_certificate(CA.issue("*.lab.example").cert)) == {"*.lab.example"}, (
        "it matches itself only"
    )


def with_colons(fingerprint: str) -> str:
    return ":".join(fingerprint[at : at + 2] for at in range(0, 64, 2)).upper()


@pytest.mark.parametrize(
    "entry",
    [
        "gpu-1",
        "gpu-1.LAB.example",
        "spiffe://lab.example/motet/worker/gpu-1",
        f"sha256:{GPU_1.fingerprint}",
        f"SHA256:{with_colons(GPU_1.fingerprint)}",
    ],
    ids=["id", "DNS name", "URI", "fingerprint", "fingerprint with colons"],
)
def test_a_deny_list_names_certificates_by_worker_name_and_fingerprint(entry: str) -> None:
    denied = parse_deny_list(f"someone-else # a comment\n{entry}\n".encode())
    assert denied.names_any_of(read_certificate(GPU_1.cert))
    assert not denied.names_any_of(read_certificate(ALICE.cert))


def test_an_empty_deny_list_names_nobody() -> None:
    assert parse_deny_list(b"# nobody yet\n") == DenyList()
    assert not DenyList().names_any_of(read_certificate(CA.issue().cert))


def test_a_fingerprint_that_is_none_is_refused() -> None:
    with pytest.raises(ValueError, match="line 2: 'sha256:12ab' is not sha256: and 64 hexadecimal digits"):
        parse_deny_list(b"\nsha256:12ab\n")
