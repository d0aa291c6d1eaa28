"""The client in Node streams the same text as the SDK. Left out where its npm packages are not installed."""

from __future__ import annotations

import shutil

from tests.examples.conftest import EXAMPLES, Examples

PROGRAM = str(EXAMPLES / "node/generate.js")


def test_node_client_streams_what_the_sdk_returns(examples: Examples) -> None:
    result = examples.system.client().generate("The party", adapter="legal", max_tokens=64).result()
    node = shutil.which("node")
    assert node
    printed = examples.run_program(node, PROGRAM, "legal", "The party")
    num_tokens = result.finished.usage.completion_tokens
    expected = f"version {result.started.adapter_digest[:12]}\n{result.text}\n{num_tokens} tokens\n"
    assert printed == expected


def test_node_client_shows_the_status_of_a_refusal(examples: Examples) -> None:
    node = shutil.which("node")
    assert node
    printed = examples.run_program(node, PROGRAM, "no-such-adapter", "The party", status=1)
    assert printed.startswith("NOT_FOUND: ") and "no-such-adapter" in printed
