"""GenerationService.Generate: every field with values around its limits, and values that mean nothing."""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator
from typing import Any

import grpc
from google.protobuf.duration_pb2 import Duration
from motet.v1 import generation_pb2, types_pb2

from tests.hostile.bad_inputs import conversations, names
from tests.hostile.bad_inputs.case import INVALID, OK, Case, set_path, short
from tests.hostile.bad_inputs.constraints import CONSTRAINTS
from tests.hostile.bad_inputs.facts import BLOCK_SIZE, MAX_MODEL_LEN, MAX_ROWS, NUM_BLOCKS, VOCAB_SIZE, Facts, sha256
from tests.hostile.bad_inputs.wire import chunk, nested, number

GENERATE = "/motet.v1.GenerationService/Generate"
NAN, INF = math.nan, math.inf
U32, U64 = 2**32 - 1, 2**64 - 1
CACHE_TOKENS = NUM_BLOCKS * BLOCK_SIZE
PROMPT = [9, 10, 11]
PROMPT_BYTES = struct.pack("<3I", *PROMPT)
NOT_FINITE = [NAN, INF, -INF]


def above(value: float) -> float:
    """The next float32 away from zero."""
    return _stepped(value, 1)


def below(value: float) -> float:
    """The next float32 towards zero."""
    return _stepped(value, -1)


def _stepped(value: float, step: int) -> float:
    (bits,) = struct.unpack("<i", struct.pack("<f", value))
    return float(struct.unpack("<f", struct.pack("<i", bits + step))[0])


TINY = above(0.0)
Use = generation_pb2.AdapterUse
BEAM = types_pb2.BeamSearchParams(width=2)

# Field; values that are refused in its name; values that are taken.
TABLE: list[tuple[str, list[Any], list[Any]]] = [
    (
        "sampling.temperature",
        [*NOT_FINITE, -1.0, -TINY, above(100.0), 3e38],
        [0.0, -0.0, TINY, 1e-30, below(100.0), 100.0],
    ),
    ("sampling.top_k", [0, VOCAB_SIZE + 1, 2**31 - 1, 2**31, U32], [1, VOCAB_SIZE - 1, VOCAB_SIZE]),
    ("sampling.top_p", [*NOT_FINITE, 0.0, -0.0, -0.5, above(1.0), 2.0], [TINY, 0.5, below(1.0), 1.0]),
    ("sampling.seed", [], [0, 1, 2**63 - 1, 2**63, U64]),
    ("sampling.min_p", [*NOT_FINITE, -TINY, above(1.0)], [0.0, -0.0, TINY, 1.0]),
    ("sampling.repetition_penalty", [*NOT_FINITE, 0.0, -0.0, -1.0, above(10.0)], [0.5, 1.0, below(10.0), 10.0]),
    ("sampling.presence_penalty", [*NOT_FINITE, above(2.0), above(-2.0), 1e30], [-2.0, -0.0, 0.0, 2.0]),
    ("sampling.frequency_penalty", [*NOT_FINITE, above(2.0), above(-2.0), -1e30], [-2.0, -0.0, 0.0, 2.0]),
    ("sampling.logprobs", [21, 2**31, U32], [0, 1, 19, 20]),
    ("sampling.prompt_logprobs", [21, 2**31, U32], [0, 1, 19, 20]),
    ("sampling.logprobs_mode", [0, 3, 2**31 - 1, -1], [1, 2]),
    ("sampling.logit_bias", [], [{}, {0: 0.0}, {VOCAB_SIZE - 1: 100.0, 0: -100.0}, dict.fromkeys(range(256), -0.0)]),
    ("stopping.max_tokens", [0, MAX_MODEL_LEN - 2, MAX_MODEL_LEN, 2**31, U32], [1, 2, 3]),
    ("stopping.min_tokens", [3, 4, 2**31, U32], [0, 1, 2]),
    ("stopping.stop", [["x"] * 17, ["x"] * 1000], [[], ["x"], ["x"] * 16, ["\0"], ["\U0001f642" * 256], ["y" * 255]]),
    ("stopping.stop_token_ids", [[7] * 257], [[], [0], [VOCAB_SIZE - 1], [7] * 256, list(range(VOCAB_SIZE))]),
    ("stopping.ignore_eos", [], [True, False]),
    ("decoding.n", [0, 1025, 2**31, U32], [1, 2]),
    ("decoding.best_of", [0, 1025, U32], [1, 2]),
    ("decoding.beam_search.width", [0, 1, 17, MAX_ROWS + 1, 2**31, U32], [2, MAX_ROWS - 1, MAX_ROWS]),
    ("output.include_stop", [], [True, False]),
    ("output.skip_special_tokens", [], [True, False]),
    ("output.delta_tokens", [0, 129, 2**31, U32], [1, 2, 128]),
    (
        "output.delta_wait",
        [Duration(), Duration(nanos=999_999), Duration(seconds=10, nanos=1), Duration(seconds=-1), Duration(nanos=-1)],
        [Duration(nanos=10**6), Duration(seconds=10)],
    ),
    ("priority", [-101, 101, 2**31 - 1, -(2**31)], [-100, -1, 0, 100]),
    ("request_id", names.BAD_REQUEST_IDS, ["", *names.GOOD_REQUEST_IDS]),
    ("routing_key", ["s" * 129, "€" * 43, "s" * 100_000], ["", "s" * 128, "\0", "€" * 42, "\U0001f642\u202e"]),
    ("combination", [1, 2, 3, 2**31 - 1, -1], [0]),
    ("cache_salt", ["s" * 129, "€" * 43, "s" * 100_000], ["", "s" * 128, "\0", "€" * 42, "\U0001f642\u202e"]),
    ("preconditions.model_fingerprint", names.BAD_DIGESTS, [""]),
    ("preconditions.prompt_sha256", names.BAD_DIGESTS, ["", sha256(PROMPT_BYTES)]),
    ("adapter", [name for name in names.BAD_IDS if name] + ["adapters/" + name for name in names.BAD_IDS[:12]], [""]),
]

# Rows that name another field, or one element: fields that are set, the field at fault, what the message says.
ELEMENTS: list[tuple[dict[str, Any], str, str]] = [
    ({"stopping.stop": [""]}, "stopping.stop[0]", "256"),
    ({"stopping.stop": ["a", ""]}, "stopping.stop[1]", "use 1 to 256"),
    ({"stopping.stop": ["y" * 257]}, "stopping.stop[0]", "257"),
    ({"stopping.stop": ["\U0001f642" * 257]}, "stopping.stop[0]", "257"),
    ({"stopping.stop_token_ids": [1, VOCAB_SIZE]}, "stopping.stop_token_ids[1]", str(VOCAB_SIZE)),
    ({"stopping.stop_token_ids": [U32]}, "stopping.stop_token_ids[0]", str(U32)),
    ({"token_ids.ids": [VOCAB_SIZE]}, "token_ids.ids[0]", str(VOCAB_SIZE)),
    ({"token_ids.ids": [1, 2, U32]}, "token_ids.ids[2]", str(U32)),
    ({"token_ids.ids": [VOCAB_SIZE - 1, VOCAB_SIZE + 1]}, "token_ids.ids[1]", str(VOCAB_SIZE)),
    ({"resume_from.ids": [VOCAB_SIZE]}, "resume_from.ids[0]", str(VOCAB_SIZE)),
    ({"resume_from.ids": [9, U32]}, "resume_from.ids[1]", str(U32)),
    ({"sampling.logit_bias": {VOCAB_SIZE: 1.0}}, f"sampling.logit_bias[{VOCAB_SIZE}]", str(VOCAB_SIZE)),
    ({"sampling.logit_bias": {U32: 1.0}}, f"sampling.logit_bias[{U32}]", str(VOCAB_SIZE)),
    ({"sampling.logit_bias": {2: NAN}}, "sampling.logit_bias[2]", "100"),
    ({"sampling.logit_bias": {2: INF}}, "sampling.logit_bias[2]", "100"),
    ({"sampling.logit_bias": {2: -INF}}, "sampling.logit_bias[2]", "100"),
    ({"sampling.logit_bias": {2: above(100.0)}}, "sampling.logit_bias[2]", "100"),
    ({"sampling.logit_bias": {2: above(-100.0)}}, "sampling.logit_bias[2]", "-100"),
    ({"sampling.logit_bias": dict.fromkeys(range(1025), 1.0)}, "sampling.logit_bias", "1024"),
    ({"decoding.n": 3, "decoding.best_of": 2}, "decoding.best_of", "3"),
    ({"decoding.beam_search": BEAM, "decoding.n": 3}, "decoding.n", "2"),
    ({"decoding.beam_search": BEAM, "decoding.best_of": 2}, "decoding.best_of", "beam_search"),
    ({"decoding.beam_search": BEAM, "stopping.stop": ["x"]}, "stopping.stop", "stop_token_ids"),
    ({"decoding.beam_search": BEAM, "resume_from.ids": [9]}, "resume_from", "2 completions"),
    ({"decoding.n": 2, "resume_from.ids": [9]}, "resume_from", "2 completions"),
    ({"decoding.best_of": 2, "resume_from.ids": [9]}, "resume_from", "2 completions"),
    ({"sampling.prompt_logprobs": 0, "resume_from.ids": [9]}, "sampling.prompt_logprobs", "resume_from"),
    ({"sampling.prompt_logprobs": 0, "sampling.logprobs_mode": 2}, "sampling.prompt_logprobs", "raw"),
    ({"resume_from.ids": [9, 9, 9]}, "resume_from.ids", "at most"),
    ({"output.token_bytes": True}, "output.token_bytes", "sampling.logprobs"),
    ({"output.delta_tokens": 1, "output.delta_wait": Duration(seconds=1)}, "output.delta_wait", "never waits"),
    ({"output.delta_wait": Duration(seconds=1, nanos=10**9)}, "output.delta_wait", "0.001"),
    ({"adapter_digest": names.UNKNOWN_DIGEST}, "adapter_digest", "adapter"),
    ({"adapters": [Use(name="a")], "adapter": "b"}, "adapters", "together with adapter"),
    ({"adapters": [Use(name="a")], "combination": 2}, "combination", "one adapter"),
    *(
        (
            {"decoding.beam_search.width": 2, "decoding.beam_search.length_penalty": value},
            "decoding.beam_search.length_penalty",
            "10",
        )
        for value in [*NOT_FINITE, above(10.0), above(-10.0)]
    ),
    *(
        ({"decoding.beam_search": BEAM, f"sampling.{name}": value}, f"sampling.{name}", "beam_search")
        for name, value in {
            "temperature": 1.0,
            "top_k": 5,
            "top_p": 0.5,
            "min_p": 0.5,
            "repetition_penalty": 2.0,
            "presence_penalty": 1.0,
            "frequency_penalty": 1.0,
            "logit_bias": {2: 1.0},
            "logprobs": 0,
            "prompt_logprobs": 0,
            "logprobs_mode": 2,
        }.items()
    ),
]

GOOD: list[dict[str, Any]] = [
    {"resume_from.ids": [9, 9]},
    {"resume_from.ids": []},
    {"decoding.n": 2, "decoding.best_of": 2},
    {"decoding.beam_search": BEAM, "decoding.n": 2},
    {"decoding.beam_search": BEAM, "sampling.seed": 5},
    {"decoding.beam_search.width": 2, "decoding.beam_search.length_penalty": -10.0},
    {"decoding.beam_search.width": 2, "decoding.beam_search.length_penalty": 10.0},
    {"decoding.beam_search.width": 2, "decoding.beam_search.early_stopping": True},
    {"token_ids.ids": [0]},
    {"token_ids.ids": [VOCAB_SIZE - 1] * (CACHE_TOKENS - 2)},
]


def request(**fields: Any) -> generation_pb2.GenerateRequest:
    """A good request, some fields replaced; names have __ for dots."""
    return with_fields({name.replace("__", "."): value for name, value in fields.items()})


def with_fields(fields: dict[str, Any]) -> generation_pb2.GenerateRequest:
    """A good request for two tokens, some fields replaced."""
    message = generation_pb2.GenerateRequest(
        token_ids=types_pb2.TokenIds(ids=PROMPT), stopping=types_pb2.StoppingParams(max_tokens=2, ignore_eos=True)
    )
    for path, value in fields.items():
        set_path(message, path, value)
    return message


def tokens_of(data: bytes) -> list[int]:
    """The token ids in one response."""
    return list(generation_pb2.GenerateResponse.FromString(data).delta.token_ids)


def cases(_facts: Facts) -> Iterator[Case]:
    """All of them."""
    for path, bad, good in TABLE:
        yield from (_refused({path: value}, path, f"{path} = {short(value)}") for value in bad)
        yield from (taken({path: value}, f"{path} = {short(value)}") for value in good)
    for path, bad in CONSTRAINTS:
        yield from (
            _refused({"stopping.ignore_eos": False, path: value}, path, f"{path} = {short(value)}") for value in bad
        )
    for fields, field, says in ELEMENTS:
        yield _refused(fields, field, _named(fields), says)
    yield from (taken(fields, _named(fields)) for fields in GOOD)
    yield from _inputs()
    yield from conversations.cases(GENERATE, lambda chat: request(chat=chat))
    yield from _render_times()
    yield from _preconditions()
    yield from _adapters()
    yield from _bytes()
    yield from _tenants()


def _inputs() -> Iterator[Case]:
    """The prompt: missing, empty, too long, of every kind."""
    chat = types_pb2.ChatMessages
    turn = types_pb2.ChatMessage
    rows: list[tuple[str, generation_pb2.GenerateRequest, str, str, str]] = [
        ("no input", generation_pb2.GenerateRequest(), "input", "text, token_ids and chat", "FIELD_INVALID"),
        ("empty text", request(text=""), "text", "at least one token", "FIELD_INVALID"),
        ("empty token ids", request(token_ids=types_pb2.TokenIds()), "token_ids.ids", "at least one", "FIELD_INVALID"),
        ("empty chat", request(chat=chat()), "chat.messages", "at least one", "FIELD_INVALID"),
        (
            "1025 turns",
            request(chat=chat(messages=[turn(role="user")] * 1025)),
            "chat.messages",
            "1024",
            "FIELD_INVALID",
        ),
        ("no role", request(chat=chat(messages=[turn(content="x")])), "chat.messages[0].role", "64", "FIELD_INVALID"),
        (
            "role of 65 characters",
            request(chat=chat(messages=[turn(role="user"), turn(role="r" * 65)])),
            "chat.messages[1].role",
            "64",
            "FIELD_INVALID",
        ),
        (
            "context + 1 tokens",
            request(token_ids__ids=[9] * (MAX_MODEL_LEN + 1)),
            "token_ids",
            "511",
            "CONTEXT_TOO_LONG",
        ),
        ("context full of prompt", request(token_ids__ids=[9] * MAX_MODEL_LEN), "token_ids", "511", "CONTEXT_TOO_LONG"),
        ("200 000 tokens", request(token_ids__ids=[9] * 200_000), "token_ids", "511", "CONTEXT_TOO_LONG"),
        ("text above the context", request(text="x" * 600), "text", "511", "CONTEXT_TOO_LONG"),
        ("text of 1 MB", request(text="x" * 1_000_000), "text", "511", "CONTEXT_TOO_LONG"),
        (
            "chat above the context",
            request(chat=chat(messages=[turn(role="user", content="x" * 600)])),
            "chat",
            "511",
            "CONTEXT_TOO_LONG",
        ),
        (
            "prompt and max_tokens above the context",
            request(token_ids__ids=[9] * 500, stopping__max_tokens=13),
            "stopping.max_tokens",
            "12",
            "CONTEXT_TOO_LONG",
        ),
    ]
    for name, message, field, says, reason in rows:
        yield Case(
            name=name,
            method=GENERATE,
            messages=(message.SerializeToString(),),
            fields=(field,),
            says=says,
            reason=reason,
        )
    for name, message in {
        "a text": request(text="Hello"),
        "a text of special tokens": request(text="</s><s></s>"),
        "a text of a NUL": request(text="\0"),
        "a text beyond the basic plane": request(text="\U0001f642\u202e\ufeff\u0301"),
        "a text of one space": request(text=" "),
        "64 characters of a role": request(chat=chat(messages=[turn(role="r" * 64, content="x")])),
        "an empty turn": request(chat=chat(messages=[turn(role="user")])),
        "template syntax": request(
            chat=chat(messages=[turn(role="{{ 7*7 }}", content="{% for i in x %}{{ ''.__class__ }}")])
        ),
    }.items():
        yield Case(name=name, method=GENERATE, messages=(message.SerializeToString(),), code=OK)
    # The cache holds 256 tokens, less than a context: no worker could ever run it.
    for name, message in {
        "more tokens than the cache": request(token_ids__ids=[9] * CACHE_TOKENS),
        "more completions than rows": request(decoding__n=MAX_ROWS + 1),
        "more samples than rows": request(decoding__best_of=MAX_ROWS + 1),
    }.items():
        fields = {"more tokens than the cache": ("stopping.max_tokens",)}.get(name, ("decoding.best_of",))
        yield Case(name=name, method=GENERATE, messages=(message.SerializeToString(),), fields=fields)


def _render_times() -> Iterator[Case]:
    """When a conversation is rendered."""
    year_3000 = 32_503_680_000
    for moment, is_good in {
        (0, 0): True,
        (year_3000, 0): True,
        (1, 999_999_999): True,
        (-1, 0): False,
        (year_3000 + 1, 0): False,
        (-(2**63), 0): False,
        (2**63 - 1, 0): False,
        (0, -1): False,
        (0, 10**9): False,
        (0, 2**31 - 1): False,
    }.items():
        chat = types_pb2.ChatMessages(messages=[types_pb2.ChatMessage(role="user", content="x")])
        chat.render_time.seconds, chat.render_time.nanos = moment
        name, message = f"chat.render_time = {moment}", request(chat=chat).SerializeToString()
        if is_good:
            yield Case(name=name, method=GENERATE, messages=(message,), code=OK)
        else:
            yield Case(name=name, method=GENERATE, messages=(message,), fields=("chat.render_time",), says="3000")


def _preconditions() -> Iterator[Case]:
    """Another model, another prompt."""
    for name in ("model_fingerprint", "prompt_sha256"):
        message = with_fields({f"preconditions.{name}": names.UNKNOWN_DIGEST}).SerializeToString()
        refused = grpc.StatusCode.FAILED_PRECONDITION
        yield Case(name=f"preconditions.{name} of another one", method=GENERATE, messages=(message,), code=refused)


def _adapters() -> Iterator[Case]:
    """Adapters that are named well and are not there."""
    for name in [*names.GOOD_IDS, "adapters/a"]:
        yield Case(
            name=f"unknown adapter {short(name)}",
            method=GENERATE,
            messages=(with_fields({"adapter": name}).SerializeToString(),),
            code=grpc.StatusCode.NOT_FOUND,
            reason="ADAPTER_NOT_FOUND",
        )
    for digest in names.BAD_DIGESTS:
        message = with_fields({"adapter": "good", "adapter_digest": digest})
        yield Case(
            name=f"adapter_digest = {short(digest)}",
            method=GENERATE,
            messages=(message.SerializeToString(),),
            fields=("adapter_digest",),
        )
    use = generation_pb2.AdapterUse
    for selector in ("", "0", "01", "UP", "1@2"):
        yield _refused({"adapter": f"good@{selector}"}, "adapter", f"version {selector!r}")
        yield _refused({"adapters": [use(name=f"good@{selector}")]}, "adapters[0].name", f"use of {selector!r}")
    for place, name in enumerate(names.BAD_IDS):
        yield _refused({"adapters": [use(name=name)]}, "adapters[0].name", f"use of bad id {place}")
    for place, digest in enumerate(names.BAD_DIGESTS):
        bad = use(name="good", digest=digest)
        yield _refused({"adapters": [bad]}, "adapters[0].digest", f"use of bad digest {place}")
    for scale in (float("nan"), float("inf"), -100.5, 1e30):
        yield _refused({"adapters": [use(name="good", scale=scale)]}, "adapters[0].scale", f"scale {scale}")
    yield _refused({"adapters": [use(name="good")] * 2}, "adapters[1].name", "one adapter twice")
    yield _refused({"adapters": [use(name=f"a{number}") for number in range(5)]}, "adapters", "five adapters")
    yield _refused({"combination": 99, "adapters": [use(name="good")]}, "combination", "an unknown combination")
    yield Case(
        name="unknown version",
        method=GENERATE,
        messages=(with_fields({"adapter": "good", "adapter_digest": names.UNKNOWN_DIGEST}).SerializeToString(),),
        code=grpc.StatusCode.NOT_FOUND,
    )


def _bytes() -> Iterator[Case]:
    """Encodings that no library writes. Protobuf reads some of them, by its own rules."""
    good = request().SerializeToString()
    stop = request(stopping__max_tokens=1).SerializeToString()
    for name, data in {
        "a length beyond the end": b"\x0a\xff\xff\xff\xff\x0f",
        "a length of 2^63": b"\x0a" + b"\xff" * 8 + b"\x7f",
        "field number 0": b"\x00\x00",
        "wire type 7": b"\x0f\x00",
        "a group that does not end": b"\x0b",
        "the end of no group": b"\x0c",
        "a varint of 11 bytes": b"\x60" + b"\xff" * 10 + b"\x01",
        "half of a message": good[: len(good) // 2],
        "packed ids that end in the middle": chunk(5, chunk(1, b"\x89")),
        "messages within messages": nested((6,) + (1,) * 200, b"\x0a"),
        "100 000 zeros": b"\0" * 100_000,
    }.items():
        yield Case(name=name, method=GENERATE, messages=(data,), fields=("request",), says="protobuf")
    for name, data in {
        "max_tokens of 2^32 + 1 is 1 on the wire": stop + chunk(8, number(1, 2**32 + 1)),
        "an unknown field": good + chunk(1000, b"x"),
        "an unknown group": good + b"\xa3\x3f\xa4\x3f",
        "the input twice: the last one counts": chunk(4, b"") + good,
        "unpacked ids": good + chunk(5, number(1, 9)),
    }.items():
        yield Case(name=name, method=GENERATE, messages=(data,), code=OK)
    yield Case(
        name="max_tokens of -1 is 2^32 - 1 on the wire",
        method=GENERATE,
        messages=(good + chunk(8, number(1, 2**64 - 1)),),
        fields=("stopping.max_tokens",),
        says=str(U32),
    )
    yield Case(name="text as a number", method=GENERATE, messages=(number(4, 5),), fields=("input",))


def _tenants() -> Iterator[Case]:
    message = request().SerializeToString()
    for tenant in names.BAD_TENANTS:
        yield Case(
            name=f"tenant {short(tenant)}",
            method=GENERATE,
            messages=(message,),
            fields=("motet-tenant",),
            metadata=(("motet-tenant", tenant),),
        )
    for tenant in names.GOOD_TENANTS:
        yield Case(
            name=f"tenant {short(tenant)}",
            method=GENERATE,
            messages=(message,),
            code=OK,
            metadata=(("motet-tenant", tenant),),
        )
    yield Case(
        name="two tenants",
        method=GENERATE,
        messages=(message,),
        fields=("motet-tenant",),
        says="2 times",
        metadata=(("motet-tenant", "a"), ("motet-tenant", "b")),
    )


def _refused(fields: dict[str, Any], field: str, name: str, says: str = "") -> Case:
    message = with_fields(fields)
    return Case(
        name=name, method=GENERATE, messages=(message.SerializeToString(),), code=INVALID, fields=(field,), says=says
    )


def taken(fields: dict[str, Any], name: str, tenant: str = "") -> Case:
    """A good request, some fields replaced, which is answered."""
    metadata = (("motet-tenant", tenant),) if tenant else ()
    message = with_fields(fields).SerializeToString()
    return Case(name=name, method=GENERATE, messages=(message,), code=OK, metadata=metadata)


def _named(fields: dict[str, Any]) -> str:
    return ", ".join(f"{path} = {short(value)}" for path, value in fields.items())
