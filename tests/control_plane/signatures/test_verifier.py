"""Signatures of the tool are read; a signature with anything wrong in it is refused, and the reason is said."""

from __future__ import annotations

import base64
import datetime
import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    PublicFormat,
    load_pem_private_key,
    load_pem_public_key,
)

from control_plane.access.watched_files import WatchedFiles
from control_plane.errors import SignatureInvalid
from control_plane.registry.adapter_files import PEFT
from control_plane.signatures.bundle import MAX_SIGNATURE_BYTES
from control_plane.signatures.signers import Signers, read_signers
from control_plane.signatures.verdict import SignatureMethod, SignatureVerdict
from control_plane.signatures.verifier import SignatureVerifier
from tests.control_plane.signatures.making import BUNDLES, FILES, Maker, signers, write
from tests.fakes.authority import Authority, Issued

NOW_S = datetime.datetime(2026, 6, 1, tzinfo=datetime.UTC).timestamp()  # the certificates of the bundles are valid
MAKER = Maker()


def verifier(
    directory: Path, trusted: Signers, *, is_required: bool = False, now_s: float = NOW_S
) -> SignatureVerifier:
    file = directory / "signers.json"
    file.touch()
    watched = WatchedFiles([file], lambda _: trusted, what="signers")
    return SignatureVerifier(watched, is_required=is_required, wall_clock=lambda: now_s)


def verify(
    directory: Path, signature: bytes | None, trusted: Signers, *, tenant: str = "team-a", **settings: Any
) -> SignatureVerdict | None:
    return verifier(directory, trusted, **settings).verify(tenant, write(directory, signature))[1]


@pytest.mark.parametrize("curve", ["p256", "p384", "p521"])
def test_a_signature_of_the_tool_by_a_key_is_verified(tmp_path: Path, curve: str) -> None:
    pem = (BUNDLES / f"{curve}.pub").read_text()
    verdict = verify(tmp_path, (BUNDLES / f"{curve}.sig").read_bytes(), signers(everybody=[("release", pem)]))
    spki = load_pem_public_key(pem.encode()).public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    assert verdict == SignatureVerdict("release", SignatureMethod.KEY, hashlib.sha256(spki).hexdigest(), NOW_S)


def test_a_signature_of_the_tool_by_a_certificate_is_verified(tmp_path: Path) -> None:
    trusted = signers(everybody=[("ours", (BUNDLES / "root.pem").read_text())])
    verdict = verify(tmp_path, (BUNDLES / "certificate.sig").read_bytes(), trusted)
    assert verdict is not None and verdict.method is SignatureMethod.CERTIFICATE
    assert (verdict.signer, verdict.subject) == ("ours", "CN=Motet's test signer")


def test_only_the_signers_of_the_tenant_count(tmp_path: Path) -> None:
    trusted = signers(**{"team-a": [("a", MAKER.pem)], "team-b": [("b", Maker().pem)]})
    verdict = verify(tmp_path, MAKER.sign(), trusted)
    assert verdict is not None and verdict.signer == "a"
    for tenant in ("team-b", "team-c", "*"):
        with pytest.raises(SignatureInvalid, match="signed by a key that is not trusted here"):
            verify(tmp_path, MAKER.sign(), trusted, tenant=tenant)


def test_a_missing_signature_is_refused_where_one_is_required(tmp_path: Path) -> None:
    trusted = signers(everybody=[("a", MAKER.pem)])
    assert verify(tmp_path, None, trusted) is None
    with pytest.raises(SignatureInvalid, match=r"has no model\.sig, and this server registers signed adapters only"):
        verify(tmp_path, None, trusted, is_required=True)
    assert verify(tmp_path, MAKER.sign(), trusted, is_required=True) is not None


def test_without_trusted_signers_a_signature_is_left_out(tmp_path: Path) -> None:
    files, verdict = SignatureVerifier().verify("team-a", write(tmp_path, b"garbage"))
    assert verdict is None and sorted(files) == sorted(FILES)


def test_files_that_may_change_are_copied_while_they_are_verified(tmp_path: Path) -> None:
    """Whoever may write to the operator's directory could exchange the weights between verifying and packing."""
    files = write(tmp_path, MAKER.sign())
    copies = tmp_path / "copies"
    copies.mkdir()
    found, verdict = verifier(tmp_path, signers(everybody=[("a", MAKER.pem)])).verify("t", files, copies)
    for path in files.values():
        path.write_bytes(b"exchanged")
    assert verdict is not None
    assert {name: path.read_bytes() for name, path in found.items()} == FILES
    assert all(path.parent == copies for path in found.values())


def test_changed_signers_count_without_a_restart(tmp_path: Path) -> None:
    file = tmp_path / "signers.json"
    file.write_text(json.dumps({"*": [{"name": "a", "pem": MAKER.pem}]}))
    watched = WatchedFiles([file], read_signers, what="signers")
    judge, files = SignatureVerifier(watched, wall_clock=lambda: NOW_S), write(tmp_path, MAKER.sign())
    assert judge.verify("t", files)[1] is not None
    file.write_text("{}")
    assert watched.refresh()
    with pytest.raises(SignatureInvalid, match="not trusted here"):
        judge.verify("t", files)


# ---- tampering ----


def member(*path: str | int, value: Any) -> Callable[[dict[str, Any]], None]:
    """Sets one member of a document, by its path."""

    def change(document: Any) -> None:
        for part in path[:-1]:
            document = document[part]
        if value is None:
            del document[path[-1]]
        else:
            document[path[-1]] = value

    return change


def flipped_signature(bundle: dict[str, Any]) -> None:
    entry = bundle["dsseEnvelope"]["signatures"][0]
    raw = bytearray(base64.b64decode(entry["sig"]))
    raw[-1] ^= 1
    entry["sig"] = base64.b64encode(raw).decode()


def payload_of_others(bundle: dict[str, Any]) -> None:
    bundle["dsseEnvelope"]["payload"] = base64.b64encode(b'{"_type": "another"}').decode()


def exchanged_digests(statement: dict[str, Any]) -> None:
    first, second = statement["predicate"]["resources"]
    first["digest"], second["digest"] = second["digest"], first["digest"]


def listed_twice(statement: dict[str, Any]) -> None:
    statement["predicate"]["resources"].append(dict(statement["predicate"]["resources"][0]))


PREDICATE = ("predicate", "serialization")
ENVELOPE = "dsseEnvelope"
STATEMENTS = {  # changed before they are signed, by the trusted key itself
    "another predicate": (
        member("predicateType", value="https://slsa.dev/provenance/v1"),
        "predicateType is 'https://s",
    ),
    "an old predicate": (member("predicateType", value="https://model_signing/Digests/v0.1"), "predicateType is"),
    "no predicate type": (member("predicateType", value=None), "predicateType is missing"),
    "another statement": (member("_type", value="https://in-toto.io/Statement/v0.1"), "_type is"),
    "shards": (member(*PREDICATE, "method", value="shards"), "serialization.method is 'shards'; it must be 'files'"),
    "another hash": (member(*PREDICATE, "hash_type", value="blake3"), "serialization.hash_type is 'blake3'"),
    "another root digest": (member("subject", 0, "digest", "sha256", value="0" * 64), "root digest is not that"),
    "no subject": (member("subject", value=[]), "has 0 subjects"),
    "two subjects": (member("subject", value=[{}, {}]), "has 2 subjects"),
    "no resources": (member("predicate", "resources", value=None), "resources is missing"),
    "a resource without a digest": (member("predicate", "resources", 0, "digest", value=None), "without a sha256"),
    "a short digest": (member("predicate", "resources", 0, "digest", value="ab"), "without a sha256"),
    "another algorithm": (member("predicate", "resources", 0, "algorithm", value="blake2"), "algorithm is 'blake2'"),
    "a name of another type": (member("predicate", "resources", 0, "name", value=7), "without a name"),
    "a resource of another type": (member("predicate", "resources", 0, value="x"), "not an object"),
    "digests exchanged": (exchanged_digests, "root digest is not that"),
    "a file twice": (listed_twice, "names a file twice"),
}
BUNDLE_CHANGES = {
    "a changed payload": (payload_of_others, "the signature is not that of its payload"),
    "a changed signature": (flipped_signature, "the signature is not that of its payload"),
    "an empty signature": (member(ENVELOPE, "signatures", 0, "sig", value=""), "the signature is not that"),
    "no signature": (member(ENVELOPE, "signatures", value=[]), "has 0 entries; there must be one"),
    "two signatures": (member(ENVELOPE, "signatures", value=[{}, {}]), "has 2 entries"),
    "a signature that is not base64": (member(ENVELOPE, "signatures", 0, "sig", value="*"), "is not base64"),
    "a payload that is not base64": (member(ENVELOPE, "payload", value="é"), "is not base64"),
    "another payload type": (member(ENVELOPE, "payloadType", value="text/plain"), "payloadType is 'text/plain'"),
    "another bundle": (member("mediaType", value="application/json"), "mediaType is 'application/json'"),
    "no envelope": (member(ENVELOPE, value=None), "dsseEnvelope is missing"),
    "no key": (member("verificationMaterial", value={}), "neither a key nor certificates; sign with"),
    "a keyless certificate": (member("verificationMaterial", value={"certificate": {}}), "has certificate; sign with"),
    "a hint of another type": (member("verificationMaterial", "publicKey", "hint", value=7), "hint is not a string"),
    "another key's hint": (member("verificationMaterial", "publicKey", "hint", value="0" * 64), "not trusted here"),
    "no certificate": (
        member("verificationMaterial", value={"x509CertificateChain": {"certificates": []}}),
        "has 0 certificates",
    ),
    "garbage for a certificate": (
        member("verificationMaterial", value={"x509CertificateChain": {"certificates": [{"rawBytes": "AAAA"}]}}),
        "a certificate that cannot be read",
    ),
}


@pytest.mark.parametrize("case", STATEMENTS)
def test_a_statement_that_says_something_else_is_refused_though_it_is_signed(tmp_path: Path, case: str) -> None:
    change, words = STATEMENTS[case]
    with pytest.raises(SignatureInvalid) as caught:
        verify(tmp_path, MAKER.sign(before=change), signers(everybody=[("a", MAKER.pem)]))
    assert words in str(caught.value) and len(str(caught.value)) < 700


@pytest.mark.parametrize("case", BUNDLE_CHANGES)
def test_a_bundle_that_was_changed_is_refused(tmp_path: Path, case: str) -> None:
    change, words = BUNDLE_CHANGES[case]
    with pytest.raises(SignatureInvalid) as caught:
        verify(tmp_path, MAKER.sign(after=change), signers(everybody=[("a", MAKER.pem)]))
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({**FILES, "adapter_config.json": b"{}"}, "adapter_config.json is not the file that model.sig signs"),
        ({**FILES, "adapter_model.safetensors": b"x"}, "adapter_model.safetensors is not the file"),
        ({"adapter_config.json": FILES["adapter_config.json"]}, "adapter_model.safetensors is not among the files"),
        ({f"below/{name}": data for name, data in FILES.items()}, "is not among the files that model.sig signs"),
        ({name.upper(): data for name, data in FILES.items()}, "is not among the files that model.sig signs"),
        ({}, "is not among the files"),
    ],
)
def test_files_other_than_those_that_were_signed_are_refused(
    tmp_path: Path, files: dict[str, bytes], words: str
) -> None:
    with pytest.raises(SignatureInvalid, match=words):
        verify(tmp_path, MAKER.sign(files), signers(everybody=[("a", MAKER.pem)]))


def test_a_signed_chat_template_that_was_taken_away_is_missed(tmp_path: Path) -> None:
    """An attack would register signed weights without the template that their author signed with them."""
    signature = MAKER.sign({**FILES, "chat_template.jinja": b"{{ safe }}"})
    judge = verifier(tmp_path, signers(everybody=[("a", MAKER.pem)]))
    with pytest.raises(SignatureInvalid, match=r"chat_template\.jinja is among the files .* and is missing"):
        judge.verify("team-a", write(tmp_path, signature), demanded=PEFT.companions)


def test_files_that_are_signed_and_not_uploaded_are_fine(tmp_path: Path) -> None:
    signature = MAKER.sign({**FILES, "README.md": b"signed, too"})
    assert verify(tmp_path, signature, signers(everybody=[("a", MAKER.pem)])) is not None


@pytest.mark.parametrize(
    ("signature", "words"),
    [
        (b"", "is not valid JSON"),
        (b"\xff\xfe", "is not valid JSON"),
        (b"[]", "is not a JSON object"),
        (b"[" * 100_000, "is nested too deeply"),
        (b'{"a":' * 50_000, "is nested too deeply"),
        (b" " * (MAX_SIGNATURE_BYTES + 1), f"has {MAX_SIGNATURE_BYTES + 1} bytes; at most {MAX_SIGNATURE_BYTES}"),
        (b'{"mediaType": "a", "mediaType": "b"}', "a member appears twice"),
        (b'{"mediaType": ' + b"9" * 10_000 + b"}", "is not valid JSON"),
    ],
)
def test_what_is_no_bundle_is_refused(tmp_path: Path, signature: bytes, words: str) -> None:
    with pytest.raises(SignatureInvalid, match=words):
        verify(tmp_path, signature, signers(everybody=[("a", MAKER.pem)]))


@pytest.mark.parametrize("payload", [b"[" * 100_000, b"\xff", b'{"_type": 1, "_type": 2}', b"7"])
def test_a_payload_that_is_no_statement_is_refused_though_it_is_signed(tmp_path: Path, payload: bytes) -> None:
    with pytest.raises(SignatureInvalid, match=r"the statement is (nested too deeply|not )"):
        verify(tmp_path, MAKER.sign(payload=payload), signers(everybody=[("a", MAKER.pem)]))


# ---- certificates ----


def signing_certificate(authority: Authority, *, is_for_signing: bool = True) -> Issued:
    usage = x509.KeyUsage(is_for_signing, False, not is_for_signing, False, False, False, False, False, False)
    return authority.issue(extensions=[usage, x509.BasicConstraints(ca=False, path_length=None)])


def below(issued: Issued) -> Maker:
    """Signs with a certificate that was signed by one that is not an authority."""
    issuer, key = x509.load_pem_x509_certificate(issued.cert), ec.generate_private_key(ec.SECP256R1())
    issuer_key = load_pem_private_key(issued.key, None)
    assert isinstance(issuer_key, ec.EllipticCurvePrivateKey)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "below")]))
        .issuer_name(issuer.subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(issuer.not_valid_before_utc)
        .not_valid_after(issuer.not_valid_after_utc)
        .add_extension(x509.KeyUsage(True, *[False] * 8), critical=True)
        .sign(issuer_key, hashes.SHA256())
    )
    return Maker(key, (certificate.public_bytes(Encoding.PEM), issued.cert))


def test_a_chain_below_a_trusted_certificate_is_verified(tmp_path: Path) -> None:
    authority, now_s = Authority(), datetime.datetime.now(datetime.UTC).timestamp()
    maker = Maker.of(signing_certificate(authority))
    verdict = verify(tmp_path, maker.sign(), signers(everybody=[("ours", authority.pem.decode())]), now_s=now_s)
    assert verdict is not None and verdict.signer == "ours" and verdict.subject.startswith("O=Motet")


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("another authority", "its certificate is not trusted: "),
        ("expired", "its certificate is not trusted: "),
        ("not yet valid", "its certificate is not trusted: "),
        ("not for signing", "its certificate is not made for signing"),
        ("another key", "the signature is not that of its payload"),
        ("no authority configured", "no certificate is trusted here"),
        ("an issuer that is not an authority", "its certificate is not trusted: "),
    ],
)
def test_a_certificate_that_does_not_count_is_refused(tmp_path: Path, case: str, words: str) -> None:
    authority, now_s = Authority(), datetime.datetime.now(datetime.UTC).timestamp()
    issued = signing_certificate(authority, is_for_signing=case != "not for signing")
    maker, pem = Maker.of(issued), authority.pem.decode()
    match case:
        case "another authority":
            pem = Authority().pem.decode()
        case "expired":
            now_s += datetime.timedelta(days=2).total_seconds()
        case "not yet valid":
            now_s -= datetime.timedelta(days=60).total_seconds()
        case "another key":
            maker.key = ec.generate_private_key(ec.SECP256R1())
        case "no authority configured":
            pem = MAKER.pem
        case "an issuer that is not an authority":
            maker = below(issued)
    trusted = signers(everybody=[("ours", pem)])
    with pytest.raises(SignatureInvalid) as caught:
        verify(tmp_path, maker.sign(), trusted, now_s=now_s)
    assert words in str(caught.value)


# Bytes of a certificate, and others of the same length: a version that does not exist, and keys of unknown kinds.
UNREADABLE = {
    "version": ("a003020102", "a003020105"),
    "kind of key": ("06072a8648ce3d0201", "06072a8648ce3d0209"),
    "curve": ("06082a8648ce3d030107", "06082a8648ce3d03017f"),
}


def unreadable(der: bytes, what: str) -> bytes:
    former, other = map(bytes.fromhex, UNREADABLE[what])
    assert former in der
    return der.replace(former, other, 1)


@pytest.mark.parametrize("what", UNREADABLE)
def test_a_certificate_of_an_unknown_form_is_the_callers_mistake(tmp_path: Path, what: str) -> None:
    """It was a mistake of ours, with a traceback in the log for each such registration."""
    authority = Authority()

    def damage(bundle: dict[str, Any]) -> None:
        [listed] = bundle["verificationMaterial"]["x509CertificateChain"]["certificates"]
        listed["rawBytes"] = base64.b64encode(unreadable(base64.b64decode(listed["rawBytes"]), what)).decode()

    signature = Maker.of(signing_certificate(authority)).sign(after=damage)
    with pytest.raises(SignatureInvalid, match="has a certificate that cannot be read"):
        verify(tmp_path, signature, signers(everybody=[("ours", authority.pem.decode())]))


# ---- the operator's file ----


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"{", "is not valid JSON"),
        (b"[" * 100_000, "is not valid JSON"),
        (b"[]", "is not a JSON object"),
        (b'{"a": [], "a": []}', "'a' appears twice in one object"),
        (b'{"A B": []}', r"is neither '\*' nor a tenant"),
        (b'{"a": {}}', "a: is not a list"),
        (b'{"a": [{"name": "x"}]}', r"a\[0\]: must have \"name\" and \"pem\""),
        (b'{"a": [{"name": "", "pem": "x"}]}', "name must have 1 to 128"),
        (b'{"a": [{"name": "x", "pem": "x"}]}', r"a\[0\] \(x\): pem is neither a public key nor a certificate"),
        (b'{"a": [{"name": "x", "pem": "-----BEGIN CERTIFICATE-----"}]}', "neither a public key nor a certificate"),
    ],
)
def test_a_file_of_signers_that_cannot_be_read_says_why(content: bytes, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        read_signers(content)


def test_keys_of_other_kinds_are_refused_by_name() -> None:
    other = rsa.generate_private_key(65537, 2048).public_key()
    pems = [
        other.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo).decode(),
        Maker(ec.generate_private_key(ec.SECP256K1())).pem,
    ]
    for pem in pems:
        with pytest.raises(ValueError, match="the key is not on the curve P-256, P-384 or P-521"):
            signers(everybody=[("x", pem)])
