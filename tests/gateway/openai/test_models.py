"""What `model` names: versions, lists, and that the base model never responds for something else."""

from __future__ import annotations

import openai
import pytest

from tests.gateway.openai.conftest import NUM_TOKENS, PROMPT, Served


def text_of(served: Served, model: str) -> str:
    reply = served.api.completions.create(
        model=model, prompt=PROMPT, max_tokens=NUM_TOKENS, temperature=0.0, extra_body={"ignore_eos": True}
    )
    assert reply.model == model
    return reply.choices[0].text


@pytest.mark.parametrize(
    "model",
    ["nobody", "legal@99", "legal@nothing", "Org/Model", "legal@" + "0" * 12, "legal@89b5", "legal@0", "", "legal@"],
)
@pytest.mark.parametrize("stream", [False, True])
def test_known_bug_the_base_model_responds_instead_of_the_adapter(served: Served, model: str, stream: bool) -> None:
    with pytest.raises(openai.NotFoundError) as raised:
        served.api.completions.create(model=model, prompt=PROMPT, stream=stream)
    assert raised.value.code == "model_not_found" and raised.value.param == "model"
    with pytest.raises(openai.NotFoundError):
        served.api.chat.completions.create(model=model, messages=[{"role": "user", "content": "a"}], stream=stream)


def test_a_version_is_named_by_number_label_and_digest(served: Served) -> None:
    adapter = served.client.adapters.get("legal")
    assert adapter.active_version is not None
    digest = adapter.active_version.digest
    served.client.adapters.set_label("legal", "stable", digest)
    expected = text_of(served, "legal")
    for name in ("legal@1", "legal@stable", f"legal@{digest}", f"legal@{digest[:12]}", f"model:legal@{digest[:20]}"):
        assert text_of(served, name) == expected, name
    assert text_of(served, "model") != expected
    response = served.api.completions.with_raw_response.create(model="legal@1", prompt=PROMPT, max_tokens=1)
    assert response.headers["x-motet-adapter-digest"] == digest and response.headers["x-request-id"]


def test_models_are_listed_base_first_and_found_one_by_one(served: Served) -> None:
    models = list(served.api.models.list())
    assert [model.id for model in models] == ["test/tiny", "model", "legal", "medical"]
    base, legal = models[0].model_dump(), models[2].model_dump()
    assert base["parent"] is None and base["max_model_len"] == 128 and legal["parent"] == "test/tiny"
    active = served.client.adapters.get("legal").active_version
    assert active is not None and legal["root"] == active.digest
    assert served.api.models.retrieve("legal") == models[2] and served.api.models.retrieve("test/tiny") == models[0]
    assert served.api.models.retrieve("legal@1").model_dump()["root"] == active.digest
    paged = served.api.models.list(extra_query={"after": "model", "limit": 1})
    assert [model.id for model in paged.data] == ["legal"] and paged.has_more  # type: ignore[attr-defined]
    with pytest.raises(openai.NotFoundError):
        served.api.models.retrieve("nobody")


@pytest.mark.parametrize("limit", ["0", "-1", "1001", "00001", "1.5", "x", "", "\u0661"])
def test_a_limit_of_a_list_that_is_no_count_is_refused(served: Served, limit: str) -> None:
    with pytest.raises(openai.BadRequestError) as raised:
        served.api.models.list(extra_query={"limit": limit})
    assert raised.value.param == "limit" and "from 1 to 1000" in raised.value.message
