"""What an adapter brings beside its weights: what is kept, what is dropped, what is refused."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from control_plane.errors import InvalidAdapter
from control_plane.registry.companions.documents import CHAT, GENERATION, TOKENIZER, decode_chat, decode_defaults
from control_plane.registry.companions.packing import pack_whole
from control_plane.registry.companions.tokenizer import extended
from control_plane.registry.model.base_model import BaseModel
from control_plane.registry.peft.ingest import PackedInfo
from data_plane.adapters.format.manifest import read_manifest
from tests.control_plane.api.tokenizers import byte_level_tokenizer
from tests.control_plane.registry.rig import base_model, write_adapter

TEMPLATE = "{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}"


class Rig:
    """A base checkpoint with text files, and adapters of it."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.num_packed = 0
        model_dir = directory / "base"
        model_dir.mkdir()
        self.tokenizer = byte_level_tokenizer().to_str()
        (model_dir / "tokenizer.json").write_text(self.tokenizer)
        (model_dir / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "chat_template": TEMPLATE}))
        (model_dir / "generation_config.json").write_text(json.dumps({"eos_token_id": 0, "temperature": 0.6}))
        self.base: BaseModel = replace(
            base_model(), model_dir=model_dir, vocab_size=300, tokenizer_file=model_dir / "tokenizer.json"
        )

    def pack(self, files: Mapping[str, Any]) -> PackedInfo:
        """Pack an adapter that has these files too; an object is written as JSON."""
        self.num_packed += 1
        own = self.directory / f"adapter-{self.num_packed}"
        paths = write_adapter(own)
        for name, content in files.items():
            paths[name] = own / name
            raw = content if isinstance(content, bytes | str) else json.dumps(content)
            paths[name].write_bytes(raw if isinstance(raw, bytes) else raw.encode())
        out = own / "chunks"
        out.mkdir()
        return pack_whole(paths, self.base, directory=out, max_adapter_bytes=1 << 20)

    def with_tokens(self, *tokens: Mapping[str, Any], **parts: Any) -> str:
        described = json.loads(self.tokenizer)
        flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)
        described["added_tokens"] += [{**flags, **token} for token in tokens]
        return json.dumps({**described, **parts})


@pytest.fixture
def rig(tmp_path: Path) -> Rig:
    return Rig(tmp_path)


def document(packed: PackedInfo, name: str) -> bytes:
    return packed.chunks[packed.companions.index(name) - len(packed.companions)].path.read_bytes()


def test_files_that_repeat_the_base_checkpoints_change_nothing(rig: Rig) -> None:
    """Also in another form: other order of keys, truncation of a training run, further fields."""
    described = json.loads(rig.tokenizer)
    described["truncation"] = {"max_length": 8, "strategy": "LongestFirst", "stride": 0, "direction": "Right"}
    plain = rig.pack({})
    repeated = rig.pack(
        {
            "tokenizer.json": json.dumps(described, indent=2),
            "tokenizer_config.json": {"chat_template": TEMPLATE, "pad_token": "</s>", "padding_side": "left"},
            "special_tokens_map.json": {"bos_token": {"content": "<s>"}},
            "chat_template.jinja": TEMPLATE,
            "generation_config.json": {"temperature": 0.6, "eos_token_id": [0], "transformers_version": "5.0"},
        }
    )

    assert (repeated.digest, repeated.companions) == (plain.digest, ())
    assert b"companions" not in plain.manifest


def test_a_template_of_its_own_makes_another_version_that_workers_read(rig: Rig) -> None:
    first = rig.pack({"chat_template.jinja": "a" + TEMPLATE})
    second = rig.pack({"tokenizer_config.json": {"chat_template": "b" + TEMPLATE, "bos_token": "</s>"}})

    assert first.companions == second.companions == (CHAT,)
    assert len({first.digest, second.digest, rig.pack({}).digest}) == 3
    assert decode_chat(document(second, CHAT)).template == "b" + TEMPLATE
    assert decode_chat(document(second, CHAT)).special_tokens == {"bos_token": "</s>"}
    manifest = read_manifest(second.manifest, second.digest)
    assert len(manifest.chunks) == len(second.chunks) - 1


def test_a_response_template_of_its_own_is_kept_with_the_base_checkpoints_chat_template(rig: Rig) -> None:
    own = {"fields": {"content": {"close": "<end>"}}}
    packed = rig.pack({"tokenizer_config.json": {"response_template": own}})
    kept = decode_chat(document(packed, CHAT))
    assert (kept.template, kept.response_template) == (TEMPLATE, own)
    config = rig.base.model_dir / "tokenizer_config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "response_template": own}))
    assert rig.pack({"tokenizer_config.json": {"response_template": own}}).companions == ()
    with pytest.raises(InvalidAdapter, match="response_template is of type list; it must be an object"):
        rig.pack({"tokenizer_config.json": {"response_template": [own]}})


def test_added_tokens_follow_the_base_checkpoints_ids(rig: Rig) -> None:
    next_id = byte_level_tokenizer().get_vocab_size()
    packed = rig.pack({"tokenizer.json": rig.with_tokens({"id": next_id, "content": "<tool>"})})
    listed = rig.pack({"added_tokens.json": {"<tool>": next_id}})

    for each in (packed, listed):
        assert each.companions == (TOKENIZER,)
        own = extended(rig.tokenizer.encode(), document(each, TOKENIZER))
        ids = own.encode("he<tool>ll").ids
        assert next_id in ids
        assert own.decode(ids) == "he<tool>ll"
        assert own.encode("hello").ids == byte_level_tokenizer().encode("hello").ids


def test_generation_defaults_are_those_of_the_table(rig: Rig) -> None:
    config = {
        "temperature": 0.5,
        "top_k": 0,
        "top_p": 0.9,
        "repetition_penalty": 1.1,
        "eos_token_id": [7, 3],
        "max_new_tokens": 9,
        "num_beams": 4,
    }
    sampled = decode_defaults(document(rig.pack({"generation_config.json": config}), GENERATION))
    greedy = rig.pack({"generation_config.json": {**config, "do_sample": False}})

    assert sampled.sampling == {"temperature": 0.5, "top_p": 0.9, "repetition_penalty": 1.1}
    assert (sampled.eos_token_ids, sampled.max_tokens) == ((3, 7), 9)
    assert decode_defaults(document(greedy, GENERATION)).sampling == {"temperature": 0, "repetition_penalty": 1.1}


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("generation_config.json", {"temperature": -1}, "generation_config.temperature: is -1; it must be a number"),
        ("generation_config.json", {"top_p": "0.9"}, "generation_config.top_p"),
        ("generation_config.json", {"top_k": 2.5}, "generation_config.top_k"),
        ("generation_config.json", {"do_sample": 1}, "generation_config.do_sample"),
        ("generation_config.json", {"eos_token_id": 300}, "not below the vocabulary size 300"),
        ("generation_config.json", {"eos_token_id": True}, "generation_config.eos_token_id"),
        ("generation_config.json", {"max_new_tokens": 0}, "generation_config.max_new_tokens"),
        ("generation_config.json", '{"top_k": NaN}', "NaN is not a JSON value"),
        ("generation_config.json", '{"top_k": 1, "top_k": 2}', "'top_k' appears twice"),
        ("generation_config.json", "[" * 100_000, "is not valid JSON"),
        ("generation_config.json", "[]", "it must hold a JSON object"),
        ("chat_template.jinja", b"\xff", "is not UTF-8"),
        ("chat_template.jinja", b"a" * ((1 << 20) + 1), "more than 1048576 bytes"),
        ("tokenizer_config.json", {"chat_template": 3}, "chat_template is of type int"),
        ("tokenizer_config.json", {"chat_template": {"rag": "x"}}, 'no template named "default"'),
        ("tokenizer_config.json", {"added_tokens_decoder": {"x": 1}}, "added_tokens_decoder['x'] is not a token"),
        ("added_tokens.json", {"<tool>": "7"}, "an id must be a number"),
        ("added_tokens.json", {"<tool>": 400}, "its vocabulary has 300 tokens"),
        ("added_tokens.json", {"<tool>": 299}, "gives it 265: ids of added tokens follow"),
        ("added_tokens.json", {"<tool>": 5}, "of the base model"),
        ("tokenizer.json", "{}", "is not a tokenizer that can be read"),
    ],
)
def test_bad_files_are_refused_by_name(rig: Rig, name: str, content: Any, message: str) -> None:
    with pytest.raises(InvalidAdapter) as error:
        rig.pack({name: content})
    assert message in str(error.value)


def test_all_problems_of_the_files_are_reported_together(rig: Rig) -> None:
    """Those of one file, and those of the weights' configuration with those of the files beside it."""
    defaults = {"temperature": -1, "top_p": 7, "max_new_tokens": 0, "eos_token_id": [300]}
    with pytest.raises(InvalidAdapter) as error:
        rig.pack({"generation_config.json": defaults})
    assert {violation.field for violation in error.value.violations} == {
        f"generation_config.{name}" for name in defaults
    }
    # 400 may be a token of the adapter, whose vocabulary is not known where its weights cannot be read.
    files = {
        "tokenizer_config.json": {"chat_template": 3},
        "generation_config.json": {"top_k": -2, "eos_token_id": 400},
    }
    with pytest.raises(InvalidAdapter) as error:
        rig.pack({"adapter_config.json": {"peft_type": "LORA", "r": 0}, **files})
    fields = [violation.field for violation in error.value.violations]
    assert fields == ["r", "tokenizer_config.json", "generation_config.top_k"]


def test_a_tokenizer_that_is_not_the_base_checkpoints_is_refused(rig: Rig) -> None:
    described = json.loads(rig.tokenizer)
    model = {**described["model"], "merges": described["model"]["merges"][:-1]}
    for changed, part in (({"model": model}, "model.merges"), ({"normalizer": {"type": "NFC"}}, "normalizer")):
        with pytest.raises(InvalidAdapter) as error:
            rig.pack({"tokenizer.json": rig.with_tokens(**changed)})
        assert f"differs from the base checkpoint's tokenizer in {part}" in str(error.value)
