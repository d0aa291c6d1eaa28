"""The chat template renders as transformers does, within bounds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from control_plane.api.text.chat_renderer import ChatRenderer
from control_plane.api.text.chat_template import MAX_RENDERED_CHARS, ChatTemplate, ChatTemplateError
from control_plane.api.text.codec import TextCodec
from control_plane.api.text.conversation import Conversation
from control_plane.errors import InvalidRequest, TokenizerUnavailable
from tests.control_plane.api.tokenizers import byte_level_tokenizer

LLAMA_LIKE = """{{ bos_token }}{%- if messages[0]['role'] == 'system' -%}
    {%- set system = messages[0]['content'] | trim -%}
    {%- set messages = messages[1:] -%}
{%- else -%}
    {%- set system = '' -%}
{%- endif -%}
{%- if tools %}TOOLS{% endif -%}
<<SYS>>{{ system | tojson }}<</SYS>>
{% set ns = namespace(count=0) %}
{%- for message in messages %}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('roles must alternate') }}
    {%- endif %}
    {%- set ns.count = ns.count + 1 %}
    {%- if message['content'] == 'skip' %}{% continue %}{% endif %}
    {{- '[' + message['role'] | upper + ' ' ~ ns.count ~ '] ' }}
    {%- generation %}{{ message['content'] | trim }}{% endgeneration %}{{ eos_token }}
{% endfor %}
{%- if add_generation_prompt %}
    {{- '[ASSISTANT]' }}
{%- endif %}"""
MESSAGES = [
    {"role": "system", "content": 'Be <brief> & "kind" é\n'},
    {"role": "user", "content": " hi 😀 "},
    {"role": "assistant", "content": "hello"},
    {"role": "user", "content": "bye"},
]


def checkpoint(directory: Path, config: dict[str, object]) -> Path:
    directory.mkdir(exist_ok=True)
    byte_level_tokenizer().save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", **config})
    )
    return directory


async def test_ids_equal_those_of_transformers(tmp_path: Path) -> None:
    directory = checkpoint(
        tmp_path / "m", {"eos_token": {"content": "</s>", "__type": "AddedToken"}, "chat_template": LLAMA_LIKE}
    )
    theirs = PreTrainedTokenizerFast.from_pretrained(directory)
    codec = TextCodec.load(directory, tmp_path / "unused.json")
    expected = theirs.apply_chat_template(MESSAGES, add_generation_prompt=True, tokenize=False)
    ours = ChatTemplate(LLAMA_LIKE, {"bos_token": "<s>", "eos_token": "</s>"}).render(MESSAGES)
    assert ours == expected
    assert "<brief>" in ours and ours.endswith("[ASSISTANT]")
    assert await codec.encode_chat(Conversation(MESSAGES)) == theirs(expected, add_special_tokens=False)["input_ids"]
    await codec.close()


def test_template_can_refuse_a_conversation() -> None:
    template = ChatTemplate(LLAMA_LIKE, {})
    with pytest.raises(ChatTemplateError, match="roles must alternate"):
        template.render([{"role": "assistant", "content": "x"}])


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ messages[7].content }}",
        "{{ 1 // 0 }}",
        "{{ missing.field }}",
        "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    ],
)
def test_template_that_fails_or_breaks_out_is_an_error(source: str) -> None:
    with pytest.raises(ChatTemplateError):
        ChatTemplate(source, {}).render(MESSAGES)


def test_rendered_size_is_bounded() -> None:
    template = ChatTemplate("{% for i in range(90000) %}{{ messages[0].content }}{% endfor %}", {})
    with pytest.raises(ChatTemplateError, match=str(MAX_RENDERED_CHARS)):
        template.render([{"role": "user", "content": "x" * 1000}])


async def test_checkpoint_without_tokenizer_refuses_text_and_chat(tmp_path: Path) -> None:
    codec = TextCodec.load(tmp_path, tmp_path / "out.json")
    assert not codec.has_tokenizer
    with pytest.raises(TokenizerUnavailable, match="token_ids"):
        await codec.encode_text("x")
    with pytest.raises(TokenizerUnavailable):
        await codec.encode_chat(Conversation(MESSAGES))
    await codec.close()


async def test_checkpoint_without_template_refuses_chat_alone(tmp_path: Path) -> None:
    codec = TextCodec.load(checkpoint(tmp_path / "m", {}), tmp_path / "unused.json")
    assert await codec.encode_text("hell") == [byte_level_tokenizer().token_to_id(t) for t in ("he", "ll")]
    with pytest.raises(TokenizerUnavailable, match="chat template"):
        await codec.encode_chat(Conversation(MESSAGES))
    await codec.close()


async def test_template_refusal_names_the_field(tmp_path: Path) -> None:
    codec = TextCodec(byte_level_tokenizer(), ChatRenderer("{{ raise_exception('no') }}", {}))
    with pytest.raises(InvalidRequest) as caught:
        await codec.encode_chat(Conversation(MESSAGES))
    assert [violation.field for violation in caught.value.violations] == ["chat"]
    await codec.close()


async def test_special_tokens_are_added_as_the_checkpoint_says(tmp_path: Path) -> None:
    from tokenizers.processors import TemplateProcessing

    tokenizer = byte_level_tokenizer()
    bos = tokenizer.token_to_id("<s>")
    tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", bos)])
    tokenizer.enable_truncation(2)
    directory = tmp_path / "m"
    directory.mkdir()
    tokenizer.save(str(directory / "tokenizer.json"))
    codec = TextCodec.load(directory, tmp_path / "unused.json")
    short, long = await codec.encode_text("he"), await codec.encode_text("he" * 4000)
    assert short == [bos, tokenizer.token_to_id("he")]
    assert len(long) == 4001 and long[0] == bos
    await codec.close()


@pytest.mark.slow
async def test_slow_tokenizer_is_converted_by_another_process(tmp_path: Path) -> None:
    """A GPT-2 checkpoint of the old form: vocab.json and merges.txt."""
    directory = tmp_path / "m"
    directory.mkdir()
    tokenizer = byte_level_tokenizer()
    model = json.loads(tokenizer.to_str())["model"]
    (directory / "vocab.json").write_text(json.dumps({**model["vocab"], "<|endoftext|>": len(model["vocab"])}))
    (directory / "merges.txt").write_text("#version: 0.2\nh e\nl l\n")
    (directory / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "GPT2Tokenizer"}))
    (directory / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    out = tmp_path / "cache" / "t.json"
    codec = TextCodec.load(directory, out)
    assert await codec.encode_text("hell") == [model["vocab"]["he"], model["vocab"]["ll"]]
    assert Tokenizer.from_file(str(out)).get_vocab_size() == len(model["vocab"]) + 1
    await codec.close()


TOOL_TEMPLATE = """{%- if tools %}<tools>{% for tool in tools %}{{ tool | tojson }}{% endfor %}</tools>{% endif -%}
{%- for message in messages %}
    {{- '<' + message.role + (' ' + message.name if message.name is defined else '') + '>' }}
    {%- if message.reasoning_content and enable_thinking is not defined %}({{ message.reasoning_content }}){% endif %}
    {%- if message.content is string %}{{- message.content | trim if trims is defined else message.content }}
    {%- else %}{% for part in message.content %}[{{ part.text }}]{% endfor %}{% endif %}
    {%- for call in message.tool_calls or [] %}
        {{- '{' + call.function.name }}
        {%- for key, value in call.function.arguments.items() %} {{ key }}={{ value }}{% endfor %}
        {{- ('#' + call.id if call.id is defined else '') + '}' }}
    {%- endfor %}
    {{- '</' + message.role + '>' }}
{%- endfor %}
{%- if add_generation_prompt %}<assistant>{% endif %}"""
NO_PARTS = "{% for message in messages %}<{{ message.content }}>{% endfor %}"
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
CALLS = [
    {"role": "user", "content": "How is it in Bonn?", "name": "ann"},
    {
        "role": "assistant",
        "content": "",
        "reasoning_content": "I look.",
        "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "weather", "arguments": {"days": 3}}}],
    },
    {"role": "tool", "content": "Rain é. ", "tool_call_id": "c1", "name": "weather"},
]


@pytest.mark.parametrize(
    ("messages", "options"),
    [
        (CALLS, {"tools": [WEATHER]}),
        (CALLS, {"tools": [WEATHER], "enable_thinking": False}),
        (CALLS, {"add_generation_prompt": False}),
        ([{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}], {}),
        ([*MESSAGES[:2], {"role": "assistant", "content": "It is "}], {"continue_final_message": True}),
        ([*MESSAGES[:2], {"role": "assistant", "content": " It is "}], {"continue_final_message": True, "trims": 1}),
        ([{"role": "assistant", "content": [{"type": "text", "text": "a"}] * 2}], {"continue_final_message": True}),
    ],
)
def test_tools_calls_parts_and_open_ends_are_rendered_as_transformers_does(
    tmp_path: Path, messages: list[dict[str, object]], options: dict[str, Any]
) -> None:
    theirs = PreTrainedTokenizerFast.from_pretrained(checkpoint(tmp_path / "m", {"chat_template": TOOL_TEMPLATE}))
    adds = options.pop("add_generation_prompt", "continue_final_message" not in options)
    expected = theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=adds, **options)
    tools, is_open = options.pop("tools", ()), options.pop("continue_final_message", False)
    ours = ChatTemplate(TOOL_TEMPLATE, {}).render(
        messages,
        tools=tools,
        template_kwargs=options,
        add_generation_prompt=adds,
        continue_final_message=is_open,
    )
    assert ours == expected


def test_a_template_that_takes_no_parts_gets_them_as_one_text() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert ChatTemplate(NO_PARTS, {}).render([{"role": "user", "content": parts}]) == "<a\nb>"


def test_a_message_that_the_template_leaves_out_cannot_be_continued() -> None:
    template = ChatTemplate("{{ messages[0].content }}", {})
    with pytest.raises(ChatTemplateError, match="leaves the last message out"):
        template.render([*MESSAGES[:2]], continue_final_message=True, add_generation_prompt=False)
