"""A sampling session is one immutable version, whatever becomes of the name; what cannot be resolved is refused."""

from __future__ import annotations

import json

import pytest
import tinker
from motet import VersionRollout
from safetensors.torch import load_file

from tests.e2e.harness import active_version
from tests.gateway.tinker.conftest import NUM_TOKENS, PROMPT, WAIT_S, Served, model_input, params, tokens_of


def push(served: Served, name: str, step: str) -> str:
    """Push the weights of a directory from memory, as a training run does; the digest of the version."""
    directory = served.directories[step]
    config = json.loads((directory / "adapter_config.json").read_text("utf-8"))
    pushed = served.client.adapters.push(name, config, load_file(directory / "adapter_model.safetensors"))
    return active_version(pushed.adapter).digest


def expected(served: Served, step: str) -> list[int]:
    return list(served.oracle.greedy(PROMPT, NUM_TOKENS, step).token_ids)


def test_a_version_pushed_during_a_session_does_not_change_the_session(served: Served) -> None:
    push(served, "policy", "legal")
    before = served.sampler("tinker://policy")
    assert tokens_of(before) == expected(served, "legal")
    push(served, "policy", "newer")
    after = served.sampler("tinker://policy")
    assert tokens_of(before) == expected(served, "legal") != expected(served, "newer") == tokens_of(after)
    assert tokens_of(served.sampler("tinker://policy@1")) == expected(served, "legal")


def test_a_version_is_named_by_number_label_or_digest(served: Served) -> None:
    first = push(served, "named", "legal")
    served.client.adapters.register(
        "named", served.directories["medical"], rollout=VersionRollout(keep_active=True, version_labels=("next",))
    )
    for path, step in (
        ("tinker://named", "legal"),
        ("tinker://named@1", "legal"),
        (f"tinker://named@{first}", "legal"),
        ("tinker://named@2", "medical"),
        ("tinker://named@next", "medical"),
    ):
        assert tokens_of(served.sampler(path)) == expected(served, step), path


def test_two_sessions_on_two_adapters_are_sampled_side_by_side(served: Served) -> None:
    samplers = {name: served.sampler(f"tinker://{name}") for name in ("legal", "medical")}
    futures = [(name, samplers[name].sample(model_input(PROMPT), 1, params())) for name in samplers for _ in range(8)]
    for name, future in futures:
        assert list(future.result(WAIT_S).sequences[0].tokens) == expected(served, name)


def test_the_base_model_is_never_sampled_in_place_of_a_lora_checkpoint(served: Served) -> None:
    """The reference service's open bug: an endpoint that sampled the base model where a LoRA checkpoint was named."""
    base = served.service.create_sampling_client(base_model="model").result(WAIT_S)
    assert tokens_of(base) == expected(served, "") != tokens_of(served.sampler("tinker://legal"))
    for path, error, said in (
        ("tinker://nobody", tinker.NotFoundError, "nobody"),
        ("tinker://legal@9", tinker.NotFoundError, "no version 9"),
        ("tinker://legal@", tinker.BadRequestError, "names no adapter"),
        (f"tinker://legal@{'0' * 64}", tinker.NotFoundError, "no version 0000"),
        ("tinker://run-id/sampler_weights/0001", tinker.BadRequestError, "NAME@NUMBER"),
        ("tinker://", tinker.BadRequestError, "not a valid adapter id"),
    ):
        with pytest.raises(error, match=said):
            served.sampler(path)
    with pytest.raises(tinker.NotFoundError, match="'other/model' is not served"):
        served.service.create_sampling_client(base_model="other/model").result(WAIT_S)
    # A session's id that was changed on its way.
    holder, session = base.holder, "motet-" + "0" * 32
    for changed in (f"{session}:sample:0:legal", f"{session}:sample:0:legal@", f"{session}:sample:0:", "legal", ""):
        sampler = tinker.SamplingClient(holder, sampling_session_id=changed, base_model="model")
        with pytest.raises(tinker.NotFoundError, match="not a sampling session"):
            tokens_of(sampler)


def test_a_deleted_version_fails_its_sessions(served: Served) -> None:
    first = push(served, "gone", "legal")
    sampler = served.sampler("tinker://gone")
    push(served, "gone", "newer")
    served.client.adapters.delete_version("gone", first)
    with pytest.raises(tinker.RequestFailedError, match=first[:12]) as raised:
        tokens_of(sampler)
    assert raised.value.category == "user"
    with pytest.raises(tinker.NotFoundError, match="no version 1"):
        served.sampler("tinker://gone@1")


def test_a_sampler_is_rebuilt_from_its_handle_with_the_same_version(served: Served) -> None:
    sampler = served.sampler("tinker://medical")
    rebuilt = tinker.SamplingClient.from_sampler_handle(sampler.get_sampler_handle(), api_key="tml-no-key-is-needed")
    assert tokens_of(rebuilt) == tokens_of(sampler) == expected(served, "medical")
