"""A model with random weights whose adapters write tool calls in each of the known forms, behind a gateway."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai
import pytest
from motet import Client

from tests.e2e.harness import System
from tests.gateway.chats.chained_system import system as system
from tests.gateway.gateway_process import Gateway
from tests.makers import make_adapter, make_checkpoint, make_tokenizer

WAIT_S = 240.0
FLAGS = ["--dtype", "float32", "--block-size", "16", "--num-blocks", "640", "--max-rows", "8"]
FLAGS += ["--max-model-len", "1024", "--num-slots", "8", "--arena-bytes", "64MiB"]
_TURNS = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
_PROMPT = "{% if add_generation_prompt %}assistant: {% endif %}"
# What a chat template of each form has in it; the tokens in `_MARKS` are known to the tokenizer.
_FORMS: Mapping[str, str] = {
    "hermes": '<tool_call>{"name": ...}</tool_call>',
    "llama3": '<|start_header_id|>{"parameters"}',
    "mistral": "[TOOL_CALLS]",
    "mistral-args": "[TOOL_CALLS][ARGS]",
    "pythonic": "<|python_start|>",
}
_MARKS = ["<tool_call>", "</tool_call>"]
_SPECIAL = ["[TOOL_CALLS]"]


@dataclass(frozen=True)
class Chats:
    """Adapters have the names of the forms; `thinker` reasons first, `silent` has no form."""

    client: Client
    gateway: Gateway
    api: openai.OpenAI
    adapters: Mapping[str, Path]


@pytest.fixture(scope="session")
def chats(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chats]:
    from tokenizers import Tokenizer

    directory = tmp_path_factory.mktemp("chats")
    checkpoint = make_tokenizer(make_checkpoint(directory / "model", vocab_size=259, max_position_embeddings=1024))
    tokenizer = Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
    tokenizer.add_tokens(_MARKS)
    tokenizer.add_special_tokens(_SPECIAL)
    tokenizer.save(str(checkpoint / "tokenizer.json"))
    templates = {name: f"{{% if tools %}}{marks}\n{{% endif %}}{_TURNS}{_PROMPT}" for name, marks in _FORMS.items()}
    thinking = _PROMPT.replace("assistant: ", "<|im_start|>assistant\n<think>")
    templates["thinker"] = f"{{% if tools %}}{_FORMS['hermes']}{{% endif %}}{_TURNS}{thinking}"
    templates["silent"] = f"{_TURNS}{_PROMPT}"
    with System(checkpoint, directory) as system:
        system.start_worker(flags=FLAGS)
        client, adapters = system.client(), dict[str, Path]()
        for name, template in templates.items():
            adapters[name] = make_adapter(directory / name, checkpoint, rank=2, targets=["q_proj"])
            (adapters[name] / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
            client.adapters.register(name, adapters[name])
        with (
            Gateway(system.address, directory) as gateway,
            openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0, timeout=WAIT_S) as api,
        ):
            yield Chats(client, gateway, api, adapters)


WEATHER: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 6},
        "unit": {"enum": ["C", "F", None]},
        "days": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2},
    },
    "required": ["city", "unit"],
    "additionalProperties": False,
}
NOW: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
SCHEMAS = {"weather": WEATHER, "now": NOW}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": name, "parameters": schema}} for name, schema in SCHEMAS.items()
]
