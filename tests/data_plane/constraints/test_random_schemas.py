"""Random schemas, and random walks through the masks of the worker: every document is valid for `jsonschema`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema  # type: ignore[import-untyped]
import llguidance
import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from control_plane.constraints.compile_process import compiled
from data_plane.constraints.masks import forbid
from data_plane.plan import NewRow, RowConstraint, RowSampling, Vocabulary
from tests.data_plane.constraints.lanes import PatientRows, masks_of
from tests.makers import make_tokenizer

NUM_TOKENS, END, MAX_WALK = 264, 0, 3000
_NAMES = st.sampled_from(["a", "b", "c d", "\u00e9", '"'])
_INTEGERS = st.integers(-1000, 1000)
_VALUES = st.one_of(_INTEGERS, st.booleans(), st.none(), st.text("ab\u00e9\\\n", max_size=3))


def _range(low: int, high: int, lowest: str, highest: str, **rest: Any) -> dict[str, Any]:
    return {**rest, lowest: min(low, high), highest: max(low, high)}


_LEAVES: st.SearchStrategy[dict[str, Any]] = st.one_of(
    st.builds(lambda a, b: _range(a, b, "minimum", "maximum", type="integer"), _INTEGERS, _INTEGERS),
    st.builds(lambda a, b: _range(a, b, "minimum", "maximum", type="number"), _INTEGERS, _INTEGERS),
    st.builds(lambda a, b: _range(a, b, "minLength", "maxLength", type="string"), st.integers(0, 6), st.integers(0, 6)),
    st.sampled_from([{"type": "string", "pattern": "^[a-c]{1,3}x?$"}, {"type": "string", "format": "date"}]),
    st.sampled_from([{"type": "boolean"}, {"type": "null"}, {"type": ["boolean", "null"]}]),
    st.builds(lambda values: {"enum": values}, st.lists(_VALUES, min_size=1, max_size=4)),
    st.builds(lambda value: {"const": value}, _VALUES),
)


def _objects(inner: st.SearchStrategy[dict[str, Any]]) -> st.SearchStrategy[dict[str, Any]]:
    def build(properties: dict[str, Any], required: list[bool]) -> dict[str, Any]:
        names = [name for name, is_required in zip(properties, required, strict=False) if is_required]
        return {"type": "object", "properties": properties, "required": names, "additionalProperties": False}

    return st.builds(build, st.dictionaries(_NAMES, inner, max_size=4), st.lists(st.booleans(), min_size=4, max_size=4))


def _containers(inner: st.SearchStrategy[dict[str, Any]]) -> st.SearchStrategy[dict[str, Any]]:
    sizes = st.integers(0, 3)
    return st.one_of(
        st.builds(
            lambda a, b, items: _range(a, b, "minItems", "maxItems", type="array", items=items), sizes, sizes, inner
        ),
        st.builds(
            lambda parts: {"type": "array", "prefixItems": parts, "items": False, "minItems": len(parts)},
            st.lists(inner, min_size=1, max_size=3),
        ),
        st.builds(lambda forms: {"anyOf": forms}, st.lists(inner, min_size=1, max_size=3)),
        _objects(inner),
    )


_TREES = st.recursive(_LEAVES, _containers, max_leaves=6)
SCHEMAS = _TREES | st.builds(
    lambda one, rest: {
        "type": "array",
        "prefixItems": [{"$ref": "#/$defs/one"}, rest],
        "items": False,
        "$defs": {"one": one},
    },
    _TREES,
    st.sampled_from([{"$ref": "#/$defs/one"}, {"type": "null"}]),
)


@pytest.fixture(scope="module")
def vocabulary(tmp_path_factory: pytest.TempPathFactory) -> Vocabulary:
    directory: Path = make_tokenizer(tmp_path_factory.mktemp("tokenizer"), vocab_size=NUM_TOKENS)
    return Vocabulary("v", (directory / "tokenizer.json").read_text(encoding="utf-8"), NUM_TOKENS, (END,))


@pytest.fixture(scope="module")
def reader(vocabulary: Vocabulary) -> llguidance.LLTokenizer:
    return llguidance.LLTokenizer(vocabulary.tokenizer, n_vocab=NUM_TOKENS, eos_token=[END])


@given(schema=SCHEMAS, seed=st.integers(0, 999))
@settings(max_examples=120, deadline=None, derandomize=True)
def test_every_walk_through_the_masks_writes_a_valid_document(
    vocabulary: Vocabulary, reader: llguidance.LLTokenizer, schema: dict[str, Any], seed: int
) -> None:
    grammar = compiled({"kind": "json_schema", "value": json.dumps(schema)}, reader)
    tokens = walk(RowConstraint(grammar, grammar, vocabulary), seed)
    document = json.loads(reader.decode_bytes(tokens))
    jsonschema.Draft202012Validator(schema, format_checker=jsonschema.FormatChecker()).validate(document)


def walk(constraint: RowConstraint, seed: int) -> list[int]:
    """Tokens drawn among those allowed, up to the end."""
    chance = np.random.default_rng(seed)
    rows = PatientRows(NUM_TOKENS)
    row = np.zeros(1, dtype=np.int64)
    rows.add(
        NewRow(
            row=0,
            token_ids=np.ones(1, dtype=np.int32),
            num_prompt_tokens=1,
            num_computed_tokens=0,
            block_ids=np.zeros(1, dtype=np.int32),
            slot=None,
            slot_generation=0,
            sampling=RowSampling(),
            constraint=constraint,
        )
    )
    tokens: list[int] = []
    for _ in range(MAX_WALK):
        masks = masks_of(rows, [0])
        assert not masks.failed
        logits = torch.from_numpy(chance.gumbel(size=(1, NUM_TOKENS)).astype(np.float32))
        forbid(logits, masks)
        token = int(logits.argmax())
        assert logits[0, token] > -1e20, "nothing is allowed"
        if token == END:
            return tokens
        tokens.append(token)
        rows.advance(masks, row, np.array([token], dtype=np.int32))
    raise AssertionError(f"no end after {MAX_WALK} tokens")
