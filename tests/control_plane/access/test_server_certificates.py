"""Certificates of a port: what is refused, and how new ones take effect while streams go on."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import logging
import ssl
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519

from control_plane.access.server_certificates import ServerCertificates, credentials, parse, watch
from control_plane.access.watched_files import WatchedFiles
from control_plane.api.rpc.rpc_server import rpc_server
from tests.fakes.authority import LOCALHOST, Authority, Issued, overwrite

CA = Authority()
SERVER = CA.issue(*LOCALHOST)


def encrypted(key: bytes) -> bytes:
    private = serialization.load_pem_private_key(key, None)
    how = serialization.BestAvailableEncryption(b"password")
    return private.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, how)


def ed25519_key() -> bytes:
    none = serialization.NoEncryption()
    key = ed25519.Ed25519PrivateKey.generate()
    return key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, none)


@pytest.mark.parametrize(
    ("chain", "key", "client_ca", "message"),
    [
        (SERVER.cert, CA.issue("other").key, None, "the key does not belong to the certificate"),
        (SERVER.cert[:-40], SERVER.key, None, "the certificate's file has no complete certificate in PEM"),
        (
            SERVER.cert + CA.pem[:-40],
            SERVER.key,
            None,
            "the certificate's file has 2 PEM blocks, of which 1 are comple",
        ),
        (b"", SERVER.key, None, "the certificate's file has no complete certificate in PEM"),
        (SERVER.cert, SERVER.key[:-60], None, "the key's file has no complete private key in PEM"),
        (SERVER.cert, b"", None, "the key's file has no complete private key in PEM"),
        (SERVER.cert, encrypted(SERVER.key), None, "the key is encrypted; give a key without a password"),
        (SERVER.cert, ed25519_key(), None, "a key of this kind is not used; make one of EC P-256 or P-384, or RSA"),
        (SERVER.cert, SERVER.key, b"", "the file of authorities has no complete certificate in PEM"),
        (SERVER.cert, SERVER.key, CA.pem + CA.pem[:99], "the file of authorities has 2 PEM blocks, of which 1"),
    ],
    ids=[
        "key of another",
        "half a certificate",
        "half a chain",
        "no certificate",
        "half a key",
        "no key",
        "encrypted key",
        "ed25519",
        "no authority",
        "half an authority",
    ],
)
def test_files_that_cannot_be_used_are_refused(chain: bytes, key: bytes, client_ca: bytes | None, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse(chain, key, client_ca)


def test_keys_that_gprc_cannot_use_are_refused() -> None:
    p521 = CA.issue(*LOCALHOST, curve=ec.SECP521R1())
    with pytest.raises(ValueError, match="a key of this kind is not used"):
        parse(p521.cert, p521.key)


def changed(pem: bytes, former: str, other: str) -> bytes:
    """A certificate with other bytes of the same length."""
    der = ssl.PEM_cert_to_DER_cert(pem.decode())
    assert bytes.fromhex(former) in der
    return ssl.DER_cert_to_PEM_cert(der.replace(bytes.fromhex(former), bytes.fromhex(other), 1)).encode()


def test_a_certificate_of_an_unknown_form_is_refused() -> None:
    """While a server runs, it may not end the look at the files with a traceback."""
    version = changed(SERVER.cert, "a003020102", "a003020105")
    for chain, client_ca in ((version, None), (SERVER.cert, version)):
        with pytest.raises(ValueError, match="has no complete certificate in PEM"):
            parse(chain, SERVER.key, client_ca)
    with pytest.raises(ValueError, match="the certificate's key is of an unknown kind"):
        parse(changed(SERVER.cert, "06072a8648ce3d0201", "06072a8648ce3d0209"), SERVER.key)


def test_an_expired_certificate_is_refused() -> None:
    expired = CA.issue(*LOCALHOST, lasts=-datetime.timedelta(hours=1))
    with pytest.raises(ValueError, match=r"the certificate has expired: it was valid until 20\d\d-\d\d-\d\d"):
        parse(expired.cert, expired.key)
    end_s = x509.load_pem_x509_certificate(SERVER.cert).not_valid_after_utc.timestamp()
    assert parse(SERVER.cert, SERVER.key, wall_clock=lambda: end_s - 1).not_after_s == end_s
    with pytest.raises(ValueError, match="expired"):
        parse(SERVER.cert, SERVER.key, wall_clock=lambda: end_s)


def test_a_chain_with_several_certificates_and_authorities_is_taken_whole() -> None:
    value = parse(SERVER.cert + CA.pem, SERVER.key, CA.pem + Authority().pem)
    assert value.chain == SERVER.cert + CA.pem and SERVER.key.decode().split("\n")[1] not in repr(value)


def test_a_key_that_everybody_may_read_is_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    cert, key = SERVER.write(tmp_path)
    watch(cert, key, None, port="clients'")
    assert not caplog.records
    key.chmod(0o644)
    watch(cert, key, None, port="clients'")
    assert [record.getMessage() for record in caplog.records] == [
        f"private key readable by every user of this machine file={key}; chmod 600 it"
    ]


class Port:
    """A server with one method that counts up until its client leaves."""

    def __init__(self, files: WatchedFiles[ServerCertificates], authority: Authority) -> None:
        self.files = files
        self.authority = authority
        self.server = rpc_server()
        counting = grpc.unary_stream_rpc_method_handler(self._count)
        self.server.add_registered_method_handlers("test", {"Count": counting})
        self.number = self.server.add_secure_port("127.0.0.1:0", credentials(files))

    async def _count(self, _request: bytes, context: grpc.aio.ServicerContext[bytes, bytes]) -> AsyncIterator[bytes]:
        presented = context.auth_context() or {}
        yield b",".join(presented.get("x509_subject_alternative_name", ()))
        while True:
            yield b"more"
            await asyncio.sleep(0)

    def channel(self, own: Issued | None = None, authority: Authority | None = None) -> grpc.aio.Channel:
        options = [("grpc.use_local_subchannel_pool", 1)]  # a connection of its own
        trusted = (authority or self.authority).channel_credentials(own)
        return grpc.aio.secure_channel(f"localhost:{self.number}", trusted, options)


@contextlib.asynccontextmanager
async def serving(directory: Path, *, client_ca: bytes | None = None) -> AsyncIterator[Port]:
    cert, key = SERVER.write(directory)
    ca = None
    if client_ca is not None:
        ca = directory / "clients.pem"
        ca.write_bytes(client_ca)
    port = Port(watch(cert, key, ca, port="clients'"), CA)
    await port.server.start()
    try:
        yield port
    finally:
        await port.server.stop(None)


def count(channel: grpc.aio.Channel) -> grpc.aio.UnaryStreamCall[bytes, bytes]:
    method: grpc.aio.UnaryStreamMultiCallable[bytes, bytes] = channel.unary_stream("/test/Count", None, None)
    return method(b"", timeout=30)


async def first_of(channel: grpc.aio.Channel) -> bytes:
    async with channel:
        call = count(channel)
        names = await call.read()
        assert isinstance(names, bytes), names
        call.cancel()
        return names


async def test_connections_after_a_rotation_have_the_new_certificate_and_streams_before_it_go_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    other = Authority()
    async with serving(tmp_path) as port, port.channel() as before:
        running = count(before)
        assert await running.read() == b""
        other.issue(*LOCALHOST).write(tmp_path)
        assert port.files.refresh()
        assert "certificate of the clients' port valid until 20" in caplog.text
        assert await first_of(port.channel(authority=other)) == b""
        with pytest.raises(grpc.aio.AioRpcError, match="CERTIFICATE_VERIFY_FAILED"):
            await first_of(port.channel())
        for _ in range(100):
            assert await running.read() == b"more"
        running.cancel()


async def test_half_written_files_keep_the_old_certificate(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    new = Authority().issue(*LOCALHOST)
    async with serving(tmp_path) as port:
        cert, key = tmp_path / "server.pem", tmp_path / "server.key"
        for path, content in (
            (cert, new.cert[:300]),  # half a file
            (cert, new.cert),  # and the key is the old one's
            (key, new.key[:100]),
            (key, b""),
        ):
            overwrite(path, content)
            assert not port.files.refresh()
            assert await first_of(port.channel()) == b""
        assert caplog.text.count("file not read again, the former content stays") == 4
        assert "PRIVATE" not in caplog.text
        overwrite(key, new.key)
        assert port.files.refresh()
        with pytest.raises(grpc.aio.AioRpcError, match="CERTIFICATE_VERIFY_FAILED"):
            await first_of(port.channel())


async def test_rotation_under_load_fails_no_stream(tmp_path: Path) -> None:
    """Twenty rotations among certificates of one authority, while clients connect and read all the time."""
    async with serving(tmp_path) as port:
        rotating = True

        async def client() -> int:
            num_streams = 0
            while rotating:
                channel = port.channel()
                async with channel:
                    call = count(channel)
                    for _ in range(20):
                        assert isinstance(await call.read(), bytes)
                    call.cancel()
                num_streams += 1
            return num_streams

        clients = [asyncio.create_task(client()) for _ in range(8)]
        for _ in range(20):
            CA.issue(*LOCALHOST).write(tmp_path)
            assert await asyncio.to_thread(port.files.refresh)
            async with port.channel() as channel:
                call = count(channel)
                assert isinstance(await call.read(), bytes)
                call.cancel()
        rotating = False
        assert min(await asyncio.gather(*clients)) > 0


async def test_peers_that_must_present_a_certificate_get_no_connection_without_a_valid_one(tmp_path: Path) -> None:
    stranger = Authority().issue("alice")
    expired = CA.issue("alice", lasts=-datetime.timedelta(hours=1))
    async with serving(tmp_path, client_ca=CA.pem) as port:
        assert await first_of(port.channel(CA.issue("alice", "spiffe://acme/bob"))) == b"alice,spiffe://acme/bob"
        for own in (None, stranger, expired):
            with pytest.raises(grpc.aio.AioRpcError, match="failed to connect to all addresses"):
                await first_of(port.channel(own))
        with pytest.raises(grpc.aio.AioRpcError, match="failed to connect to all addresses"):
            await first_of(grpc.aio.insecure_channel(f"localhost:{port.number}"))


async def test_a_certificate_that_nobody_verifies_is_no_identity(tmp_path: Path) -> None:
    """Without authorities gRPC requests no certificate, so that none reaches a handler, whoever signed it."""
    async with serving(tmp_path) as port:
        assert await first_of(port.channel(Authority().issue("admin"))) == b""


async def test_authorities_of_clients_are_rotated_with_the_certificate(tmp_path: Path) -> None:
    other = Authority()
    async with serving(tmp_path, client_ca=CA.pem) as port:
        alice, bob = CA.issue("alice"), other.issue("bob")
        with pytest.raises(grpc.aio.AioRpcError):
            await first_of(port.channel(bob))
        overwrite(tmp_path / "clients.pem", other.pem)
        assert port.files.refresh()
        assert await first_of(port.channel(bob)) == b"bob"
        with pytest.raises(grpc.aio.AioRpcError):
            await first_of(port.channel(alice))


def test_grpc_gets_a_configuration_only_when_there_is_a_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise it would build everything anew for each handshake."""
    cert, key = SERVER.write(tmp_path)
    files = watch(cert, key, None, port="clients'")
    given: list[Any] = []
    monkeypatch.setattr(grpc, "dynamic_ssl_server_credentials", lambda *args, **_: given.extend(args))
    credentials(files)
    fetch = given[1]
    assert fetch() is None
    CA.issue(*LOCALHOST).write(tmp_path)
    assert files.refresh()
    assert fetch() is not None and fetch() is None
