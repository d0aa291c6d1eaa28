"""A certificate of the HTTP port that is replaced while the port is open."""

from __future__ import annotations

import asyncio
import os
import ssl
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization

from gateway.http.certificate import INTERVAL_S, Certificate
from tests.fakes.authority import Authority


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    return tmp_path / "cert.pem", tmp_path / "key.pem"


def issue(authority: Authority, files: tuple[Path, Path], tmp_path: Path) -> None:
    for source, target in zip(authority.issue("localhost", "127.0.0.1").write(tmp_path / "new"), files, strict=True):
        Path(str(target) + ".part").write_bytes(Path(source).read_bytes())
        Path(str(target) + ".part").rename(target)


async def is_trusted(certificate: Certificate, authority: Authority, tmp_path: Path) -> bool:
    """Whether a client that knows this authority alone gets a connection."""

    async def serve(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=certificate.context)
    trusting = ssl.create_default_context(cafile=str(authority.write(tmp_path)))
    try:
        port = server.sockets[0].getsockname()[1]
        _, writer = await asyncio.open_connection("127.0.0.1", port, ssl=trusting)
        writer.close()
    except ssl.SSLCertVerificationError:
        return False
    finally:
        server.close()
    return True


@pytest.fixture(autouse=True)
def new_directory(tmp_path: Path) -> None:
    (tmp_path / "new").mkdir()


async def test_a_new_certificate_is_for_new_connections(files: tuple[Path, Path], tmp_path: Path) -> None:
    former, later = Authority(), Authority()
    issue(former, files, tmp_path)
    certificate = Certificate(*files)
    context = certificate.context
    certificate.look()
    assert certificate.context is context, "nothing has changed"
    issue(later, files, tmp_path)
    certificate.look()
    assert await is_trusted(certificate, later, tmp_path) and not await is_trusted(certificate, former, tmp_path)


async def test_half_written_files_leave_the_former_one(
    files: tuple[Path, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    authority, later = Authority(), Authority()
    issue(authority, files, tmp_path)
    certificate = Certificate(*files)
    key = files[1]
    whole = key.read_bytes()
    issue(later, files, tmp_path)
    new = key.read_bytes()
    for content in (b"", new[:100], whole):  # empty, cut off, of another certificate
        key.write_bytes(content)
        certificate.look()
        certificate.look()
        assert await is_trusted(certificate, authority, tmp_path)
    key.unlink()
    certificate.look()
    certificate.look()
    # Each failure once, however often the files are looked at.
    assert len([record for record in caplog.records if "the former one stays" in record.getMessage()]) == 4
    assert str(new) not in caplog.text
    key.write_bytes(new)
    certificate.look()
    assert await is_trusted(certificate, later, tmp_path)


async def test_the_files_are_looked_at_for_ever(files: tuple[Path, Path], tmp_path: Path) -> None:
    class Enough(Exception):
        pass

    later, pauses = Authority(), []
    issue(Authority(), files, tmp_path)
    certificate = Certificate(*files)

    async def sleep(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 3:
            raise Enough
        issue(later, files, tmp_path)

    with pytest.raises(Enough):
        await certificate.watch(sleep)
    assert pauses == [INTERVAL_S] * 3 and await is_trusted(certificate, later, tmp_path)


def test_files_that_cannot_be_used_are_an_error_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="No such file"):
        Certificate(tmp_path / "none", tmp_path / "none")
    (tmp_path / "cert.pem").write_bytes(b"x")
    with pytest.raises(ssl.SSLError):
        Certificate(tmp_path / "cert.pem", tmp_path / "cert.pem")


def test_a_named_pipe_and_an_encrypted_key_are_refused_at_once(files: tuple[Path, Path], tmp_path: Path) -> None:
    """Reading the pipe would wait for a writer, and OpenSSL would ask the terminal for the key's password."""
    issue(Authority(), files, tmp_path)
    certificate = Certificate(*files)
    former = certificate.context
    key = serialization.load_pem_private_key(files[1].read_bytes(), None)
    encrypted = serialization.BestAvailableEncryption(b"secret")
    pem, pkcs8 = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    files[1].write_bytes(key.private_bytes(pem, pkcs8, encrypted))
    certificate.look()
    files[1].unlink()
    os.mkfifo(files[1])
    certificate.look()
    assert certificate.context is former
