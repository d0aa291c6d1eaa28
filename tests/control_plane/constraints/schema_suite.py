"""JSON-Schema-Test-Suite against our grammars: for every case whether the grammar accepts what the schema accepts.

    python -m tests.control_plane.constraints.schema_suite    writes what was found to ratchet.json

`json_schema_suite/draft2020-12.json` holds the required cases of that draft, by file, unchanged, as the source
distribution of jsonschema 4.26.0 has them; their licence is beside them.
"""

from __future__ import annotations

import itertools
import json
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import llguidance

from contract.sampling import GRAMMAR_LIMITS
from control_plane.constraints.compile_process import compiled
from tests.makers import make_tokenizer

HERE = Path(__file__).parent / "json_schema_suite"
RATCHET = HERE / "ratchet.json"
NUM_TOKENS, END = 264, 0


@cache
def suite() -> dict[str, list[dict[str, Any]]]:
    """The groups of each file: a schema, and instances with what they should be."""
    loaded: dict[str, list[dict[str, Any]]] = json.loads((HERE / "draft2020-12.json").read_text(encoding="utf-8"))
    return loaded


@cache
def vocabulary() -> llguidance.LLTokenizer:
    """Tokens for all bytes, and few merges."""
    with tempfile.TemporaryDirectory() as directory:
        text = (make_tokenizer(Path(directory), vocab_size=NUM_TOKENS) / "tokenizer.json").read_text(encoding="utf-8")
    return llguidance.LLTokenizer(text, n_vocab=NUM_TOKENS, eos_token=[END])


def found_in(name: str) -> dict[str, Any]:
    """What the cases of a file come to.

    passed: how many are judged as the suite says. refused: by reason, the groups whose schema is not compiled.
    stricter: by reason, valid instances that the grammar does not write. looser: instances that it writes and that are
    not valid.
    """
    found: dict[str, Any] = {"passed": 0, "refused": {}, "stricter": {}, "looser": []}
    for group in suite()[name]:
        try:
            accepts = Acceptor(group["schema"])
        except ValueError as error:
            reason = " ".join(str(error).split())
            found["refused"].setdefault(reason, []).append(group["description"])
            continue
        for case in group["tests"]:
            if accepts(case["data"]) == case["valid"]:
                found["passed"] += 1
                continue
            name_of_case = f"{group['description']}: {case['description']}"
            if case["valid"]:
                reason = _reason(accepts, group["schema"], case["data"])
                found["stricter"].setdefault(reason, []).append(name_of_case)
            else:
                found["looser"].append(name_of_case)
    return found


class Acceptor:
    """Whether a schema's grammar writes a document. Raises ValueError for a schema that is refused."""

    def __init__(self, schema: Any) -> None:
        grammar = compiled({"kind": "json_schema", "value": json.dumps(schema)}, vocabulary())
        limits = llguidance.LLParserLimits(**GRAMMAR_LIMITS)
        self._matcher = llguidance.LLMatcher(vocabulary(), grammar, log_level=0, limits=limits)

    def __call__(self, document: Any) -> bool:
        matcher = self._matcher.deep_copy()
        text = json.dumps(document, separators=(",", ":"), ensure_ascii=False)
        return bool(matcher.consume_tokens(vocabulary().tokenize_str(text)) and matcher.is_accepting())


def _reason(accepts: Acceptor, schema: Any, document: Any) -> str:
    """Why a valid document is not written: found by what would be written in its place."""
    if isinstance(document, dict) and any(map(accepts, map(dict, itertools.permutations(document.items())))):
        return "its members are not in the schema's order"
    if accepts(_without_points(document)):
        return "a whole number is written with a point"
    assert isinstance(schema, dict) and "format" in schema, (schema, document)
    return "its format is enforced, which the suite takes for a note"


def _without_points(document: Any) -> Any:
    """The document with 1 in place of 1.0."""
    if isinstance(document, list):
        return [_without_points(item) for item in document]
    return int(document) if isinstance(document, float) and document.is_integer() else document


def main() -> None:
    """Write the ratchet."""
    found = {name: found_in(name) for name in suite()}
    RATCHET.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
