"""Requests of web pages, and requests whose body has two lengths or an encoding."""

from __future__ import annotations

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from gateway.http.origins import Origins
from gateway.http.settings import HttpSettings

PAGE = "https://chat.example.org"


def client(*allowed: str) -> httpx.AsyncClient:
    async def respond(_request: Request) -> PlainTextResponse:
        return PlainTextResponse("done")

    app = Origins(Starlette(routes=[Route("/v1/models", respond, methods=["GET", "POST"])]), allowed)
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://gateway")


@pytest.mark.parametrize("method", ["GET", "POST", "OPTIONS"])
@pytest.mark.parametrize("origin", [PAGE, "null", "http://gateway", ""])
async def test_a_page_is_refused(method: str, origin: str) -> None:
    async with client() as http:
        response = await http.request(method, "/v1/models", headers={"origin": origin})
    assert response.status_code == 403 and "--allow-origin" in response.json()["error"]["message"]
    assert "access-control-allow-origin" not in response.headers


async def test_a_program_names_no_origin_and_is_served() -> None:
    async with client() as http:
        response = await http.post("/v1/models")
    assert response.text == "done" and "access-control-allow-origin" not in response.headers


async def test_an_allowed_page_is_served_and_may_read_the_response() -> None:
    async with client(PAGE) as http:
        response = await http.post("/v1/models", headers={"origin": PAGE})
        assert response.text == "done" and response.headers["access-control-allow-origin"] == PAGE
        more = {"access-control-request-method": "POST", "access-control-request-headers": "authorization"}
        before = await http.options("/v1/models", headers={"origin": PAGE, **more})
        assert before.status_code == 200 and "authorization" in before.headers["access-control-allow-headers"]
        other = await http.post("/v1/models", headers={"origin": "https://other.example.org"})
        assert other.status_code == 403


async def test_every_page_may_be_allowed() -> None:
    async with client("*") as http:
        assert (await http.post("/v1/models", headers={"origin": PAGE})).text == "done"


async def test_a_body_with_two_lengths_is_refused() -> None:
    async with client() as http:
        headers = {"transfer-encoding": "chunked", "content-length": "3"}
        response = await http.post("/v1/models", headers=headers, content=b"abc")
    assert response.status_code == 400 and response.headers["connection"] == "close"


@pytest.mark.parametrize("encoding", ["gzip", "br", "GZIP, identity"])
async def test_a_body_with_an_encoding_is_refused_by_name(encoding: str) -> None:
    async with client() as http:
        response = await http.post("/v1/models", headers={"content-encoding": encoding}, content=b"abc")
        assert response.status_code == 415 and repr(encoding) in response.json()["error"]["message"]
        plain = await http.post("/v1/models", headers={"content-encoding": "identity"}, content=b"abc")
        assert plain.status_code == 200


@pytest.mark.parametrize("origin", ["example.org", "https://example.org/", "https://", "HTTPS://EXAMPLE.ORG", ""])
def test_what_is_no_origin_is_refused_at_the_start(origin: str) -> None:
    with pytest.raises(ValueError, match=r"--allow-origin: .* is not an origin"):
        HttpSettings(allowed_origins=(origin,))


async def status_of(host: str, hosts: tuple[str, ...] | None) -> int:
    async def respond(_request: Request) -> PlainTextResponse:
        return PlainTextResponse("done")

    app = Origins(Starlette(routes=[Route("/", respond)]), (), hosts)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://127.0.0.1") as http:
        return (await http.get("/", headers={"host": host})).status_code


@pytest.mark.parametrize(
    "host", ["evil.example:8000", "127.0.0.1.evil.example", "127.evil.example", "10.0.0.1", "[::2]"]
)
async def test_a_page_whose_name_was_rebound_to_this_machine_is_refused(host: str) -> None:
    """The page and the gateway have the same origin for the browser, which sends no Origin with a GET."""
    assert await status_of(host, ()) == 403
    assert await status_of(host, None) == 200, "other machines reach this port, under any name"


@pytest.mark.parametrize("host", ["127.0.0.1:8000", "LOCALHOST:8000", "localhost", "[::1]:8000", "127.9.9.9", "models"])
async def test_names_of_this_machine_and_allowed_ones_are_served(host: str) -> None:
    assert await status_of(host, ("models",)) == 200


def test_only_a_port_on_loopback_has_names() -> None:
    assert HttpSettings(listen="0.0.0.0:1", insecure=True).known_hosts is None
    assert HttpSettings(allowed_hosts=("models",)).known_hosts == ("models",)
    with pytest.raises(ValueError, match="--allow-host: 'models:80' is not a host's name"):
        HttpSettings(allowed_hosts=("models:80",))
