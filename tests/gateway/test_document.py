"""`/openapi.json` describes every route, and no request that it allows, or nearly allows, is a mistake of ours."""

from __future__ import annotations

import contextlib
import json
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import httpx
import jsonschema  # type: ignore[import-untyped]
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings, strategies as st
from hypothesis.errors import Unsatisfiable
from schemathesis.generation import GenerationMode

from tests.e2e.harness import System
from tests.gateway.gateway_process import Gateway
from tests.makers import make_adapter, make_checkpoint, make_tokenizer

WAIT_S = 60.0
NUM_CASES = 12  # of each operation, allowed and nearly allowed: about 25 s in all
# Values of fields without which nearly every request is refused: names that exist, prompts.
PLAIN: Mapping[str, tuple[Any, ...]] = {
    "name": ("legal",),
    "model": ("model", "legal"),
    "prompt": ("a", [1, 2], ["a", "b"]),
    "messages": ([{"role": "user", "content": "a"}],),
    "input": ("a", [[1], [2]]),
    "tokens": ([1, 2],),
    "max_tokens": (4,),
}


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    directory = tmp_path_factory.mktemp("document")
    checkpoint = make_tokenizer(make_checkpoint(directory / "model", arch="llama"))
    adapter = make_adapter(directory / "root" / "legal", checkpoint, rank=4, targets=["q_proj"])
    flags = ["--adapter-root", f"team={directory / 'root'}"]
    with System(checkpoint, directory, control_flags=flags) as system:
        system.start_hash_worker(flags=["--max-model-len", "64"])
        system.client().adapters.register("legal", adapter)
        with Gateway(system.address, directory, ["--server-absence-s", "2", "--request-timeout-s", "5"]) as gateway:
            yield gateway.url


def test_every_route_is_in_the_document_and_the_document_is_valid(url: str) -> None:
    document = httpx.get(f"{url}/openapi.json", timeout=WAIT_S).json()
    operations = {(method, path) for path, methods in document["paths"].items() for method in methods}
    for known in (
        ("post", "/v1/chat/completions"),
        ("get", "/v1/models/{model}"),
        ("post", "/v1/adapters"),
        ("delete", "/v1/adapters/{name}/versions/{digest}"),
        ("post", "/tokenize"),
        ("post", "/api/v1/asample"),
        ("get", "/metrics"),
        ("get", "/openapi.json"),
    ):
        assert known in operations
    ids = [about["operationId"] for methods in document["paths"].values() for about in methods.values()]
    assert len(ids) == len(set(ids)) == len(operations)
    for name, schema in document["components"]["schemas"].items():
        jsonschema.Draft202012Validator.check_schema(schema)
        assert schema.get("description"), f"{name} says what it is"
    text = json.dumps(document)
    assert {name for name in document["components"]["schemas"] if f'schemas/{name}"' not in text} == set()
    assert document["paths"]["/healthz"]["get"]["security"] == []


@pytest.mark.timeout(170)
def test_no_request_is_a_mistake_of_ours(url: str) -> None:
    """Seeded: the same requests in every run."""
    schema = schemathesis.openapi.from_url(f"{url}/openapi.json", timeout=WAIT_S)
    found: list[Any] = list(schema.get_all_operations())
    operations = [each.ok() for each in found]
    tried = Tried(url)
    for operation in sorted(operations, key=lambda each: each.method == "delete"):  # what is deleted is 404
        for mode in (GenerationMode.POSITIVE, GenerationMode.NEGATIVE):
            tried.send(operation, mode)
    assert httpx.get(f"{url}/readyz", timeout=WAIT_S).status_code == 200
    assert tried.problems == []
    assert sum(tried.statuses.values()) > 500
    # It is not only refused.
    for reached in ("completions", "chat/completions", "embeddings", "adapters/{name}/load"):
        assert tried.statuses[f"POST /v1/{reached}", 200] > 0, (reached, tried.statuses)


class Tried:
    """Requests that were sent, by operation and status."""

    def __init__(self, url: str) -> None:
        self.problems: list[str] = []
        self.statuses: Counter[tuple[str, int]] = Counter()
        self._url = url

    def send(self, operation: Any, mode: GenerationMode) -> None:
        """Requests of one operation: what its schemas allow, or nearly allow."""
        required = _required(operation)

        @seed(0)
        @settings(
            max_examples=NUM_CASES,
            deadline=None,
            database=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        @given(
            case=operation.as_strategy(generation_mode=mode),
            kept=st.sets(st.integers(0, 40), max_size=2),
            choice=st.integers(0, 5),
        )
        def send(case: Any, kept: set[int], choice: int) -> None:
            if isinstance(case.body, dict) and mode is GenerationMode.POSITIVE:
                # With all fields at once nearly everything would be refused for one of them.
                for at, field in enumerate(sorted(case.body.keys() - required)):
                    if at not in kept:
                        del case.body[field]
            for where in (case.path_parameters, case.body):
                for field in PLAIN.keys() & (where.keys() if isinstance(where, dict) and choice else ()):
                    where[field] = PLAIN[field][choice % len(PLAIN[field])]
            self._judge(operation, case)

        # An operation without a body and a query has no request that is nearly allowed.
        with contextlib.suppress(*([Unsatisfiable] if mode is GenerationMode.NEGATIVE else [])):
            send()

    def _judge(self, operation: Any, case: Any) -> None:
        response = case.call(base_url=self._url, timeout=WAIT_S)
        self.statuses[f"{operation.method.upper()} {operation.path}", response.status_code] += 1
        if response.status_code >= 500:
            sent = f"{case.method} {case.formatted_path} {str(case.body)[:500]}"
            self.problems.append(f"{sent}: {response.status_code} {response.text[:300]}")


def _required(operation: Any) -> set[str]:
    """The fields that a body must have."""
    document = operation.schema.raw_schema
    about = document["paths"][operation.path][operation.method.lower()]
    schema = about.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema", {})
    name = schema.get("$ref", "").rpartition("/")[2]
    return set(document["components"]["schemas"].get(name, {}).get("required", ()))
