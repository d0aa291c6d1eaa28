"""Prompts, parameters and adapters of an LLM as requests."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from motet import LLM, ChatMessage, InvalidArgument, SamplingParams
from motet.cli.main import main
from motet.offline.inputs import conversations_of, either_sampling, items_of, prompts_of
from motet.offline.private_server import OF_VLLM, flags_of
from motet.requests import generate_request

TURN = {"role": "user", "content": "hello"}


@pytest.mark.parametrize(
    ("given", "prompts"),
    [
        ("a", ["a"]),
        ({"prompt": "a"}, ["a"]),
        ({"prompt_token_ids": [5, 6]}, [[5, 6]]),
        ([5, 6], [[5, 6]]),
        (["a", [5, 6], {"prompt": "b"}], ["a", [5, 6], "b"]),
        ([[5], [6]], [[5], [6]]),
        ([], []),
    ],
)
def test_a_prompt_or_a_list_of_prompts(given: Any, prompts: list[Any]) -> None:
    assert prompts_of(given) == prompts


@pytest.mark.parametrize(
    ("given", "field"),
    [
        (5, "prompts: is int"),
        ([TURN], r"prompts\[0\]: has 'role', 'content'; give \"prompt\" or"),
        (["a", None], r"prompts\[1\]: is None"),
        (["a", ChatMessage("user", "x")], r"prompts\[1\]: .*use chat\(\) for messages"),
        ([{"prompt": 3}], r"prompts\[0\].prompt: is 3"),
        ([[]], r"prompts\[0\]: is \[\]"),
        ({"prompt": "a", "prompt_token_ids": [1]}, "prompts: has 'prompt', 'prompt_token_ids'"),
    ],
)
def test_what_is_no_prompt_is_refused_with_its_place(given: Any, field: str) -> None:
    with pytest.raises(InvalidArgument, match=field):
        prompts_of(given)


def test_one_conversation_or_several() -> None:
    assert conversations_of([TURN]) == [[TURN]]
    assert conversations_of([ChatMessage("user", "x")]) == [[ChatMessage("user", "x")]]
    assert conversations_of([[TURN], [TURN, TURN]]) == [[TURN], [TURN, TURN]]
    for wrong in ("hello", 5):
        with pytest.raises(InvalidArgument, match="messages: is"):
            conversations_of(wrong)  # type: ignore[arg-type]  # on purpose


def test_parameters_and_adapters_are_one_for_all_or_one_each() -> None:
    both = items_of(["a", "b"], SamplingParams(max_tokens=3), "poet", {})
    assert [item.options for item in both] == [{"max_tokens": 3, "adapter": "poet"}] * 2
    each = items_of(["a", "b", "c"], [{"seed": 1}, {"seed": 2}, {}], ["poet", None, {"x": 0.5}], {"tools": []})
    assert [item.options for item in each] == [
        {"seed": 1, "tools": [], "adapter": "poet"},
        {"seed": 2, "tools": []},
        {"tools": [], "adapters": {"x": 0.5}},
    ]
    assert [item.adapter for item in each] == ["poet", None, {"x": 0.5}]


def test_sampling_has_two_names_and_one_is_given() -> None:
    params = SamplingParams(max_tokens=3)
    assert either_sampling(params, None) is either_sampling(None, params) is params
    with pytest.raises(InvalidArgument, match="sampling_params: is another name of sampling"):
        either_sampling(params, params)


@pytest.mark.parametrize(
    ("sampling", "adapter", "said"),
    [
        ([{}], None, "sampling: has 1 values for 2 prompts"),
        (None, ["a", "b", "c"], "adapter: has 3 values for 2 prompts"),
        (5, None, "sampling: is int"),
        (None, ["a", 5], r"adapter\[1\]: is int"),
        ({"adapter": "a"}, None, r"sampling.adapter: an adapter is named by adapter="),
        ({"timeout_s": 5}, None, "sampling.timeout_s: is not known"),
        ({"adapters": {"a": 1.0}}, "b", r"sampling.adapters: an adapter is named by adapter="),
    ],
)
def test_what_fits_no_prompt_is_refused(sampling: Any, adapter: Any, said: str) -> None:
    with pytest.raises(InvalidArgument, match=said):
        items_of(["a", "b"], sampling, adapter, {})


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ({"top_k": -1, "seed": -1}, {"top_k": None, "seed": None}),
        ({"top_k": 0, "min_p": 0.1}, {"top_k": None, "min_p": 0.1}),
        ({"top_k": 5, "seed": 0}, {"top_k": 5, "seed": 0}),
        ({"include_stop_str_in_output": True, "stop": ["a"]}, {"include_stop": True, "stop": ["a"]}),
        ({"detokenize": True, "bad_words": None, "length_penalty": 1.0, "structured_outputs": None}, {}),
    ],
)
def test_what_users_of_vllm_write_means_the_same(written: Any, meant: Any) -> None:
    [item] = items_of(["a"], written, None, {})
    assert item.options == meant


@pytest.mark.parametrize(
    ("written", "said"),
    [
        ({"structured_outputs": {"choice": ["a"]}}, r"sampling.structured_outputs: .*give constraint="),
        ({"detokenize": False}, "sampling.detokenize: .*leave it out"),
        ({"use_beam_search": True}, r"sampling.use_beam_search: .*BeamSearch"),
        ({"top_k": -2}, "sampling.top_k: is -2"),
        ({"top_k": False}, "sampling.top_k: is False"),
        ({"include_stop_str_in_output": True, "include_stop": False}, "include_stop, which is given too"),
    ],
)
def test_a_parameter_of_vllm_that_is_none_here_is_refused_with_what_to_write(written: Any, said: str) -> None:
    with pytest.raises(InvalidArgument, match=said):
        [item] = items_of(["a"], written, None, {})
        generate_request("a", item.options)


def test_an_argument_of_vllms_chat_is_refused_by_its_own_name() -> None:
    with pytest.raises(InvalidArgument, match=r"^chat_template_kwargs: is not known; use template_kwargs"):
        items_of([[TURN]], None, None, {"chat_template_kwargs": {}})


def test_settings_become_flags_and_those_of_the_server_itself_are_refused() -> None:
    assert flags_of({"num_blocks": 512, "no_reflection": True, "exclusive_store": False, "tenants": None}) == [
        *("--num-blocks", "512", "--no-reflection")
    ]
    assert flags_of({"adapter_root": ["a=/a", "b=/b"]}) == ["--adapter-root", "a=/a", "--adapter-root", "b=/b"]
    with pytest.raises(InvalidArgument, match="listen: is set by LLM itself"):
        flags_of({"listen": "0.0.0.0:80"})


@pytest.mark.parametrize("value", [{"a": 1}, b"ab", 1j, {1}])
def test_a_setting_that_no_flag_can_have_is_refused(value: Any) -> None:
    with pytest.raises(InvalidArgument, match=r"^num_blocks: is \w+; give a text, a number"):
        flags_of({"num_blocks": value})


@pytest.mark.parametrize(
    ("name", "instead"),
    [("max_lora_rank", "arena_bytes"), ("gpu_memory_utilization", "memory_utilization"), ("seed", "SamplingParams")],
)
def test_an_argument_of_vllm_is_refused_with_what_to_write_instead(name: str, instead: str) -> None:
    with pytest.raises(InvalidArgument, match=f"^{name}: is an argument of vLLM's LLM .*{instead}"):
        flags_of({name: 4})


def test_no_flag_of_the_server_is_refused_as_vllms(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["up", "--help"])
    flags = {flag.replace("-", "_") for flag in re.findall("--([a-z-]+)", capsys.readouterr().out)}
    assert "kv_bytes" in flags
    assert not flags & OF_VLLM.keys()


def test_a_directory_without_an_adapter_is_refused_before_a_server_starts(tmp_path: Path) -> None:
    """The model is not there either, and nobody has looked at it."""
    with pytest.raises(
        InvalidArgument, match="is not a directory; give the one PEFT's save_pretrained wrote"
    ) as raised:
        LLM(tmp_path / "no model", adapters={"legal": tmp_path / "no adapter"})
    assert raised.value.__notes__ == ["this was the adapter 'legal'"]
