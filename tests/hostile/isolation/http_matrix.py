"""Every route of the gateway, and every place of its requests where one tenant can put another one's values.

Requests of each route are written once, in `REQUESTS`. The places follow from the gateway's document, which is made of
its routes: path and query parameters, every field of a body that takes a text, and every text that a request has.
"""

from __future__ import annotations

import copy
import itertools
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

from tests.hostile.isolation.matrix import PROMPT
from tests.hostile.isolation.things import Things

Route: TypeAlias = tuple[str, str]  # method, path with {parameters}
Place: TypeAlias = tuple[str | int, ...]  # of a text in a body: members and positions
ANY_KEY = "*"  # as the last member of a place: the text becomes the name of a member
BASE = "model"  # the base model's name
MINE, OTHERS, NOBODYS = (f"motet-{digit * 32}" for digit in "123")  # ids of Tinker sessions
# Headers that somebody may hope to be heard with; those of the key are the caller's.
HEADERS = ("motet-tenant", "x-motet-tenant", "openai-organization", "openai-project", "x-request-id", "idempotency-key")
# Kinds of things that no field of a request over HTTP can name; tests over gRPC have them.
_UNKNOWN_TO_HTTP = {"upload_request_id", "upload_id", "display_name", "label_key", "label_value", "prompt_sha256"}
_UNKNOWN_TO_HTTP |= {"key_id", "uid", "prefix", "friend", "text", "operation name"}
_NAME = "/v1/adapters/{name}"
_NONE = "acme-none"  # a name that A may use and has not: what would change or end A's own things is sent with it
_SHORT: Mapping[str, Any] = {"max_tokens": 2, "seed": 1, "temperature": 0, "ignore_eos": True}


@dataclass(frozen=True, kw_only=True)
class Sent:
    """One request but for its key."""

    route: Route
    parameters: Mapping[str, str] = field(default_factory=dict)  # of the path
    query: Mapping[str, str] = field(default_factory=dict)
    body: Any = None
    is_form: bool = False  # the body is the part `settings` beside an adapter's files
    headers: Mapping[str, str] = field(default_factory=dict)

    def text(self) -> str:
        """All that it says."""
        return json.dumps([dict(self.parameters), dict(self.query), self.body, dict(self.headers)])


@dataclass(frozen=True)
class Attack:
    """One request with a value of another tenant in it, and the same one with a value that is nobody's."""

    name: str
    sent: Sent
    control: Sent


def values(things: Things, session: str) -> dict[str, str]:
    """By kind: all that names something of a tenant, in every form in which the gateway takes it."""
    versioned = f"{things.adapter_id}@{things.digest}"
    found = {kind: value for kind, value in things.values().items() if kind not in _UNKNOWN_TO_HTTP}
    return found | {
        "version by digest": versioned,
        "version by digits": f"{things.adapter_id}@{things.digest[:12]}",
        "version by number": f"{things.adapter_id}@2",
        "behind the base": f"{BASE}:{things.adapter_id}",
        "model path": f"tinker://{things.adapter_id}",
        "model path of a version": f"tinker://{versioned}",
        "session": session,
        "sampling session": sampling_session(things, session),
        "sample": f"{sampling_session(things, session)}:1",
    }


def sampling_session(things: Things, session: str) -> str:
    """The id of a sampling session of the tenant's adapter."""
    return f"{session}:sample:1:{things.adapter_id}@{things.digest}"


def sample(session: str) -> dict[str, Any]:
    """The body of `asample`."""
    prompt = {"chunks": [{"type": "encoded_text", "tokens": PROMPT[:8]}]}
    params = {"max_tokens": 2, "seed": 1, "temperature": 0.0, "stop": []}
    return {"prompt": prompt, "sampling_params": params, "sampling_session_id": session, "seq_id": 1}


Bodies: TypeAlias = Callable[[Things, str], list[Any]]


def _completions(things: Things, _session: str) -> list[Any]:
    body = {"model": things.adapter_id, "prompt": things.text, "cache_salt": things.cache_salt, **_SHORT}
    return [body, {**body, "model": BASE, "stream": True}]


def _chat(things: Things, _session: str) -> list[Any]:
    body = {"messages": [{"role": "user", "content": things.text}], "cache_salt": things.cache_salt, **_SHORT}
    named = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    return [{**body, "model": things.adapter_id}, {**body, "model": BASE, "tools": [named], "tool_choice": "none"}]


def _responses(things: Things, _session: str) -> list[Any]:
    message = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": things.text}]}
    body = {"model": things.adapter_id, "input": [message], "cache_salt": things.cache_salt}
    return [{**body, "max_output_tokens": 2, "seed": 1, "temperature": 0, "ignore_eos": True}]


def _tinker(**fields: Callable[[Things, str], Any]) -> Bodies:
    return lambda things, session: [{name: value(things, session) for name, value in fields.items()}]


def _plain(*bodies: Any) -> Bodies:
    return lambda _things, _session: [copy.deepcopy(body) for body in bodies]


# The body of each request; None: it has none. Adapters of paths are in `_parameters`.
REQUESTS: dict[Route, Bodies] = {
    **{
        ("GET", path): _plain(None)
        for path in ("/openapi.json", "/healthz", "/readyz", "/metrics", "/version", "/health")
    },
    ("POST", "/tokenize"): lambda things, _: [{"model": things.adapter_id, "prompt": things.text}],
    ("POST", "/detokenize"): lambda things, _: [{"model": things.adapter_id, "tokens": PROMPT[:8]}],
    ("POST", "/v1/load_lora_adapter"): lambda things, _: [{"lora_name": things.adapter_id, "lora_path": "root/x"}],
    ("POST", "/v1/unload_lora_adapter"): _plain({"lora_name": _NONE}),
    ("POST", "/v1/completions"): _completions,
    ("POST", "/v1/chat/completions"): _chat,
    ("POST", "/v1/responses"): _responses,
    ("POST", "/v1/embeddings"): lambda things, _: [{"model": things.adapter_id, "input": things.text}],
    ("GET", "/v1/models"): _plain(None),
    ("GET", "/v1/models/{model}"): _plain(None),
    ("GET", "/v1/adapters"): _plain(None),
    ("POST", "/v1/adapters"): lambda things, _: [
        {"name": things.adapter_id, "validate_only": True},
        {"name": things.adapter_id, "source": "root/x"},
    ],
    ("GET", _NAME): _plain(None),
    ("PATCH", _NAME): _plain({"labels": {"a": "b"}, "display_name": "d"}),
    ("DELETE", _NAME): _plain(None),
    ("GET", f"{_NAME}/versions"): _plain(None),
    ("DELETE", f"{_NAME}/versions/{{digest}}"): _plain(None),
    ("PUT", f"{_NAME}/labels/{{label}}"): lambda things, _: [{"digest": things.digest}],
    ("DELETE", f"{_NAME}/labels/{{label}}"): _plain(None),
    ("POST", f"{_NAME}/activate"): lambda things, _: [{"digest": things.digest}],
    ("POST", f"{_NAME}/rollback"): lambda things, _: [{"expected_digest": things.former_digest}],
    ("PUT", f"{_NAME}/canary"): lambda things, _: [{"digest": things.former_digest, "per_mille": 1}],
    ("DELETE", f"{_NAME}/canary"): _plain(None),
    ("POST", f"{_NAME}/pin"): _plain(None),
    ("POST", f"{_NAME}/unpin"): _plain(None),
    ("POST", f"{_NAME}/load"): lambda things, _: [{"digest": things.digest, "wait_s": 0.0}],
    ("POST", f"{_NAME}/unload"): lambda things, _: [{"digest": things.digest, "wait_s": 0.0}],
    ("GET", "/v1/operations/{operation}"): _plain(None),
    **{("POST", f"/api/v1/{path}"): _plain(None) for path in ("client/config", "client/dynamic_config", "telemetry")},
    ("POST", "/api/v1/create_session"): _plain({"tags": ["a"]}),
    ("POST", "/api/v1/session_heartbeat"): _tinker(session_id=lambda _, session: session),
    ("POST", "/api/v1/sessions/{session_id}/finish"): _plain(None),
    ("POST", "/api/v1/create_sampling_session"): _tinker(
        session_id=lambda _, session: session,
        sampling_session_seq_id=lambda *_: 1,
        model_path=lambda things, _: f"tinker://{things.adapter_id}",
    ),
    ("POST", "/api/v1/asample"): lambda things, session: [sample(sampling_session(things, session))],
    ("POST", "/api/v1/retrieve_future"): _tinker(request_id=lambda *of: f"{sampling_session(*of)}:1"),
    ("POST", "/api/v1/cancel_future"): _plain({"request_id": "none"}),
    **{
        ("POST", f"/api/v1/{action}"): _plain({})
        for action in (
            *("copy_weights", "create_custom_loss", "create_model", "forward", "forward_backward", "get_info"),
            *("load_weights", "optim_step", "save_weights", "save_weights_external", "save_weights_for_sampler"),
            "unload_model",
        )
    },
    ("GET", "/api/v1/healthz"): _plain(None),
    ("GET", "/api/v1/get_server_capabilities"): _plain(None),
    ("GET", "/api/v1/samplers/{sampling_session_id}"): _plain(None),
}
# What would change or end A's own things if it were sent with A's own names and a header beside.
_ENDING = {
    ("DELETE", _NAME),
    ("DELETE", f"{_NAME}/versions/{{digest}}"),
    ("POST", f"{_NAME}/rollback"),
    ("POST", f"{_NAME}/unpin"),
    ("POST", f"{_NAME}/unload"),
}


def routes(document: Mapping[str, Any]) -> set[Route]:
    """All that the gateway serves."""
    return {(method.upper(), path) for path, methods in document["paths"].items() for method in methods}


def requests(route: Route, things: Things, session: str) -> list[Sent]:
    """Requests of a route that are valid for whoever has these things."""
    parameters = _parameters(route, things, session)
    is_form = route == ("POST", "/v1/adapters")
    return [
        Sent(route=route, parameters=parameters, body=body, is_form=is_form and "source" not in body)
        for body in REQUESTS[route](things, session)
    ]


def attacks(
    document: Mapping[str, Any], route: Route, mine: Things, other: Things, nobodys: Things
) -> Iterator[Attack]:
    """All of one route: each place with each value, all places together, and headers."""
    theirs, controls = values(other, OTHERS), values(nobodys, NOBODYS)
    method, path = route
    described = document["paths"][path][method.lower()]
    queries = [each["name"] for each in described.get("parameters", ()) if each["in"] == "query"]
    fields = list(_fields(document, described))
    for number, sent in enumerate(requests(route, mine, MINE)):
        if route in _ENDING and "name" in sent.parameters:
            sent = replace(sent, parameters={**sent.parameters, "name": _NONE})
        puts: dict[str, Callable[[Sent, str], Sent]] = {}
        for name in HEADERS:
            put = _put_in("headers", name)
            yield Attack(f"{number}: header {name}", put(sent, other.tenant), put(sent, nobodys.tenant))
        puts |= {f"path {name}": _put_in("parameters", name) for name in sent.parameters if name != "label"}
        puts |= {f"query {name}": _put_in("query", name) for name in queries}
        if sent.body is not None:
            places = dict.fromkeys([*fields, *_texts(sent.body)])
            puts |= {f"body {'.'.join(map(str, place))}": _put_into_body(place) for place in places}
        for where, put in puts.items():
            for kind, value in theirs.items():
                yield Attack(f"{number}: {where} = {kind}", put(sent, value), put(sent, controls[kind]))
    for number, (sent, control) in enumerate(
        zip(requests(route, other, OTHERS), requests(route, nobodys, NOBODYS), strict=True)
    ):
        yield Attack(f"{number}: everything", sent, control)


def _parameters(route: Route, things: Things, session: str) -> dict[str, str]:
    known = {
        "name": things.adapter_id,
        "model": things.adapter_id,
        "digest": things.former_digest,
        "label": things.label_key,
        "operation": things.operation_id,
        "session_id": session,
        "sampling_session_id": sampling_session(things, session),
    }
    return {name: value for name, value in known.items() if f"{{{name}}}" in route[1]}


def _put_in(part: str, name: str) -> Callable[[Sent, str], Sent]:
    def put(sent: Sent, value: str) -> Sent:
        changed: dict[str, Any] = {part: {**getattr(sent, part), name: value}}
        return replace(sent, **changed)

    return put


def _put_into_body(place: Place) -> Callable[[Sent, str], Sent]:
    """Puts a text at a place, with the messages and the list around it if there are none."""

    def put(sent: Sent, value: str) -> Sent:
        body = copy.deepcopy(sent.body)
        inner: Any = body
        for step, following in itertools.pairwise(place):
            kind: Any = list if isinstance(following, int) else dict
            if isinstance(step, int) and step == len(inner):
                inner.append(kind())
            if not isinstance(inner[step] if isinstance(step, int) else inner.get(step), kind):
                inner[step] = kind()
            inner = inner[step]
        last = place[-1]
        if last == ANY_KEY:
            inner[value] = "x"
        elif isinstance(last, int):
            inner[last : last + 1] = [value]
        else:
            inner[last] = value
        return replace(sent, body=body)

    return put


def _texts(body: Any, place: Place = ()) -> Iterator[Place]:
    """Every text of a body."""
    entries = body.items() if isinstance(body, dict) else enumerate(body) if isinstance(body, list) else ()
    for step, value in entries:
        if isinstance(value, str):
            yield (*place, step)
        else:
            yield from _texts(value, (*place, step))


def _fields(document: Mapping[str, Any], described: Mapping[str, Any]) -> Iterator[Place]:
    """Every field of the body's types that takes a text, a list of texts or anything, also within messages."""
    content = described.get("requestBody", {}).get("content", {})
    for media in content.values():
        schema = media["schema"]
        if "$ref" in schema:
            yield from _fields_of(document, schema, ())


def _fields_of(document: Mapping[str, Any], schema: Mapping[str, Any], place: Place) -> Iterator[Place]:
    for kind in schema.get("anyOf", [schema]):
        if "$ref" in kind:
            kind = document["components"]["schemas"][kind["$ref"].rpartition("/")[2]]
        if "properties" in kind:
            for name, inner in kind["properties"].items():
                yield from _fields_of(document, inner, (*place, name))
        elif kind.get("type") == "object":
            yield from ((*place, "key"), (*place, ANY_KEY))
        elif kind.get("type") == "array" and "items" in kind:
            yield from _fields_of(document, kind["items"], (*place, 0))
        elif kind.get("type", "string") == "string":
            yield place
