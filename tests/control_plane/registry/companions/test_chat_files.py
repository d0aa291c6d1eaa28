"""Templates and special tokens are read as transformers writes them; what is broken is named by file and key."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from control_plane.registry.companions.chat_files import ChatFilesError, read_chat_files

NAMED = [{"name": "default", "template": "d"}, {"name": "tool_use", "template": "t"}]


def write(directory: Path, config: object, **files: str) -> Path:
    (directory / "tokenizer_config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    for name, text in files.items():
        (directory / name.replace("__", ".")).write_text(text)
    return directory


@pytest.mark.parametrize(
    ("value", "template"),
    [("plain", "plain"), (NAMED, "d"), ({"default": "d", "tool_use": "t"}, "d"), (None, None), ([], None)],
)
def test_template_may_be_a_string_or_named(tmp_path: Path, value: Any, template: str | None) -> None:
    assert read_chat_files(write(tmp_path, {"chat_template": value})).template == template


def test_template_file_comes_before_the_config(tmp_path: Path) -> None:
    directory = write(tmp_path, {"chat_template": "config"}, chat_template__jinja="file")
    assert read_chat_files(directory).template == "file"


def test_named_templates_without_a_default_say_why_there_is_none(tmp_path: Path) -> None:
    files = read_chat_files(write(tmp_path, {"chat_template": NAMED[1:]}))
    assert files.template is None and "none of them is named default" in files.reason


def test_special_tokens_are_read_in_either_form(tmp_path: Path) -> None:
    config = {"bos_token": "<s>", "eos_token": {"content": "</s>"}, "pad_token": None, "add_bos_token": True}
    directory = write(tmp_path, config, special_tokens_map__json='{"unk_token": "<unk>", "bos_token": "other"}')
    assert read_chat_files(directory).special_tokens == {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"chat_template": [{"template": "x"}]}, r'tokenizer_config.json: chat_template\[0\] has no string "name"'),
        ({"chat_template": [*NAMED, {"name": "x"}]}, r'chat_template\[2\] has no string "template"'),
        ({"chat_template": ["x"]}, r'chat_template\[0\] has no string "name"'),
        ({"chat_template": [{"name": ["x"], "template": "x"}]}, r'chat_template\[0\] has no string "name"'),
        ({"chat_template": {"default": 3}}, r'chat_template\[0\] has no string "template"'),
        ({"chat_template": 7}, "chat_template is of type int; it must be a string or a list"),
        ({"response_template": "x"}, "response_template is of type str; it must be an object"),
        ({"response_template": {"x": "y" * 65536}}, "response_template has 65545 bytes as JSON; at most 65536"),
        ([1], "tokenizer_config.json: holds a value of type list; it must hold a JSON object"),
        ("{", "tokenizer_config.json: not valid JSON: .*take the file from the checkpoint's source again"),
        ("[" * 100_000, "tokenizer_config.json: not valid JSON"),
    ],
)
def test_broken_file_is_named_with_its_key(tmp_path: Path, config: object, message: str) -> None:
    with pytest.raises(ChatFilesError, match=message):
        read_chat_files(write(tmp_path, config))


def test_file_that_is_no_text_is_named(tmp_path: Path) -> None:
    write(tmp_path, {})
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff\xfe")
    with pytest.raises(ChatFilesError, match=r"chat_template\.jinja: cannot be read"):
        read_chat_files(tmp_path)
