"""Response templates of common formats, for checkpoints that bring none, and how their marks are recognised."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_THINK = {"open": "<think>", "close": "</think>"}
_FUNCTION = {"type": "function", "function": "{content}"}

BUNDLED: Mapping[str, Mapping[str, Any]] = {
    "hermes": {
        "start_anchor": "<|im_start|>assistant\n",
        "fields": {
            "reasoning_content": _THINK,
            "tool_calls": {
                "open_pattern": r"\s*<tool_call>",
                "close": "</tool_call>",
                "repeats": True,
                "content": "json",
                "transform": _FUNCTION,
            },
            "content": {"close_pattern": r"\s*(?:<\|im_end\|>|<\|endoftext\|>)"},
        },
    },
    "llama3": {
        "start_anchor": "<|start_header_id|>assistant<|end_header_id|>\n\n",
        "fields": {
            "tool_calls": {
                # At the beginning of the completion alone; a text that is not a call is given back as content.
                "open_pattern": r"\A\s*(?:<\|python_tag\|>)?",
                "content": "json",
                "transform": {
                    "type": "function",
                    "function": {"name": "{content.name}", "arguments": "{content.parameters}"},
                },
            },
            "content": {"close": ["<|eot_id|>", "<|eom_id|>", "<|end_of_text|>"]},
        },
    },
    "mistral": {
        "start_anchor": "[/INST]",
        "fields": {
            "tool_calls": {
                "open_pattern": r"\s*\[TOOL_CALLS\]",
                "content": "json",
                "transform_each": True,
                "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{arguments}"}},
            },
            "content": {"close": "</s>"},
        },
    },
    "mistral-args": {
        "start_anchor": "[/INST]",
        "fields": {
            "reasoning_content": {"open": "[THINK]", "close": "[/THINK]"},
            "tool_calls": {
                "open_pattern": r"\s*\[TOOL_CALLS\](?P<name>[^\[\]{}\s]+)\[ARGS\]",
                "repeats": True,
                "content": "json",
                "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
            },
            "content": {"close": "</s>"},
        },
    },
    "pythonic": {
        "start_anchor": [
            "<|header_start|>assistant<|header_end|>\n\n",
            "<|start_header_id|>assistant<|end_header_id|>\n\n",
        ],
        "fields": {
            "tool_calls": {"open_pattern": r"\A\s*(?:<\|python_start\|>)?", "content": "pythonic"},
            "content": {"close": ["<|python_end|>", "<|eot|>", "<|eom|>", "<|eot_id|>"]},
        },
    },
}

# The first row whose marks all occur in the chat template, or in a conversation that it rendered, is taken.
RECOGNISED: tuple[tuple[tuple[str, ...], str], ...] = (
    (("<tool_call>", "</tool_call>", '"name"'), "hermes"),
    (("[TOOL_CALLS]", "[ARGS]"), "mistral-args"),
    (("[TOOL_CALLS]",), "mistral"),
    (("<|python_start|>",), "pythonic"),
    (("<|start_header_id|>", '"parameters"'), "llama3"),
)


def recognise(text: str) -> str | None:
    """The name of the bundled template whose marks the text has; None if it has none's."""
    return next((name for marks, name in RECOGNISED if all(mark in text for mark in marks)), None)
