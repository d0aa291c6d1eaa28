"""Tenant A against tenant B on every route of the gateway and every field, as test_isolation.py does over gRPC.

A request of A with a value of B in it has the response that the same request has with a value that is nobody's, and
no response has anything of B.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.gateway.gateway_process import Gateway
from tests.hostile.isolation import http_matrix
from tests.hostile.isolation.http_matrix import NOBODYS, OTHERS, REQUESTS, Attack, Route, Sent
from tests.hostile.isolation.matrix import PROMPT
from tests.hostile.isolation.things import WORD
from tests.hostile.isolation.world import World, new_key

WAIT_S = 60.0
# Members of responses that differ from call to call, or follow from the text of a prompt.
VOLATILE = {"created", "created_at", "completed_at", "uid", "etag", "create_time", "update_time", "session_id"}
VOLATILE |= {
    "text",
    "content",
    "delta",
    "embedding",
    "tokens",
    "prompt",
    "usage",
    "count",
    "registration",
    "finish_reason",
}
HEADERS = {"date", "x-request-id", "content-length", "server"}
_MADE_ID = re.compile(r"(?:chatcmpl|cmpl|resp|msg|call|item|fc)[-_][0-9a-f]{8,}")
# The one thing that A may learn: that a name is taken (test_isolation.py).
TAKEN = {"0: body name = adapter_id", "0: body name = adapter name", "0: body name = shared_id", "0: everything"}
# The gateway closes a connection after 5 s without a request.
_LIMITS = httpx.Limits(keepalive_expiry=1.0)
# Routes whose responses say nothing but what their request says.
STATELESS = {("POST", f"/api/v1/{path}") for path in ("client/config", "client/dynamic_config", "session_heartbeat")}
STATELESS |= {("POST", "/api/v1/sessions/{session_id}/finish"), ("POST", "/api/v1/cancel_future")}
# Counters of all callers together, without a name of any.
COUNTED = ("GET", "/metrics")
CANARY = ("PUT", "/v1/adapters/{name}/canary")


class Front:
    """A gateway before the world's server."""

    def __init__(self, world: World, gateway: Gateway) -> None:
        self.world = world
        self._tokens = {name: key.token for name, key in world.keys.items()} | {"nobody": new_key("nobodykey1").token}
        self._http = httpx.Client(base_url=gateway.url, timeout=WAIT_S, limits=_LIMITS)
        self.document: dict[str, Any] = self._http.get("/openapi.json").json()
        nobodys = http_matrix.values(world.nobodys, NOBODYS)
        pairs = {value: nobodys[kind] for kind, value in http_matrix.values(world.other, OTHERS).items()}
        # Messages shorten values.
        pairs |= {value[:end]: control[:end] for value, control in pairs.items() for end in range(5, len(value))}
        self._nobodys = sorted(pairs.items(), key=lambda pair: len(pair[0]), reverse=True)
        # A sample of B whose result is kept.
        self.sample = http_matrix.sample(http_matrix.sampling_session(world.other, OTHERS))
        assert self.send(WORD, Sent(route=("POST", "/api/v1/asample"), body=self.sample)).status_code == 200

    def close(self) -> None:
        self._http.close()

    def send(self, key: str, sent: Sent) -> httpx.Response:
        """Make a request as one of the world's keys."""
        method, path = sent.route
        for name, value in sent.parameters.items():
            path = path.replace(f"{{{name}}}", value.replace("/", "%2F"))
        content: dict[str, Any] = {}
        if sent.is_form:
            files = [("files", (name, data)) for name, data in self.world.files.items()]
            content["files"] = [*files, ("settings", (None, json.dumps(sent.body)))]
        elif sent.body is not None:
            content["json"] = sent.body
        headers = {**sent.headers, "authorization": f"Bearer {self._tokens[key]}"}
        return self._http.request(method, path, params=dict(sent.query), headers=headers, **content)

    def differences(self, attack: Attack) -> str:
        """What is different between an attack and its control; empty: nothing."""
        seen, control = self.send("acme", attack.sent), self.send("acme", attack.control)
        for sent, response in ((attack.sent, seen), (attack.control, control)):
            if found := self.secrets_in(response, sent.text()):
                return f"{attack.name}: the response has {found}: {response.text[:500]}"
        if attack.name in TAKEN and attack.sent.is_form:
            is_refused = seen.status_code == 409 and control.status_code == 200
            return "" if is_refused else f"{attack.name}: {seen.status_code} {control.status_code} {control.text[:300]}"
        if attack.sent.route == COUNTED or self.comparable(seen) == self.comparable(control):
            return ""
        return f"{attack.name}:\n  {seen.status_code} {seen.text[:500]}\n  {control.status_code} {control.text[:500]}"

    def comparable(self, response: httpx.Response) -> tuple[int, list[tuple[str, str]], str]:
        """A response without what differs every time, with each of B's values replaced by the one that is nobody's."""
        headers = [(name, value) for name, value in response.headers.items() if name not in HEADERS]
        lines: dict[str, None] = {}
        if "protobuf" not in response.headers.get("content-type", ""):
            # How many pieces a stream has depends on the text.
            lines = dict.fromkeys(_without_volatile(line.removeprefix("data: ")) for line in response.text.splitlines())
        text = "\n".join(lines)
        for value, control in self._nobodys:
            text = text.replace(value, control)
        return response.status_code, headers, _MADE_ID.sub("id", text)

    def secrets_in(self, response: httpx.Response, sent: str) -> list[str]:
        """Values of B in a response, of those that were not sent."""
        raw = response.text + json.dumps(response.headers.multi_items())
        found = [text for text in self.world.other.secrets if text in raw]
        return [text for text in found if text.rpartition("/")[2] not in sent]


def _without_volatile(line: str) -> str:
    try:
        content = json.loads(line)
    except ValueError:
        return line

    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: plain(inner) for name, inner in value.items() if name not in VOLATILE}
        return [plain(inner) for inner in value] if isinstance(value, list) else value

    return json.dumps(plain(content), sort_keys=True)


@pytest.fixture(scope="module")
def front(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Front]:
    directory = tmp_path_factory.mktemp("isolation")
    flags = ["--server-absence-s", "2", "--result-ttl-s", "3600"]  # B's sample is kept however slow the machine is
    with World(directory) as world, Gateway(world.system.address, directory, flags) as gateway:
        running = Front(world, gateway)
        yield running
        running.close()


def test_every_route_of_the_gateway_has_a_request_here(front: Front) -> None:
    assert http_matrix.routes(front.document) == set(REQUESTS)


@pytest.mark.timeout(170)
@pytest.mark.parametrize("route", REQUESTS, ids=" ".join)
def test_a_value_of_another_tenant_gives_what_an_unknown_value_gives(front: Front, route: Route) -> None:
    world, num_attacks, wrong = front.world, 0, []
    for attack in http_matrix.attacks(front.document, route, world.mine, world.other, world.nobodys):
        num_attacks += 1
        if difference := front.differences(attack):
            wrong.append(difference)
    if route == CANARY:  # it would get one in a thousand requests of other tests
        ended = Sent(route=("DELETE", route[1]), parameters={"name": world.mine.adapter_id})
        assert front.send("acme", ended).status_code == 200
    assert num_attacks > len(http_matrix.HEADERS)
    assert not wrong, "\n".join([f"{len(wrong)} of {num_attacks}", *wrong[:8]])


# What B itself gets for its own things, each a request that names nothing else.
OWN = {
    ("POST", "/tokenize"),
    ("POST", "/detokenize"),
    ("POST", "/v1/completions"),
    ("POST", "/v1/chat/completions"),
    ("POST", "/v1/responses"),
    ("POST", "/v1/embeddings"),
    ("GET", "/v1/models/{model}"),
    ("GET", "/v1/adapters/{name}"),
    ("GET", "/v1/adapters/{name}/versions"),
    ("GET", "/v1/operations/{operation}"),
    ("POST", "/api/v1/create_sampling_session"),
    ("POST", "/api/v1/retrieve_future"),
}


@pytest.mark.parametrize("route", sorted(OWN), ids=" ".join)
def test_the_owner_gets_what_the_attack_looks_for(front: Front, route: Route) -> None:
    """Else equal responses would prove nothing."""
    world = front.world
    [sent, *_] = http_matrix.requests(route, world.other, OTHERS)
    [control, *_] = http_matrix.requests(route, world.nobodys, NOBODYS)
    own, nobodys = front.send(WORD, sent), front.send(WORD, control)
    assert own.status_code in (200, 202), own.text
    assert front.comparable(own) != front.comparable(nobodys)


def test_a_stolen_sampling_session_is_one_of_the_thief(front: Front) -> None:
    """With the id of B's session, A neither gets nor ends B's sample, and what it starts fails as A's own."""
    of_sample = {"request_id": f"{front.sample['sampling_session_id']}:1"}

    def post(key: str, action: str, body: Any) -> httpx.Response:
        return front.send(key, Sent(route=("POST", f"/api/v1/{action}"), body=body))

    before = post(WORD, "retrieve_future", of_sample)
    assert "protobuf" in before.headers["content-type"]
    assert post("acme", "cancel_future", of_sample).json() == {}
    assert post("acme", "retrieve_future", of_sample).status_code == 410
    assert post("acme", "asample", front.sample).status_code == 200
    stolen = post("acme", "retrieve_future", of_sample).json()
    assert stolen["category"] == "user" and "does not exist" in stolen["error"]
    assert post(WORD, "retrieve_future", of_sample).content == before.content


def test_cached_tokens_over_http_do_not_tell_what_another_tenant_sent(front: Front) -> None:
    def cached(key: str) -> int:
        body = {"model": "model", "prompt": [7, *PROMPT], "max_tokens": 1, "cache_salt": front.world.other.cache_salt}
        usage = front.send(key, Sent(route=("POST", "/v1/completions"), body=body)).json()["usage"]
        return int(usage["prompt_tokens_details"]["cached_tokens"])

    cached(WORD)
    assert cached(WORD) > 0
    assert cached("acme") == 0


def test_without_a_key_of_the_server_nothing_but_open_routes_is_served(front: Front) -> None:
    """A request with B's things and a key that nobody has: no route has anything of B in its response."""
    world, wrong = front.world, []
    for route in REQUESTS:
        for sent in http_matrix.requests(route, world.other, OTHERS):
            response = front.send("nobody", sent)
            if found := front.secrets_in(response, sent.text()):
                wrong.append(f"{route}: {found}")
            described = front.document["paths"][route[1]][route[0].lower()]
            is_open = described.get("security") == [] or route in STATELESS
            if not is_open and response.status_code not in (400, 401, 404):
                wrong.append(f"{route}: {response.status_code} {response.text[:200]}")
    assert not wrong, "\n".join(wrong)
