"""`/v1/embeddings` gives what Motet's Embed gives, in both encodings."""

from __future__ import annotations

import base64
import struct
from typing import Any

import openai
import pytest

from tests.gateway.openai.conftest import PROMPT, Served


@pytest.mark.parametrize("model", ["test/tiny", "legal", "legal@1"])
def test_embeddings_are_those_of_the_rpc_in_both_encodings(served: Served, model: str) -> None:
    adapter = "" if model == "test/tiny" else model
    inputs: Any = [PROMPT, "Once upon"]
    expected = served.client.embed(inputs, adapter=adapter)
    floats = served.api.embeddings.create(model=model, input=inputs, encoding_format="float")
    assert [each.index for each in floats.data] == [0, 1] and floats.model == model
    for ours, theirs in zip(floats.data, expected.embeddings, strict=True):
        assert ours.embedding == pytest.approx(theirs.values, abs=1e-5)
    assert floats.usage.prompt_tokens == sum(each.prompt_tokens for each in expected.embeddings)
    packed = served.api.post(
        "/embeddings", cast_to=object, body={"model": model, "input": inputs, "encoding_format": "base64"}
    )
    data: Any = packed
    raw = base64.b64decode(data["data"][0]["embedding"])
    assert struct.unpack(f"<{len(raw) // 4}f", raw) == pytest.approx(floats.data[0].embedding, abs=1e-5)
    # The package requests base64 by itself and decodes it.
    assert served.api.embeddings.create(model=model, input=PROMPT).data[0].embedding == pytest.approx(
        floats.data[0].embedding, abs=1e-5
    )


def test_token_ids_and_fewer_dimensions(served: Served) -> None:
    ids = list(served.client.model.tokenize(PROMPT).token_ids)
    whole = served.api.embeddings.create(model="legal", input=PROMPT).data[0].embedding
    assert served.api.embeddings.create(model="legal", input=ids).data[0].embedding == pytest.approx(whole, abs=1e-5)
    assert len(served.api.embeddings.create(model="legal", input=[ids, ids], dimensions=4).data[1].embedding) == 4


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("encoding_format", "hex"),
        ("input", []),
        ("input", [""]),
        ("input", ["a"] * 65),
        ("input", ["a", 1]),
        ("dimensions", 0),
        ("dimensions", 100_000),
        ("dimensions", -1),
        ("truncate_prompt_tokens", 3),
        ("other", 1),
    ],
)
def test_what_is_not_served_is_refused_by_name(served: Served, field: str, value: object) -> None:
    body = {"model": "legal", "input": "a", field: value}
    with pytest.raises(openai.BadRequestError) as raised:
        served.api.post("/embeddings", cast_to=object, body=body)
    assert raised.value.param == field


def test_an_unknown_model_is_404(served: Served) -> None:
    with pytest.raises(openai.NotFoundError) as raised:
        served.api.embeddings.create(model="nobody", input="a")
    assert raised.value.code == "model_not_found"
