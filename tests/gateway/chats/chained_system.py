"""A model that writes reasoning and calls whatever it is given, and four adapters of it, behind a gateway."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from motet import Client

from tests.e2e.harness import System
from tests.gateway.chats.chained_model import make_chained_model
from tests.gateway.gateway_process import Gateway
from tests.makers import make_adapter

WAIT_S = 240.0
FLAGS = ["--dtype", "float32", "--block-size", "4", "--num-blocks", "512", "--max-rows", "8"]
FLAGS += ["--max-model-len", "512", "--num-slots", "4", "--arena-bytes", "64MiB"]
THOUGHT = ["<think>", "Hm, ", "weather.", "</think>"]
CALL = ["<tool_call>", '{"name": "look_up", ', '"arguments": ', '{"city": ', '"Os', 'lo"}', "}</tool_call>"]
SECOND = ["\n<tool_call>{", '"name": "now", ', '"arguments": {}}', "</tool_call>"]
CHAINS = [
    ["<|begin|>", *THOUGHT, "\n\nI ", "look.", *CALL, *SECOND],
    ["<|result|>", "It ", "rains."],
    ["<|poet|>", "[TOOL_CALLS]", "sing", "[ARGS]", '{"of": ', '"sun"}'],
]
TEMPLATE = (
    '{% if tools %}Write <tool_call>{"name": ..., "arguments": ...}</tool_call> of {{ tools | tojson }}\n{% endif %}'
    "{% for message in messages %}{{ message.role }}: {{ message.content }}"
    "{% for call in message.tool_calls or [] %}({{ call.function.name }}){% endfor %}\n{% endfor %}"
    "{% if add_generation_prompt %}"
    "{% if messages[-1].role == 'tool' %}<|result|>{% else %}<|begin|>{% endif %}{% endif %}"
)
POET = "{# [TOOL_CALLS] #}[TOOL_CALLS][ARGS]{{ messages[-1].content }}{% if add_generation_prompt %}<|poet|>{% endif %}"
TOOLS: list[Any] = [{"type": "function", "function": {"name": "look_up", "parameters": {"type": "object"}}}]
MESSAGES: list[Any] = [{"role": "user", "content": "Is it raining?"}]
GIVEN: dict[str, Any] = {"messages": MESSAGES, "tools": TOOLS, "temperature": 0.0, "max_tokens": 64}


@pytest.fixture(scope="session")
def system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Client, openai.OpenAI]]:
    directory = tmp_path_factory.mktemp("tools")
    special = ["<think>", "</think>", "<tool_call>", "[TOOL_CALLS]", "[ARGS]"]
    checkpoint = make_chained_model(directory / "chained", CHAINS, TEMPLATE, special=special)
    configs: dict[str, dict[str, Any]] = {
        "plain": {},
        "poet": {"chat_template": POET},
        "opened": {"chat_template": TEMPLATE.replace("<|begin|>", "<|im_start|>assistant\n<think>")},
        "broken": {"response_template": {"fields": {"colour": {"open": "a", "shape": 1}}}},
    }
    with System(checkpoint, directory) as system:
        system.start_worker(flags=FLAGS)
        client = system.client()
        for name, config in configs.items():
            adapter = make_adapter(directory / name, checkpoint, rank=2, targets=["q_proj"])
            if config:
                Path(adapter / "tokenizer_config.json").write_text(json.dumps(config))
            client.adapters.register(name, adapter)
        with (
            Gateway(system.address, directory) as gateway,
            openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0, timeout=WAIT_S) as api,
        ):
            yield client, api
