"""The checkpoint that the clients talk to, and that vLLM serves for comparison: it writes reasoning and two calls.

Heads have 32 values, the fewest that vLLM's attention on CPUs takes.
"""

from __future__ import annotations

from pathlib import Path

from tests.gateway.chats.chained_model import make_chained_model

_THOUGHT = ["<think>", "Hm, ", "weather.", "</think>"]
_CALL = ["<tool_call>", '{"name": "look_up", ', '"arguments": ', '{"city": ', '"Os', 'lo"}', "}</tool_call>"]
_CHAINS = [
    ["<|begin|>", *_THOUGHT, "\n\nI ", "look.", *_CALL],
    ["<|result|>", "It ", "rains."],
    ["<|plain|>", "It is ", "dry."],
]
_TEMPLATE = (
    '{% if tools %}Write <tool_call>{"name": ..., "arguments": ...}</tool_call> of {{ tools | tojson }}\n{% endif %}'
    "{% for message in messages %}{{ message.role }}: {{ message.content }}"
    "{% for call in message.tool_calls or [] %}({{ call.function.name }}){% endfor %}\n{% endfor %}"
    "{% if add_generation_prompt %}"
    "{% if messages[-1].role == 'tool' %}<|result|>{% elif tools %}<|begin|>{% else %}<|plain|>{% endif %}{% endif %}"
)
_SPECIAL = ["<think>", "</think>", "<tool_call>"]


def make_chained_checkpoint(directory: Path) -> Path:
    """Write it and return `directory`.

    With tools it thinks, says "I look." and calls `look_up` for Oslo; to a result it says "It rains."; to all else
    "It is dry."
    """
    sizes = {"hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
    return make_chained_model(directory, _CHAINS, _TEMPLATE, special=_SPECIAL, **sizes)
