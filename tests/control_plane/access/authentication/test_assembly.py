"""The settings make the methods of authentication, each of which says at the start that it is on."""

from __future__ import annotations

import asyncio
import builtins
import contextlib
import json
import logging
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from control_plane.access.authentication.assembly import open_authenticator
from control_plane.access.authentication.grants import Grant
from control_plane.access.authentication.key_file import change_keys, new_key
from control_plane.access.authenticator import Authenticator, Presented
from control_plane.access.principal import ANYBODY, Role
from control_plane.access.settings import AccessSettings
from control_plane.access.watched_files import FileWatcher
from control_plane.errors import Unauthenticated
from tests.control_plane.access.authentication.tokens import AUDIENCE, ISSUER, jwk, jwks, private_key, token

LATE_S = 4_000_000_000  # the tokens here are checked by the clock of the machine


async def opened(watcher: FileWatcher | None = None, **settings: Any) -> Authenticator:
    async with contextlib.AsyncExitStack() as stack:
        return await open_authenticator(AccessSettings(**settings), watcher or FileWatcher(), stack)


def key_file(directory: Path) -> tuple[Path, str]:
    entry, key = new_key(set(), Grant(tenants=("acme",), roles=(Role.INFER,)))
    change_keys(directory / "keys.json", lambda _: (entry,), may_create=True)
    return directory / "keys.json", key


def files(directory: Path) -> tuple[dict[str, Any], str]:
    """Settings of all methods, and an API key."""
    path, key = key_file(directory)
    (directory / "jwks.json").write_bytes(jwks(jwk(private_key("EdDSA"), "ed")))
    identities = {"alice.acme": {"tenants": ["acme"], "roles": ["infer"]}}
    (directory / "identities.json").write_text(json.dumps(identities))
    tokens = {"jwt_issuer": ISSUER, "jwt_audience": AUDIENCE, "jwt_jwks": str(directory / "jwks.json")}
    return {"api_keys": path, **certificates(directory), **tokens}, key


def certificates(directory: Path) -> dict[str, Path]:
    """Settings of client certificates. Their names come from TLS, whose files nobody reads here."""
    for name in ("tls_cert", "tls_key", "tls_client_ca"):
        (directory / name).touch()
    tls = {name: directory / name for name in ("tls_cert", "tls_key", "tls_client_ca")}
    return {"client_identities": directory / "identities.json", **tls}


async def test_all_methods_together(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    settings, key = files(tmp_path)
    with caplog.at_level(logging.INFO):
        authenticator = await opened(**settings)
    assert caplog.records[-1].shown == (  # type: ignore[attr-defined]  # of `extra`
        "clients need a credential: API keys (1), tokens of https://id.example, client certificates (1 names)"
    )
    names = ("alice.acme",)
    text = token(private_key("EdDSA"), exp=LATE_S)
    assert authenticator.principal(Presented(identities=names)).name == "cert:alice.acme"
    assert authenticator.principal(Presented(token=key, identities=names)).name.startswith("key:")
    assert authenticator.principal(Presented(token=text, identities=names)).name == "jwt:alice"
    for wrong in (key + "x", text[:-9] + "AAAAAAAA", "sesame"):
        with pytest.raises(Unauthenticated):
            authenticator.principal(Presented(token=wrong, identities=names))
    with pytest.raises(Unauthenticated, match="needs a credential"):
        authenticator.principal(Presented())


async def test_every_file_is_watched(tmp_path: Path) -> None:
    settings, key = files(tmp_path)
    pauses: asyncio.Queue[asyncio.Event] = asyncio.Queue()

    async def sleep(_seconds: float) -> None:
        await pauses.put(over := asyncio.Event())
        await over.wait()

    watcher = FileWatcher(sleep=sleep)
    authenticator = await opened(watcher, **settings)
    watcher.start()
    begun = [await pauses.get() for _ in range(3)]  # one for each file
    for name, content in (("keys.json", '{"keys": []}'), ("identities.json", "{}")):
        (tmp_path / name).write_text(content)
    (tmp_path / "jwks.json").write_bytes(jwks(jwk(private_key("ES256"), "es")))
    for pause in begun:
        pause.set()
    for _ in begun:
        await pauses.get()  # the watcher has looked at every file
    await watcher.close()
    for presented in (
        Presented(token=key),
        Presented(token=token(private_key("EdDSA"), exp=LATE_S)),
        Presented(identities=("alice.acme",)),
    ):
        with pytest.raises(Unauthenticated):
            authenticator.principal(presented)


async def test_without_methods_one_line_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        authenticator = await opened()
        tls: dict[str, Any] = {**certificates(tmp_path), "client_identities": None}
        await opened(**tls)
    assert authenticator.principal(Presented(token="x")) is ANYBODY
    assert [record.shown for record in caplog.records] == [  # type: ignore[attr-defined]  # of `extra`
        "no authentication: whoever reaches the ports may do everything (docs/security.md)",
        "no authentication: whoever has a certificate of --tls-client-ca may do everything (docs/security.md)",
    ]


@pytest.mark.parametrize(
    ("flag", "settings"),
    [
        ("--api-keys", lambda path: {"api_keys": path}),
        ("--client-identities", lambda path: {**certificates(path.parent), "client_identities": path}),
        ("--jwt-jwks", lambda path: {"jwt_issuer": "i", "jwt_audience": "a", "jwt_jwks": str(path)}),
    ],
)
async def test_a_file_that_cannot_be_used_ends_the_start_with_its_flag(
    tmp_path: Path, flag: str, settings: Callable[[Path], dict[str, Any]]
) -> None:
    with pytest.raises(ValueError, match=f"{flag}: .*none.json is not "):
        await opened(**settings(tmp_path / "none.json"))
    (tmp_path / "bad.json").write_text("{")
    with pytest.raises(ValueError, match=f"{flag}: line 1: is not valid JSON"):
        await opened(**settings(tmp_path / "bad.json"))


async def test_a_machine_without_joserfc_serves_keys_and_says_what_tokens_need(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings, _ = files(tmp_path)
    importing = builtins.__import__

    def without_joserfc(name: str, *arguments: Any, **more: Any) -> Any:
        if name.partition(".")[0] == "joserfc":
            raise ModuleNotFoundError("No module named 'joserfc'", name="joserfc")
        return importing(name, *arguments, **more)

    for name in [
        name for name in sys.modules if name.startswith(("joserfc", "control_plane.access.authentication.jw"))
    ]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(builtins, "__import__", without_joserfc)
    assert (await opened(api_keys=settings["api_keys"])).is_on
    with pytest.raises(ValueError, match="--jwt-jwks: needs the Python package 'joserfc', which is not installed"):
        await opened(**settings)
