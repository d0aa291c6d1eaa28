"""Keys of tokens: which are used, from a file and from a URL, and what happens when they cannot be had."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from control_plane.access.authentication.grants import InvalidAccessFile
from control_plane.access.authentication.jwks import MIN_INTERVAL_S, JwksFile, JwksUrl, parse_jwks
from tests.control_plane.access.authentication.tokens import jwk, jwks, private_key

ED, ES, RS = private_key("EdDSA"), private_key("ES256"), private_key("RS256")
NONE, ONE, TWO = jwks(), jwks(jwk(ED, "one")), jwks(jwk(ED, "one"), jwk(ES, "two"))


def test_each_key_serves_one_algorithm() -> None:
    keys = parse_jwks(jwks(jwk(ED, "k"), jwk(ES, "k"), jwk(RS, "k"), jwk(private_key("EdDSA", 1))))
    assert set(keys.by_name) == {("k", "EdDSA"), ("k", "ES256"), ("k", "RS256"), (None, "EdDSA")}
    assert keys.find("k", "EdDSA") is keys.by_name["k", "EdDSA"]
    assert keys.find(None, "RS256") is keys.by_name["k", "RS256"]  # the only one of its algorithm
    assert keys.find(None, "EdDSA") is None and keys.find("j", "RS256") is None


def test_keys_of_other_kinds_are_left_out() -> None:
    others: list[dict[str, Any]] = [
        {"kty": "oct", "k": "c2VjcmV0"},
        {"kty": "EC", "crv": "P-384", "x": "AA", "y": "AA"},
        {"kty": "OKP", "crv": "X25519", "x": "AA"},
        {"kty": "AKP", "alg": "ML-DSA-44", "pub": "AA"},
        {"kty": ["RSA"]},
        {"kty": "EC", "crv": ["P-256"]},
        jwk(RS, "enc", use="enc"),
        jwk(RS, "oaep", alg="RSA-OAEP"),
        jwk(RS, "rs512", alg="RS512"),
        jwk(RS, "wrap", key_ops=["wrapKey"]),
    ]
    keys = parse_jwks(jwks(*others, jwk(ED, "ed", alg="Ed25519", use="sig", key_ops=["verify"])))
    assert set(keys.by_name) == {("ed", "EdDSA")}
    assert not parse_jwks(jwks(*others)).by_name


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"[]", "is a JSON list"),
        (b"{}", "keys: is not a list of objects"),
        (b'{"keys": [1]}', "keys: is not a list of objects"),
        (jwks(jwk(private_key("rsa1024"), "weak")), r"keys\[0\]: has 1024 bits; RSA keys of 2048 to 8192"),
        (jwks(jwk(RS, n="AQAB" * 2000)), r"RSA keys of 2048 to 8192 are used"),
        (jwks(jwk(ED, "a"), jwk(private_key("EdDSA", 1), "a")), r"keys\[1\]\.kid: 'a' names two keys for EdDSA"),
        (jwks(jwk(ED, d="secret-part")), r"keys\[0\]: is a private key"),
        (jwks(jwk(ED, kid=5)), r"keys\[0\]\.kid: 5 is not a string"),  # type: ignore[arg-type]  # as a file may have it
        (jwks(jwk(ES, y="AAAA")), r"keys\[0\]: is not a valid key of type EC"),
        (jwks(jwk(ED, x=7)), r"keys\[0\]: needs the members crv, x"),
        (jwks(*(jwk(private_key("EdDSA"), str(i)) for i in range(101))), "has 101 entries; at most 100"),
    ],
)
def test_a_key_that_is_weak_private_or_damaged_is_refused(content: bytes, message: str) -> None:
    with pytest.raises(InvalidAccessFile, match=message) as caught:
        parse_jwks(content)
    assert "secret-part" not in str(caught.value)


def test_keys_of_a_file_change_with_it(tmp_path: Path) -> None:
    path = tmp_path / "jwks.json"
    path.write_bytes(ONE)
    source = JwksFile(path)
    first = source.value
    assert not source.files.refresh() and source.value is first and not source.wants_other_keys()
    path.write_bytes(TWO)
    assert source.files.refresh() and len(source.value.by_name) == 2


def test_a_file_without_a_key_ends_a_start_and_later_ends_every_token(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """An issuer whose only key was stolen publishes a set without it."""
    path = tmp_path / "jwks.json"
    path.write_bytes(NONE)
    with pytest.raises(InvalidAccessFile, match="has none for RS256, ES256 or EdDSA"):
        JwksFile(path)
    path.write_bytes(ONE)
    source = JwksFile(path)
    path.write_bytes(NONE)
    assert source.files.refresh() and not source.value.by_name
    assert "token keys removed, every token is refused" in caplog.text


class Remote:
    """What is at the URL; every fetch waits for its turn."""

    def __init__(self, *responses: bytes | Exception) -> None:
        self.responses = list(responses)
        self.turns: asyncio.Queue[None] = asyncio.Queue()
        self.loop = asyncio.get_running_loop()
        self.may_go = threading.Semaphore(0)

    def __call__(self, url: str) -> bytes:
        self.loop.call_soon_threadsafe(self.turns.put_nowait, None)
        assert self.may_go.acquire(timeout=60)
        response = self.responses.pop(0)
        if isinstance(response, Exception):
            raise response
        return response


@contextlib.asynccontextmanager
async def opened(remote: Remote, **settings: Any) -> Any:
    source = JwksUrl("https://id.example/jwks", remote, **settings)
    remote.may_go.release()
    await source.open()
    await remote.turns.get()
    yield source
    await source.close()


async def until(is_true: Callable[[], bool]) -> None:
    while not is_true():
        await asyncio.sleep(0)


async def test_an_unknown_key_causes_one_fetch_in_a_while() -> None:
    now_s = [0.0]
    remote = Remote(ONE, TWO, TWO)
    async with opened(remote, clock=lambda: now_s[0]) as source:
        first = source.value
        assert not source.wants_other_keys()  # those here were fetched just now
        now_s[0] = MIN_INTERVAL_S
        assert source.wants_other_keys() and source.wants_other_keys()
        await remote.turns.get()  # it runs
        assert source.wants_other_keys() and source.value is first
        remote.may_go.release()
        await until(lambda: source.value is not first)
        assert len(source.value.by_name) == 2
        await until(lambda: not source.wants_other_keys())
        assert remote.turns.empty()


async def test_keys_are_fetched_again_and_again_and_stay_the_same_object_until_they_change() -> None:
    remote = Remote(ONE, ONE, TWO)
    async with opened(remote, refresh_s=0.0) as source:
        first = source.value
        await remote.turns.get()
        remote.may_go.release()
        await remote.turns.get()
        assert source.value is first
        remote.may_go.release()
        await until(lambda: source.value is not first)
        remote.responses.append(TWO)
        remote.may_go.release()


async def test_former_keys_stay_while_the_fetch_fails(caplog: pytest.LogCaptureFixture) -> None:
    remote = Remote(ONE, OSError("no route"), ValueError("HTTP status 404"), TWO)
    with caplog.at_level(logging.INFO):
        async with opened(remote, refresh_s=0.0, retry_s=0.0) as source:
            first = source.value
            for _ in range(2):
                await remote.turns.get()
                assert source.value is first
                remote.may_go.release()
            await remote.turns.get()
            remote.may_go.release()
            await until(lambda: source.value is not first)
            remote.responses.append(TWO)
            remote.may_go.release()
    logged = [record.message for record in caplog.records if "token keys" in record.message]
    assert logged[0] == "token keys not fetched, the former ones stay num_keys=1 error=no route"
    assert logged[1] == "token keys not fetched, the former ones stay num_keys=1 error=HTTP status 404"
    assert logged[2:] == ["token keys fetched again"]


async def test_one_reason_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    remote = Remote(ONE, OSError("no route"), OSError("no route"), OSError("no route"), TWO)
    async with opened(remote, refresh_s=0.0, retry_s=0.0) as source:
        first = source.value
        for _ in range(4):
            await remote.turns.get()
            remote.may_go.release()
        await until(lambda: source.value is not first)
        remote.responses.append(TWO)
        remote.may_go.release()
    assert [record.message for record in caplog.records if "not fetched" in record.message] == [
        "token keys not fetched, the former ones stay num_keys=1 error=no route"
    ]


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        (jwk(private_key("rsa1024"), "weak"), "keys[0]: has 1024 bits"),
        (jwk(ED, "copied", d="secret-part"), "keys[0]: is a private key"),
        (jwk(ES, "damaged", y="AAAA"), "keys[0]: is not a valid key of type EC"),
    ],
)
async def test_a_key_that_cannot_be_used_does_not_keep_those_that_the_issuer_removed(
    bad: dict[str, Any], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The issuer removes a stolen key, and its set has a key that is of no use here."""
    remote = Remote(ONE, jwks(bad, jwk(ES, "two")))
    async with opened(remote, refresh_s=0.0) as source:
        first = source.value
        await remote.turns.get()
        remote.may_go.release()
        await until(lambda: source.value is not first)
        assert set(source.value.by_name) == {("two", "ES256")}
        remote.responses.append(ONE)
        remote.may_go.release()
    assert f"token keys left out num_left_out=1 error={reason}" in caplog.text and "secret-part" not in caplog.text


async def test_a_start_goes_on_with_the_keys_that_can_be_used() -> None:
    async with opened(Remote(jwks(jwk(private_key("rsa1024"), "weak"), jwk(ED, "one")))) as source:
        assert set(source.value.by_name) == {("one", "EdDSA")}
    with pytest.raises(InvalidAccessFile, match="has none for RS256, ES256 or EdDSA"):
        async with opened(Remote(jwks(jwk(private_key("rsa1024"), "weak")))):
            pass


async def test_a_set_without_a_key_ends_every_token_and_not_the_start(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(InvalidAccessFile, match="has none for RS256, ES256 or EdDSA"):
        async with opened(Remote(NONE)):
            pass
    remote = Remote(ONE, NONE)
    async with opened(remote, refresh_s=0.0) as source:
        first = source.value
        await remote.turns.get()
        remote.may_go.release()
        await until(lambda: source.value is not first)
        assert source.value.by_name == {}
        remote.responses.append(NONE)
        remote.may_go.release()
    assert "token keys removed, every token is refused" in caplog.text


async def test_a_start_without_a_response_goes_on_and_a_wrong_response_ends_it() -> None:
    async with opened(Remote(OSError("refused"))) as source:
        assert source.value is None
    with pytest.raises(ValueError, match="404"):
        async with opened(Remote(ValueError("404"))):
            pass
