"""Bodies, keys and errors, as every protocol of the gateway handles them."""

from __future__ import annotations

import asyncio

import grpc
import httpx
import msgspec
import pytest
from motet import FailedPrecondition, InvalidArgument, MotetError, ResourceExhausted, Unauthenticated, Unavailable
from motet.errors import invalid_field
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message

from gateway.http.bodies import MAX_CONTAINERS, MAX_VALUES, NUM_LONGEST, Bodies, decoded_as
from gateway.http.described import Described, Description
from gateway.http.errors import MAX_MESSAGE_CHARS, Refusal, is_callers_mistake, refusal_from
from gateway.http.keys import Keys, current_key, current_owner, set_key
from gateway.openai.handlers import EXCEPTION_HANDLERS
from gateway.tinker.routes import tinker_app


class Body(msgspec.Struct, forbid_unknown_fields=True):
    number: int
    text: str = ""


async def handle(request: Request) -> Response:
    try:
        body = await Bodies(1024).decode(request, Body)
    except Refusal as refusal:
        return JSONResponse({"said": refusal.message}, status_code=refusal.status)
    return JSONResponse({"number": body.number, "key": current_key(), "owner": current_owner()})


def client(prefix: str = "") -> httpx.AsyncClient:
    app: ASGIApp = Keys(Starlette(routes=[Route("/", handle, methods=["POST"])]), prefix=prefix)
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://gateway")


@pytest.mark.parametrize(
    ("content", "status", "said"),
    [
        (b'{"number": 1}', 200, ""),
        (b'{"number": "1"}', 400, "Expected `int`"),
        (b'{"number": 1, "other": 2}', 400, "unknown field `other`"),
        (b"{}", 400, "missing required field `number`"),
        (b"\xff", 400, "not a valid Body"),
        (b'{"text": "\xff"}', 400, "JSON is not valid UTF-8; encode it as UTF-8"),
        (rb'{"text": "a\ud83d b", "number": 1}', 400, "a text has half of a surrogate pair at byte 11; send whole"),
        (rb'{"text": "\ud83d\ude00\ude00", "number": 1}', 400, "half of a surrogate pair at byte 22"),
        (rb'{"text": "\\ud83d", "number": ', 400, "Input data was truncated"),
        (b"", 400, "it is empty; send a JSON object, {} if no field is to be set"),
        (b" \n", 400, "it is empty; send a JSON object, {} if no field is to be set"),
        (b'{"number": %s}' % (b"[" * 500), 400, "Expected `int`"),
        (b" " * 1025, 413, "longer than 1024 bytes"),
    ],
)
async def test_a_body_is_read_strictly(content: bytes, status: int, said: str) -> None:
    async with client() as http:
        response = await http.post("/", content=content)
    assert response.status_code == status and said in response.text


def test_nesting_beyond_what_the_interpreter_takes_is_a_mistake_of_the_body() -> None:
    """A RecursionError would be a mistake of ours, with a traceback in the log for each such body."""
    for depth in (100_000, MAX_CONTAINERS):
        with pytest.raises(ValueError, match="nested too deeply"):
            decoded_as(b"[" * depth + b"]" * depth, list)


def test_a_body_of_very_many_values_is_refused_before_it_is_decoded() -> None:
    """Decoding them would keep the event loop from all other requests."""
    many = b'{"a":[' + b"[]," * (MAX_CONTAINERS - 2) + b"1]}"
    assert len(decoded_as(many, dict)["a"]) == MAX_CONTAINERS - 1
    for item in (b"[],", b"{},"):
        with pytest.raises(ValueError, match="more than 250000 lists and objects"):
            decoded_as(b"[" + item * MAX_CONTAINERS + b"1]", list)
    assert len(decoded_as(b"[" + b"1," * (MAX_VALUES - 1) + b"1]", list)) == MAX_VALUES
    with pytest.raises(ValueError, match="more than 2000000 values"):
        decoded_as(b"[" + b"1," * MAX_VALUES + b"1]", list)


async def test_a_body_without_a_length_is_bounded_too() -> None:
    async def parts() -> object:
        for _ in range(3):
            yield b" " * 600

    async with client() as http:
        assert (await http.post("/", content=parts())).status_code == 413  # type: ignore[arg-type]


async def test_a_key_comes_in_either_header_without_the_prefix_of_its_protocol() -> None:
    async with client("tml-") as http:
        for headers, key in (
            ({"authorization": "Bearer motet_a"}, "motet_a"),
            ({"x-api-key": "tml-motet_a"}, "motet_a"),
            ({"x-api-key": "eyJ.a.b"}, "eyJ.a.b"),
            ({"authorization": "Basic eDp5"}, ""),
            ({}, ""),
        ):
            assert (await http.post("/", content=b'{"number": 1}', headers=headers)).json()["key"] == key
        owners = {
            (await http.post("/", content=b'{"number": 1}', headers={"x-api-key": key})).json()["owner"]
            for key in ("a", "b", "a")
        }
        assert len(owners) == 2 and "a" not in owners


@pytest.mark.parametrize(
    "headers",
    [
        [("authorization", "Bearer key-1"), ("Authorization", "Bearer key-2")],
        [("authorization", "Bearer key-1"), ("authorization", "Bearer key-1")],
        [("x-api-key", "key-1"), ("X-API-Key", "key-2")],
        [("authorization", "Bearer key-1"), ("x-api-key", "key-2")],
    ],
)
async def test_a_request_that_names_two_keys_is_refused(headers: list[tuple[str, str]]) -> None:
    """A proxy in front may have checked the key that the gateway does not use."""
    async with client() as http:
        response = await http.post("/", content=b'{"number": 1}', headers=headers)
        assert response.status_code == 400 and response.headers["connection"] == "close"
        assert "key-" not in response.json()["error"]["message"]
        same = {"authorization": "Bearer key-1", "x-api-key": "key-1"}
        assert (await http.post("/", content=b'{"number": 1}', headers=same)).json()["key"] == "key-1"


@pytest.mark.parametrize(
    ("error", "status", "headers"),
    [
        (InvalidArgument("x"), 400, {}),
        (invalid_field("api_key", "is not a key or token"), 401, {"www-authenticate": "Bearer"}),
        (Unauthenticated("x"), 401, {"www-authenticate": "Bearer"}),
        (FailedPrecondition("x"), 409, {"x-should-retry": "false"}),
        (ResourceExhausted("x", retry_after_s=1.5), 429, {"retry-after-ms": "1500", "retry-after": "2"}),
        (Unavailable("x"), 503, {}),
        (MotetError("x"), 500, {"x-should-retry": "false"}),
    ],
)
def test_an_error_of_the_sdk_has_its_status_and_headers(
    error: MotetError, status: int, headers: dict[str, str]
) -> None:
    refusal = refusal_from(error)
    assert (refusal.status, refusal.headers) == (status, headers)
    assert is_callers_mistake(error) == (status < 429)


def test_a_message_that_repeats_what_was_sent_is_cut() -> None:
    assert len(Refusal(400, "x" * 10_000).message) == MAX_MESSAGE_CHARS


async def test_nothing_is_read_of_a_caller_that_is_refused() -> None:
    async def refuse() -> None:
        raise Unauthenticated("this server needs a credential", code=grpc.StatusCode.UNAUTHENTICATED)

    async def receive() -> Message:
        pytest.fail("its body is read")

    scope = {"type": "http", "method": "POST", "path": "/", "headers": [(b"content-length", b"20")]}
    with pytest.raises(Unauthenticated):
        await Bodies(1024, refuse).read(Request(scope, receive))


async def test_a_slow_body_is_given_up() -> None:
    async def receive() -> Message:
        await asyncio.Event().wait()
        raise AssertionError

    scope = {"type": "http", "method": "POST", "path": "/", "headers": []}
    with pytest.raises(Refusal, match="0 bytes of the body came") as caught:
        await Bodies(1024, grace_s=0.01).read(Request(scope, receive))
    assert caught.value.status == 408


class SlowBodies:
    """Requests whose bodies stop before their end, each until all may go on."""

    def __init__(self) -> None:
        self.begun = asyncio.Semaphore(0)
        self.goes_on = asyncio.Event()

    def request(self) -> Request:
        parts = [{"type": "http.request", "body": b" " * 1000, "more_body": True}]

        async def receive() -> Message:
            if parts:
                return parts.pop()
            self.begun.release()
            await self.goes_on.wait()
            return {"type": "http.request", "body": b"", "more_body": False}

        return Request({"type": "http", "method": "POST", "path": "/", "headers": []}, receive)

    def read_as(self, key: str, bodies: Bodies) -> asyncio.Task[bytes]:
        async def read() -> bytes:
            set_key(key)
            return await bodies.read(self.request())

        return asyncio.create_task(read())


async def test_the_bodies_that_are_read_at_once_are_bounded_together() -> None:
    bodies, slow = Bodies(1024), SlowBodies()
    reading = [slow.read_as("one", bodies) for _ in range(NUM_LONGEST)]
    for _ in reading:
        await slow.begun.acquire()
    with pytest.raises(Refusal, match="too many long bodies") as caught:
        await slow.read_as("one", bodies)
    assert caught.value.status == 503
    slow.goes_on.set()
    assert {len(body) for body in await asyncio.gather(*reading)} == {1000}
    assert len(await slow.read_as("one", bodies)) == 1000


async def test_long_slow_bodies_of_one_key_shut_no_other_key_out() -> None:
    """What another key sends takes the place of a body of the key that holds the most."""
    bodies, slow = Bodies(1024), SlowBodies()
    flood = [slow.read_as("flood", bodies) for _ in range(NUM_LONGEST)]
    for _ in flood:
        await slow.begun.acquire()
    others = [slow.read_as(f"other {number}", bodies) for number in range(3)]
    for _ in others:
        await slow.begun.acquire()
    slow.goes_on.set()
    assert {len(body) for body in await asyncio.gather(*others)} == {1000}
    outcomes = await asyncio.gather(*flood, return_exceptions=True)
    refused = [outcome for outcome in outcomes if isinstance(outcome, Refusal)]
    assert [refusal.status for refusal in refused] == [503] * 3
    assert sum(isinstance(outcome, bytes) for outcome in outcomes) == NUM_LONGEST - 3
    again = [slow.read_as("flood", bodies) for _ in range(NUM_LONGEST)]
    assert {len(body) for body in await asyncio.gather(*again)} == {1000}, "all the room is free again"


@pytest.mark.parametrize(
    "app", [Starlette(exception_handlers=dict(EXCEPTION_HANDLERS)), None], ids=["openai", "tinker"]
)
async def test_a_client_that_leaves_before_its_whole_body_is_no_mistake_of_the_server(app: Starlette | None) -> None:
    """It was a traceback in the log and a 500 in the metrics for each such client."""
    bodies, statuses = Bodies(1024), []

    async def read(request: Request) -> Response:
        return Response(await bodies.read(request))

    if app is None:
        served = tinker_app([Described("POST", "/", read, Description(summary="Reads"))])
    else:
        app.router.routes.append(Route("/", read, methods=["POST"]))
        served = app
    messages: list[Message] = [
        {"type": "http.request", "body": b'{"number"', "more_body": True},
        {"type": "http.disconnect"},
    ]

    async def receive() -> Message:
        return messages.pop(0)

    async def send(message: Message) -> None:
        if message["type"] == "http.response.start":
            statuses.append(message["status"])

    scope = {"type": "http", "method": "POST", "path": "/", "query_string": b"", "headers": [], "root_path": ""}
    await served(scope, receive, send)
    assert statuses == [499]
