"""Every bad adapter is refused with the field at fault, quickly, and never with a path."""

from __future__ import annotations

import json
import pickle
import re
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from control_plane.errors import InvalidAdapter
from control_plane.registry.peft.ingest import CONFIG_FILE, WEIGHTS_FILE
from tests.control_plane.registry.rig import (
    CONFIG,
    MODULES,
    base_model,
    pack,
    safetensors_bytes,
    tensors,
    with_header,
    write_adapter,
)

KEY_A = f"base_model.model.{MODULES[0]}.lora_A.weight"
KEY_B = f"base_model.model.{MODULES[0]}.lora_B.weight"
MAX_REFUSAL_S = 0.2
NUM_REPEATS = 3  # what is slow is so each time; what the machine and the garbage collector add comes once


def refused(files: dict[str, Path]) -> tuple[str, str]:
    """Field and description of the refusal."""
    for _ in range(NUM_REPEATS):
        start_s = time.thread_time()  # work done, however busy the machine is
        with pytest.raises(InvalidAdapter) as caught:
            pack(files)
        if time.thread_time() - start_s < MAX_REFUSAL_S:
            break
    else:
        pytest.fail(f"a refusal takes {MAX_REFUSAL_S} s of CPU time or more, {NUM_REPEATS} times")
    (violation,) = caught.value.violations
    assert str(files[CONFIG_FILE].parent) not in str(caught.value)
    assert len(str(caught.value)) < 600
    return violation.field, violation.description


BAD_FIELDS: list[tuple[str, Any]] = [
    ("alora_invocation_tokens", []),
    ("alora_invocation_tokens", 7),
    ("alora_invocation_tokens", [True]),
    ("alora_invocation_tokens", [-1]),
    ("alora_invocation_tokens", [255, 256]),
    ("alora_invocation_tokens", [1.0]),
    ("alora_invocation_tokens", [1] * 129),
    ("arrow_config", {"top_k": 2}),
    ("bias", "some"),
    ("bias", ["all"]),
    ("ensure_weight_tying", "yes"),
    ("fan_in_fan_out", 1),
    ("init_lora_weights", "pissa"),
    ("init_lora_weights", 1),
    ("kasa_config", {"beta": 1}),
    ("exclude_modules", {"q_proj": 1}),
    ("layer_replication", [[0, 1]]),
    ("layers_pattern", 7),
    ("layers_to_transform", -1),
    ("layers_to_transform", [True]),
    ("layers_to_transform", "0"),
    ("loftq_config", {"loftq_bits": 4}),
    ("lora_alpha", float("1e300")),
    ("lora_alpha", "8"),
    ("lora_alpha", None),  # PEFT has a default for a field that is left out, and fails on null
    ("r", None),
    ("lora_alpha", True),
    ("lora_alpha", 8000),
    ("lora_bias", 1),
    ("init_lora_weights", "corda"),
    ("init_lora_weights", "lora_ga"),
    ("modules_to_save", ["lm_head"]),
    ("modules_to_save", ["score", "lm_head"]),
    ("modules_to_save", "score"),
    ("monteclora_config", {"num_samples": 1}),
    ("peft_type", "LOHA"),
    ("peft_type", None),
    ("r", 0),
    ("r", -1),
    ("r", True),
    ("r", "4"),
    ("rank_pattern", {"q_proj": 0}),
    ("rank_pattern", ["q_proj"]),
    ("alpha_pattern", {"q_proj|v_proj": 4}),
    ("alpha_pattern", {"q_proj": "many"}),
    ("target_modules", []),
    ("target_modules", ["q_proj", 7]),
    ("target_modules", {"q_proj": 1}),
    ("target_modules", ["q_proj", "../v_proj"]),
    ("target_modules", ["q_proj", "v_proj", "lm_head"]),
    ("target_modules", ["q_proj"]),
    ("target_parameters", "experts.gate_up_proj"),
    ("target_parameters", [1]),
    ("task_type", "TEXT"),
    ("task_type", 1),
    ("trainable_token_indices", [1]),
    ("trainable_token_indices", 1),
    ("trainable_token_indices", {"embed_tokens": [-1]}),
    ("modules_to_save", ["norm"]),
    ("use_bdlora", {"nblocks": 1}),
    ("use_dora", "yes"),
    ("use_qalora", True),
    ("use_rslora", "yes"),
    ("velora_config", {"num_groups": 1}),
    ("a_field_of_the_future", 1),
]


@pytest.mark.parametrize(("field", "value"), BAD_FIELDS, ids=[f"{f}={v}"[:60] for f, v in BAD_FIELDS])
def test_a_field_that_changes_the_meaning_is_refused_by_name(tmp_path: Path, field: str, value: Any) -> None:
    assert refused(write_adapter(tmp_path, **{field: value}))[0] == field


def test_a_number_that_is_too_large_or_not_finite_is_refused_with_the_limit(tmp_path: Path) -> None:
    _, description = refused(write_adapter(tmp_path, lora_alpha=float("1e300")))
    assert description == "has 1e+300; a number from -1e+09 to 1e+09 is expected"
    for value in ("NaN", "-Infinity"):
        config = json.dumps(CONFIG | {"lora_alpha": 7}).replace("7", value).encode()
        field, description = refused(write_adapter(tmp_path, config))
        assert (field, description) == (
            CONFIG_FILE,
            f"holds {value}, which is not valid JSON; write a finite number",
        )


def test_unknown_fields_without_a_value_pass(tmp_path: Path) -> None:
    files = write_adapter(tmp_path, future=None, other={}, more=[], last=False)
    assert pack(files)[0].max_rank == 4


def test_a_switch_that_is_null_is_off(tmp_path: Path) -> None:
    files = write_adapter(tmp_path, use_rslora=None, use_dora=None, lora_bias=None)
    assert pack(files)[0].kind == "lora"


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"[]",
        b"{",
        b"\xff\xfe{}",
        b"[" * 100_000,
        b'{"r": ' + b"9" * 5000 + b"}",
        b'{"r": NaN}',
        b'{"r": 1, "r": 4}',
        b"\xef\xbb\xbf{}",
        b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n",
    ],
    ids=["empty", "list", "cut", "not utf-8", "nested", "digits", "nan", "twice", "byte order mark", "git-lfs"],
)
def test_a_config_that_is_no_plain_json_object_is_refused(tmp_path: Path, raw: bytes) -> None:
    assert refused(write_adapter(tmp_path, config=raw))[0] == CONFIG_FILE


def test_every_truncation_is_refused(tmp_path: Path) -> None:
    whole = safetensors_bytes(tensors())
    points = [*range(0, 64), *range(64, len(whole), 97), len(whole) - 1]
    for point in points:
        field, _ = refused(write_adapter(tmp_path, weights=whole[:point]))
        assert field == WEIGHTS_FILE or field.startswith("base_model.model.")


def _entry(shape: Any, start: Any, end: Any, dtype: Any = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


def _file(entries: dict[str, Any], payload: int = 0) -> bytes:
    return with_header(json.dumps(entries).encode(), b"\0" * payload)


BAD_FILES: list[tuple[str, bytes, str]] = [
    ("pickle", pickle.dumps({"a": 1}, protocol=4) + b"x" * 100, "pickle"),
    ("zip", b"PK\x03\x04" + b"\0\0\0\x01" + b"x" * 100, "zip"),
    ("git-lfs", b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "run `git lfs pull`"),
    ("gguf", b"GGUF\x03\0\0\x01" + b"x" * 100, "GGUF"),
    ("gzip", b"\x1f\x8b\x08\0\0\0\0\x01" + b"x" * 100, "gzip"),
    ("header bomb", (99_000_000).to_bytes(8, "little") + b"{", "limit"),
    ("leading blank", with_header(b" " + json.dumps({KEY_A: _entry([4, 16], 0, 256)}).encode(), b"\0" * 256), "'{'"),
    ("no tensors", with_header(b"{}"), "no tensor"),
    ("metadata is not a map", _file({"__metadata__": None}), "__metadata__"),
    ("duplicate names", with_header(b'{"a": {}, "a": {}}'), "twice"),
    ("too many tensors", _file({f"t{i}": _entry([1, 1], 0, 4) for i in range(81)}, 4), "limit 80"),
    ("nested", with_header(b'{"a":' + b"[" * 200_000), "JSON"),
    ("trailing bytes", safetensors_bytes(tensors()) + b"\0", "trailing"),
    ("path-like name", _file({"../../etc/passwd": _entry([4, 16], 0, 256)}, 256), "not a LoRA tensor"),
    ("NUL in a name", _file({"a\0b": _entry([4, 16], 0, 256)}, 256), "not a LoRA tensor"),
    ("long name", _file({"a" * 100_000: _entry([4, 16], 0, 256)}, 256), "not a LoRA tensor"),
    ("overlap", _file({KEY_A: _entry([4, 16], 0, 256), KEY_B: _entry([16, 4], 128, 384)}, 384), "overlap"),
    ("hole", _file({KEY_A: _entry([4, 16], 0, 256), KEY_B: _entry([16, 4], 260, 516)}, 516), "gap"),
    ("offsets outside", _file({KEY_A: _entry([4, 16], 0, 256)}, 100), "outside"),
    ("negative offset", _file({KEY_A: _entry([4, 16], -256, 0)}, 256), "outside"),
    ("huge offset", with_header(b'{"a":{"dtype":"F32","shape":[1,1],"data_offsets":[0,' + b"9" * 4000 + b"]}}"), "out"),
    ("wrong size", _file({KEY_A: _entry([4, 16], 0, 252)}, 252), "need 256"),
    ("zero dimension", _file({KEY_A: _entry([0, 16], 0, 0)}), "a dimension is from 1 to 2147483647"),
    ("overflow", _file({KEY_A: _entry([0, 2**62], 0, 0)}), "a dimension is from 1 to 2147483647"),
    ("float as a size", _file({KEY_A: _entry([4.0, 16], 0, 256)}, 256), "two dimensions"),
    ("true as a size", _file({KEY_A: _entry([True, 64], 0, 256)}, 256), "two dimensions"),
    ("int8", _file({KEY_A: _entry([4, 16], 0, 64, "I8")}, 64), "dtype I8"),
    ("float64", _file({KEY_A: _entry([4, 16], 0, 512, "F64")}, 512), "dtype F64"),
    ("extra key", _file({KEY_A: _entry([4, 16], 0, 256) | {"x": 1}}, 256), "nothing else"),
]


@pytest.mark.parametrize(("weights", "word"), [case[1:] for case in BAD_FILES], ids=[case[0] for case in BAD_FILES])
def test_a_bad_weights_file_is_refused(tmp_path: Path, weights: bytes, word: str) -> None:
    field, description = refused(write_adapter(tmp_path, weights=weights))
    assert word in description
    assert field


def _bent(change: Any) -> bytes:
    content = tensors()
    change(content)
    return safetensors_bytes(content)


def _put(key: str, value: np.ndarray[Any, Any]) -> Any:
    return lambda content: content.__setitem__(key, value)


def _poison(value: float) -> Any:
    def change(content: dict[str, np.ndarray[Any, Any]]) -> None:
        content[KEY_B][3, 1] = value

    return change


OTHER = "base_model.model.model.layers.0.self_attn."
WIDE = np.zeros((4, 17), "<f4")
BIAS = np.ones(16, "<f4")
BAD_TENSORS: list[tuple[str, bytes, str, str]] = [
    ("NaN", _bent(_poison(np.nan)), KEY_B, "NaN"),
    ("Inf", _bent(_poison(np.inf)), KEY_B, "infinite"),
    ("A without B", _bent(lambda c: c.pop(KEY_B)), f"{MODULES[0]}.lora_B", "missing"),
    ("B without A", _bent(lambda c: c.pop(KEY_A)), f"{MODULES[0]}.lora_A", "missing"),
    ("targeted, no tensors", safetensors_bytes(tensors(modules=MODULES[:3])), f"{MODULES[3]}.lora_A", "missing"),
    ("other base", _bent(_put(KEY_A, WIDE)), f"{MODULES[0]}.lora_A", "shape [4, 17], expected [4, 16]"),
    ("other rank", safetensors_bytes(tensors(rank=5)), f"{MODULES[0]}.lora_A", "shape [5, 16], expected [4, 16]"),
    ("unknown module", _bent(_put(OTHER + "z_proj.lora_A.weight", WIDE)), OTHER + "z_proj.lora_A.weight", "no such"),
    ("three sizes", _bent(_put(KEY_A, np.zeros((4, 4, 4), "<f4"))), KEY_A, "one or two dimensions"),
    ("one size", _bent(_put(KEY_A, np.zeros(64, "<f4"))), f"{MODULES[0]}.lora_A", "shape [64], expected [4, 16]"),
    ("bias", _bent(_put(OTHER + "q_proj.lora_B.bias", BIAS)), f"{MODULES[0]}.lora_B.bias", "lora_bias is not true"),
    (
        "magnitudes",
        _bent(_put(OTHER + "q_proj.lora_magnitude_vector", BIAS)),
        f"{MODULES[0]}.lora_magnitude_vector",
        "use_dora is not true",
    ),
]
BAD_TENSORS += [
    (
        "embedding",
        _bent(_put("base_model.model.model.embed_tokens.lora_embedding_A", WIDE)),
        "base_model.model.model.embed_tokens.lora_embedding_A",
        "nor embedding or head",
    ),
]


@pytest.mark.parametrize(
    ("weights", "field", "word"), [case[1:] for case in BAD_TENSORS], ids=[case[0] for case in BAD_TENSORS]
)
def test_a_bad_tensor_is_refused_by_name(tmp_path: Path, weights: bytes, field: str, word: str) -> None:
    refused_field, description = refused(write_adapter(tmp_path, weights=weights))
    assert refused_field == field
    assert word in description


PREFIX = f"base_model.model.{MODULES[0]}"  # of tensors of the first module
OTHER_NAMES = [
    (f"{PREFIX}.lora_A.default.weight", "holds the adapter's name ('default'); save the adapter with PEFT's"),
    (f"{MODULES[0]}.lora_A.weight", f"as {MODULES[0]}, and names begin with base_model.model.; rename"),
    (f"base_model.model._orig_mod.{MODULES[0]}.lora_A.weight", f"{MODULES[0]} (the name comes from torch.compile)"),
    (f"base_model.model._fsdp_wrapped_module.{MODULES[0]}.lora_A.weight", f"{MODULES[0]} (the name comes from FSDP)"),
    (
        f"base_model.model.{MODULES[0].replace('model.', 'model.language_model.')}.lora_A.weight",
        f"{MODULES[0]} (the name comes from a vision model around the language model); rename the tensors",
    ),
    (
        f"base_model.model.{MODULES[0].removeprefix('model.')}.lora_A.weight",
        f"{MODULES[0]} (it was trained without the head, as another task); rename the tensors",
    ),
    (
        "base_model.model.model.layers.0.mlp.experts.0.gate_proj.lora_A.weight",
        "whether model.layers.0.mlp.experts takes adapters only a worker can tell: start one, then register the",
    ),
    (f"{PREFIX}.base_layer.lora_A.weight", "belongs to LoRA on a parameter of a linear"),
    (f"{PREFIX}.base_layer.weight", "is the base model's own weight of a linear, which an adapter does not bring"),
    ("base_model.model.lm_head.modules_to_save.poet.weight", "holds the adapter's name ('poet'); save the adapter"),
    (
        "base_model.model.model.embed_tokens.token_adapter.trainable_tokens_delta.default",
        "holds the adapter's name ('default'); save the adapter with PEFT's save_pretrained",
    ),
    ("base_model.model.score.weight", "is a classification head, and task_type is CAUSAL_LM; set it to SEQ_CLS if"),
    ("base_model.model.qa_outputs.bias", "belongs to the head of another task"),
    ("base_model.model.score.modules_to_save.weight", "is a classification head, and task_type is CAUSAL_LM; set it"),
    ("base_model.model.model.norm.modules_to_save.weight", "belongs to a fully trained module, and of these embedding"),
    ("base_model.model.model.encoder.lora_A.weight", "check that the adapter was trained on this base model"),
    ("decoder.layers.0.self_attention.linear_qkv.adapter.weight", "is not a LoRA tensor's name; base_model.model."),
]


@pytest.mark.parametrize(("name", "words"), OTHER_NAMES, ids=[name for name, _ in OTHER_NAMES])
def test_a_name_that_does_not_fit_is_refused_with_what_is_wrong_and_what_to_do(
    tmp_path: Path, name: str, words: str
) -> None:
    field, description = refused(write_adapter(tmp_path, weights=_bent(_put(name, np.zeros((4, 16), "<f4")))))
    assert (field, words in description) == (name, True), description


@pytest.mark.parametrize(
    ("init", "words"),
    [
        ("pissa_niter_16", "changes the base weights; convert the adapter to plain LoRA: save_pretrained("),
        (
            "loftq",
            "LoftQ changes the base weights; serve the base model that LoftQ wrote, with this field set to null, or",
        ),
        ("a_start_of_the_future", "is not known; adapters that start with true, false, gaussian"),
    ],
)
def test_a_start_that_is_not_served_says_what_to_do_about_this_one(tmp_path: Path, init: str, words: str) -> None:
    field, description = refused(write_adapter(tmp_path, init_lora_weights=init))
    assert (field, words in description) == ("init_lora_weights", True), description


def test_a_refused_field_says_what_to_do(tmp_path: Path) -> None:
    """The reason first, and never "only null is" without a way on."""
    for field, value in BAD_FIELDS:
        description = refused(write_adapter(tmp_path, **{field: value}))[1]
        assert re.search(r"[;:,] .+", description), (field, description)
        assert "another model" not in description


def _vectors_bent(kind: str, change: Any) -> bytes:
    content = tensors(vectors=kind)
    change(content)
    return safetensors_bytes(content)


@pytest.mark.parametrize(
    ("key", "kind", "tensor"),
    [("lora_bias", "bias", "lora_B.bias"), ("use_dora", "magnitude", "lora_magnitude_vector")],
    ids=["bias", "magnitudes"],
)
def test_a_bad_vector_is_refused_by_name(tmp_path: Path, key: str, kind: str, tensor: str) -> None:
    name = f"base_model.model.{MODULES[0]}.{tensor}"
    cases = [
        (_vectors_bent(kind, _put(name, BIAS[1:])), f"{MODULES[0]}.{tensor}", "shape [15], expected [16]"),
        (_vectors_bent(kind, _put(name, np.ones((16, 1), "<f4"))), f"{MODULES[0]}.{tensor}", "shape [16, 1]"),
        (_vectors_bent(kind, _put(name, BIAS * np.inf)), name, "infinite"),
        (_vectors_bent(kind, lambda content: content.pop(name)), f"{MODULES[0]}.{tensor}", f"{key} is true"),
    ]
    if kind == "magnitude":
        cases.append((_vectors_bent(kind, _put(name + ".weight", BIAS)), name + ".weight", "appears twice"))
    for weights, field, words in cases:
        refused_field, description = refused(write_adapter(tmp_path, weights=weights, **{key: True}))
        assert refused_field == field
        assert words in description


def test_dora_with_a_lora_bias_is_refused(tmp_path: Path) -> None:
    assert refused(write_adapter(tmp_path, use_dora=True, lora_bias=True))[0] == "lora_bias"


def test_other_files_and_missing_files_are_refused(tmp_path: Path) -> None:
    files = write_adapter(tmp_path)
    assert refused(files | {"adapter_model.bin": tmp_path})[0] == "adapter_model.bin"
    assert refused({CONFIG_FILE: files[CONFIG_FILE]})[0] == WEIGHTS_FILE


def test_too_large_a_file_is_refused_unread(tmp_path: Path) -> None:
    files = write_adapter(tmp_path)
    with files[WEIGHTS_FILE].open("r+b") as file:
        file.truncate(1 << 34)
    description = refused(files)[1]
    assert "limit 1048576; raise --max-adapter-bytes" in description
    assert "save with save_embedding_layers=False" in description


def test_a_value_too_large_for_the_served_type_is_refused(tmp_path: Path) -> None:
    files = write_adapter(tmp_path, weights=_bent(_poison(1e6)))
    with pytest.raises(InvalidAdapter, match="too large for float16"):
        pack(files, base_model("float16"))


_WHOLE = safetensors_bytes(tensors())


@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(0, len(_WHOLE) - 1), st.integers(0, 255))
def test_a_changed_byte_is_refused_or_packed_but_never_more(tmp_path: Path, position: int, value: int) -> None:
    """Whatever is not InvalidAdapter would fail the test."""
    weights = bytearray(_WHOLE)
    weights[position] = value
    try:
        pack(write_adapter(tmp_path, weights=bytes(weights)))
    except InvalidAdapter as error:
        assert error.violations


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.dictionaries(
        st.sampled_from([*sorted(CONFIG), "use_dora", "bias", "alpha_pattern", "exclude_modules"]),
        st.recursive(
            st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
            lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
            max_leaves=5,
        ),
    )
)
def test_any_config_is_refused_or_read_but_never_more(tmp_path: Path, fields: dict[str, Any]) -> None:
    """Whatever is not InvalidAdapter would fail the test."""
    try:
        pack(write_adapter(tmp_path, **fields))
    except InvalidAdapter as error:
        assert error.violations
