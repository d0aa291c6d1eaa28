"""Lists of workers and of refused certificates, one entry a line."""

from __future__ import annotations

import ipaddress

import pytest
from cryptography import x509

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


EVERY_TYPE = {
    "URI": x509.UniformResourceIdentifier("spiffe://Lab.example/user/Alice"),
    "DNS name": x509.DNSName("Ops.Example.org"),
    "wildcard": x509.DNSName("*.example.org"),
    "IPv4": x509.IPAddress(ipaddress.ip_address("10.0.0.7")),
    "IPv6": x509.IPAddress(ipaddress.ip_address("2001:db8::7")),
    "e-mail": x509.RFC822Name("alice@example.org"),
    "directory name": x509.DirectoryName(x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "ops.example.org")])),
    "registered id": x509.RegisteredID(x509.ObjectIdentifier("1.2.3.4")),
    "other name": x509.OtherName(x509.ObjectIdentifier("1.2.3.4"), b"\x0c\x03ops"),
    # Texts that have the form of another type, or a form that a list cannot have.
    "URI like a DNS name": x509.UniformResourceIdentifier("ops.example.org"),
    "URI like a fingerprint": x509.UniformResourceIdentifier("sha256://ab"),
    "URI with a comment": x509.UniformResourceIdentifier("spiffe://lab.example/a#b"),
    "URI with a space": x509.UniformResourceIdentifier("spiffe://lab.example/a b"),
    "URI like an address": x509.UniformResourceIdentifier("fe80::1"),
    "e-mail like a DNS name": x509.RFC822Name("ops.example.org"),
    "DNS name like an address": x509.DNSName("10.0.0.7"),
    "DNS name like a URI": x509.DNSName("spiffe://lab.example/user/alice"),
    "DNS name like a comment": x509.DNSName("#ops"),
}
AUTHENTICATES = {"URI", "DNS name", "wildcard", "IPv4", "IPv6", "URI like a fingerprint"}


@pytest.mark.parametrize("kind", EVERY_TYPE)
def test_what_authenticates_can_be_denied(kind: str) -> None:
    """The other types authenticate nobody: not a client, and not a worker."""
    certificate = read_certificate(CA.issue(EVERY_TYPE[kind]).cert)
    assert len(certificate.identities) == (kind in AUTHENTICATES)
    assert worker_ids_of(certificate) <= set(certificate.identities)
    for name in certificate.identities:
        for written in (name, name.upper(), f"  {name} # a comment"):
            assert parse_deny_list(written.encode()).names_any_of(certificate), written
    assert set(map(type, EVERY_TYPE.values())) == set(x509.GeneralName.__subclasses__()), "there are no other types"


@pytest.mark.parametrize("entry", ["alice@example.org", "urn:uuid:1", "a/b"])
def test_an_entry_that_can_name_no_certificate_is_refused(entry: str) -> None:
    with pytest.raises(ValueError, match=f"line 2: '{entry}' is not the name of a certificate; use a URI with '://'"):
        parse_deny_list(f"\n{entry}\n".encode())


def test_an_empty_deny_list_names_nobody() -> None:
    assert parse_deny_list(b"# nobody yet\n") == DenyList()
    assert not DenyList().names_any_of(read_certificate(CA.issue().cert))


def test_a_fingerprint_that_is_none_is_refused() -> None:
    with pytest.raises(ValueError, match="line 2: 'sha256:12ab' is not sha256: and 64 hexadecimal digits"):
        parse_deny_list(b"\nsha256:12ab\n")
