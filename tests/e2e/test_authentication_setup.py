"""The commands of docs/security.md set up API keys, tokens and certificates, as they are printed."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import threading
import time
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from tests.control_plane.access.authentication.tokens import jwk, jwks, private_key, token
from tests.control_plane.server_processes import STEP_S
from tests.docs_commands import block, commands, run
from tests.e2e.documented_server import started

DOCUMENT = "docs/security.md"


def without(arguments: list[str], flag: str) -> list[str]:
    """The arguments without a flag and its value."""
    place = arguments.index(flag)
    return arguments[:place] + arguments[place + 2 :]


async def test_api_keys_are_set_up_and_rotated_with_the_commands_of_the_document(tmp_path: Path) -> None:
    setup, rotation = block(DOCUMENT, "setup-api-keys"), block(DOCUMENT, "rotate-api-keys")
    assert len(commands(setup)) + len(commands(block(DOCUMENT, "start-api-keys"))) <= 5 >= len(commands(rotation))
    run(setup, tmp_path)
    former = (tmp_path / "acme.key").read_text()
    async with started(DOCUMENT, "start-api-keys", tmp_path) as (client, motet):
        assert (await motet(*client))[0] == 0
        code, text = await motet(*without(client, "--api-key-file"))
        assert code == 3 and "this server needs a credential" in text and "--api-key-file FILE" in text

        [entry] = json.loads((tmp_path / "keys.json").read_text())["keys"]
        run(re.sub(r"\bID\b", entry["id"], rotation), tmp_path)
        assert (tmp_path / "acme.key").read_text() != former
        async with asyncio.timeout(STEP_S):
            while (await motet(*client))[0] != 0:  # until the server has looked at its file
                pass
        (tmp_path / "acme.key").write_text(former)
        code = 0
        async with asyncio.timeout(STEP_S):
            while code == 0:  # it may have looked between the two commands, and looks again within a second
                code, text = await motet(*client)
        assert code == 3 and "the API key is not valid" in text and former.strip() not in text


@contextlib.contextmanager
def served(directory: Path) -> Iterator[str]:
    """The URL of a folder."""

    class Handler(SimpleHTTPRequestHandler):
        def __init__(self, *arguments: Any, **more: Any) -> None:
            super().__init__(*arguments, directory=str(directory), **more)

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
    thread.join()


async def test_tokens_of_an_identity_provider_are_accepted_with_the_commands_of_the_document(tmp_path: Path) -> None:
    (tmp_path / "web").mkdir()
    (tmp_path / "web" / "jwks.json").write_bytes(jwks(jwk(private_key("RS256"), "rs")))
    claims: dict[str, Any] = {
        "iss": "https://id.example.org",
        "exp": int(time.time()) + 600,
        "roles": "openid adapters.read",
    }
    alice = tmp_path / "alice.token"
    alice.write_text(token(private_key("RS256"), "RS256", **claims))
    with served(tmp_path / "web") as url:
        words = {"https://id.example.org/jwks.json": f"{url}/jwks.json"}
        async with started(DOCUMENT, "start-jwt", tmp_path, words) as (client, motet):
            assert (await motet(*client))[0] == 0
            alice.write_text(token(private_key("RS256"), "RS256", **{**claims, "aud": "other"}))
            code, text = await motet(*client)
            assert code == 3 and "claim 'aud'" in text and alice.read_text() not in text


async def test_certificates_get_rights_with_the_commands_of_the_document(tmp_path: Path) -> None:
    run(block(DOCUMENT, "setup-tls"), tmp_path)
    (tmp_path / "identities.json").write_text(block(DOCUMENT, "identities", language="json"))
    async with started(DOCUMENT, "start-client-certificates", tmp_path) as (client, motet):
        assert (await motet(*client))[0] == 0
        other = [word.replace("alice.", "gpu-1.") for word in client]  # of the same authority, and not listed
        code, text = await motet(*other)
        assert code == 3 and "none of the names in the client's certificate" in text
