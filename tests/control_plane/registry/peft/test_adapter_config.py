"""Which modules a configuration names, and what finding that out costs."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, strategies as st

from control_plane.errors import InvalidAdapter
from control_plane.registry.peft.adapter_config import MAX_CONFIG_BYTES, AdapterConfig, read_adapter_config
from control_plane.registry.peft.module_names import NamePattern
from control_plane.registry.peft.problems import Problems
from tests.control_plane.registry.rig import CONFIG, MODULES, pack, safetensors_bytes, tensors, write_adapter

_NAME = st.lists(st.sampled_from(["q_proj", "v_proj", "layers", "0", "1", "self_attn"]), min_size=1, max_size=4).map(
    ".".join
)


def read(**fields: Any) -> AdapterConfig:
    return read_bytes(json.dumps(CONFIG | fields).encode())


def read_bytes(raw: bytes) -> AdapterConfig:
    problems = Problems()
    config = read_adapter_config(raw, problems)
    problems.raise_all()
    assert config is not None
    return config


def fits(name: str, module: str) -> bool:
    """The definition: the module's name, or the end of it from behind a dot."""
    return module == name or module.endswith("." + name)


@given(_NAME, st.lists(_NAME, min_size=1, max_size=6), st.lists(_NAME, max_size=3))
def test_names_fit_by_their_definition(module: str, targets: list[str], excluded: list[str]) -> None:
    config = read(target_modules=targets, exclude_modules=excluded)
    expected = any(fits(name, module) for name in targets) and not any(fits(name, module) for name in excluded)
    assert config.targets.may_have(module) == expected
    assert not config.targets.has_expression


@given(_NAME, st.dictionaries(st.tuples(st.booleans(), _NAME), st.integers(1, 64), max_size=6))
def test_the_first_name_of_a_pattern_that_fits_counts(module: str, pattern: dict[tuple[bool, str], int]) -> None:
    ranks = {("^" if is_exact else "") + name: rank for (is_exact, name), rank in pattern.items()}
    expected = next(
        (rank for (is_exact, name), rank in pattern.items() if (module == name if is_exact else fits(name, module))), 4
    )
    assert read(rank_pattern=ranks).rank_of(module, num_rows=99) == expected


@pytest.mark.parametrize("field", ["target_modules", "exclude_modules", "rank_pattern", "alpha_pattern"])
def test_a_look_at_a_module_costs_the_same_whatever_the_number_of_names(field: str) -> None:
    """100 000 names and 224 modules took 4.5 s of the interpreter."""
    names = [f"n{number}" for number in range(100_000)]
    value = dict.fromkeys(names, 8) if field.endswith("pattern") else names
    raw = json.dumps(CONFIG | {"target_modules": ["q_proj"]} | {field: value}, separators=(",", ":")).encode()
    assert len(raw) < 2 * MAX_CONFIG_BYTES
    config = read(**{"target_modules": ["q_proj"], field: value}) if len(raw) < MAX_CONFIG_BYTES else None
    if config is None:  # the names of a pattern take more bytes than a configuration may have
        with pytest.raises(InvalidAdapter, match="limit"):
            read_bytes(raw)
        config = read(**{"target_modules": ["q_proj"], field: dict.fromkeys(names[:70_000], 8)})
    modules = [f"model.layers.{layer}.self_attn.{name}_proj" for layer in range(32) for name in "qkvo"]

    def look() -> None:
        for module in modules:
            config.targets.may_have(module)
            config.scaling_of(module, config.rank_of(module, num_rows=8))

    assert count_calls(look) < 100 * len(modules)


def count_calls(work: Callable[[], None]) -> int:
    """Calls of functions, those of built-in ones included."""
    num_calls = 0

    def count(frame: Any, event: str, argument: Any) -> None:
        nonlocal num_calls
        num_calls += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        work()
    finally:
        sys.setprofile(None)
    return num_calls


@pytest.mark.parametrize(
    "name", ["q_proj\n", "q_proj.", ".q_proj", "q proj", "q_proj|v_proj", "", "q_proj\0", ".*proj"]
)
def test_names_of_a_list_are_compared_as_text(name: str) -> None:
    """As PEFT does: a list is not an expression, so that such a name fits no module."""
    targets = read(target_modules=[name, "v_proj"], exclude_modules=[name]).targets
    assert [targets.may_have(module) for module in MODULES] == [False, True, False, True]
    assert not targets.has_expression


INERT: list[tuple[str, Any]] = [
    ("auto_mapping", {"base_model_class": "LlamaForCausalLM", "parent_library": "os", "unsloth_fixed": True}),
    ("bias", "all"),
    ("bias", "lora_only"),
    ("corda_config", {"cache_file": "/etc/passwd", "corda_method": "ipm"}),
    ("ensure_weight_tying", True),
    ("eva_config", {"rho": 2.0, "tau": 0.99}),
    ("fan_in_fan_out", True),
    ("lora_dtype", "float32"),
    ("lora_ga_config", {"direction": "ArBr"}),
    ("lorap_emb_lr", 1e-6),
    ("lorap_lr_ratio", 16.0),
    ("megatron_config", {"hidden_size": 64}),
    ("init_lora_weights", "mica"),
    ("modules_to_save", ["classifier", "score"]),
    ("modules_to_save", ["qa_outputs"]),
    ("merge_weights", True),
    ("revision", "main"),
    ("runtime_config", {"ephemeral_gpu_offload": True}),
    ("task_type", None),
    ("task_type", "SEQ_2_SEQ_LM"),
    ("task_type", "SEQ_CLS"),
]


@pytest.mark.parametrize(("field", "value"), INERT, ids=[f"{f}={v}"[:40] for f, v in INERT])
def test_a_field_that_changes_nothing_gives_the_same_adapter(tmp_path: Path, field: str, value: Any) -> None:
    plain = pack(write_adapter(tmp_path / "plain"))
    assert pack(write_adapter(tmp_path / "field", **{field: value})) == plain


def test_eva_is_taken_with_its_configuration_and_corda_only_without(tmp_path: Path) -> None:
    eva: dict[str, Any] = {"init_lora_weights": "eva", "eva_config": {"rho": 2.0}}
    assert pack(write_adapter(tmp_path / "eva", **eva)) == pack(write_adapter(tmp_path / "plain"))
    for init, field in (("corda", "corda_config"), ("lora_ga", "lora_ga_config")):
        with pytest.raises(InvalidAdapter, match="path_initial_model_for_weight_conversion"):
            pack(write_adapter(tmp_path / init, CONFIG | {"init_lora_weights": init, field: {"a": 1}}))


LAYERS = [
    {"layers_to_transform": 0},
    {"layers_to_transform": [0], "layers_pattern": "layers"},
    {"layers_to_transform": [0], "layers_pattern": ["h", "model.layers"]},
    {"layers_to_transform": [0], "layers_pattern": []},
    {"layers_to_transform": [0], "layers_pattern": "lay.*"},
]


@pytest.mark.parametrize("fields", LAYERS, ids=str)
def test_an_adapter_of_some_layers_is_the_one_that_its_tensors_are(tmp_path: Path, fields: dict[str, Any]) -> None:
    weights = safetensors_bytes(tensors(modules=MODULES[:2]))
    named = pack(write_adapter(tmp_path / "named", weights=weights, target_modules=MODULES[:2]))
    assert pack(write_adapter(tmp_path / "layers", weights=weights, **fields)) == named


def test_tensors_of_a_layer_that_was_not_chosen_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidAdapter, match=r"does not name model\.layers\.1\..* \(and 1 more like it\)"):
        pack(write_adapter(tmp_path, layers_to_transform=[0]))
    with pytest.raises(InvalidAdapter, match=r"model\.layers\.1\.self_attn\.q_proj\.lora_A: is missing"):
        weights = safetensors_bytes(tensors(modules=MODULES[:2]))
        pack(write_adapter(tmp_path, weights=weights, layers_to_transform=[0, 1]))


_LAYER_NAMES = st.lists(st.sampled_from(["model", "layers", "0", "1", "experts", "q_proj"]), min_size=1, max_size=6)


@given(
    _LAYER_NAMES.map(".".join),
    st.one_of(st.integers(0, 2), st.lists(st.integers(0, 2), min_size=1)),
    st.sampled_from([None, "layers", ["experts", "layers"], ["model.layers"], ["h"]]),
)
def test_layers_are_chosen_as_peft_chooses_them(module: str, layers: Any, pattern: Any) -> None:
    from peft import LoraConfig
    from peft.tuners.tuners_utils import check_target_module_exists

    fields = {"target_modules": ["q_proj", "layers.0"], "layers_to_transform": layers, "layers_pattern": pattern}
    expected = bool(check_target_module_exists(LoraConfig(**fields), module))
    assert read(**fields).targets.may_have(module) == expected


EXPRESSIONS: list[dict[str, Any]] = [
    {"target_modules": r"(?:.*?(?:language|text).*?\.layers.*?\.(?:self_attn|mlp)\.(?:q_proj|v_proj))"},
    {"target_modules": "(.*)*q_proj"},
    {"target_modules": None},
    {"target_modules": "(.*)*q_proj", "layers_to_transform": [0, 1]},
    {"target_modules": "all-linear", "layers_to_transform": [0, 1]},
    {"exclude_modules": "(.*)*k_proj"},
    {"target_modules": "all-linear", "exclude_modules": ".*lm_head"},
    {"rank_pattern": {"(.*)*q_proj": 4, "k_proj": 8}},
    {"alpha_pattern": {"(.*)*q_proj": 8, "k_proj|o_proj": 8.0}},
    {"alpha_pattern": {"q_proj": 8, "v_proj": 8, "(.*)*_proj": 3}},
    {"alpha_pattern": {r"^model\.layers\.0\.self_attn\.q_proj$": 8, r"self_attn\.v_proj": 8}},
]


@pytest.mark.parametrize("fields", EXPRESSIONS, ids=str)
def test_the_tensors_tell_what_an_expression_means(tmp_path: Path, fields: dict[str, Any]) -> None:
    plain = pack(write_adapter(tmp_path / "plain"))
    assert pack(write_adapter(tmp_path / "expression", **fields)) == plain


def test_an_expression_gives_the_modules_whose_tensors_are_there(tmp_path: Path) -> None:
    some = [MODULES[0], MODULES[3]]
    weights = safetensors_bytes(tensors(modules=some))
    info, _ = pack(write_adapter(tmp_path, weights=weights, target_modules=".*(0.*q_proj|1.*v_proj)"))
    assert list(info.target_modules) == some
    with pytest.raises(InvalidAdapter, match=r"target_modules: does not name .*v_proj"):
        pack(write_adapter(tmp_path, weights=weights, target_modules=["q_proj"], exclude_modules=".*1.*"))


def test_the_rank_of_the_tensors_counts_where_an_expression_may_give_it(tmp_path: Path) -> None:
    content = tensors(modules=MODULES[:1], rank=6) | tensors(modules=MODULES[1:])
    weights = safetensors_bytes(content)
    fields = {"rank_pattern": {"^model.layers.0.*q_proj": 6}, "use_rslora": True}
    manifest = json.loads(pack(write_adapter(tmp_path, weights=weights, **fields))[0].manifest)
    modules = [module for chunk in manifest["chunks"] for module in chunk["modules"]]
    assert [(module["rank"], module["scaling"]) for module in modules] == [(6, 8 / 6**0.5)] + [(4, 4.0)] * 3
    with pytest.raises(InvalidAdapter, match=r"shape \[6, 16\], expected \[4, 16\]"):
        pack(write_adapter(tmp_path, weights=weights, rank_pattern={"^model.layers.0.*q_proj": 5}))


@pytest.mark.parametrize("pattern", [{"(.*)*q_proj": 3}, {"(.*)*q_proj": 3, "(.*)*v_proj": 8}, {".*": 8, "q.*": 3}])
def test_an_alpha_that_an_expression_would_decide_is_refused(tmp_path: Path, pattern: dict[str, float]) -> None:
    with pytest.raises(InvalidAdapter) as refusal:
        pack(write_adapter(tmp_path, alpha_pattern=pattern))
    (violation,) = refusal.value.violations
    assert violation.field == "alpha_pattern"
    assert f'list the modules by name instead, as "^{MODULES[0]}"' in violation.description
    names = {f"^{module}": 3.0 if module.endswith("q_proj") else 8.0 for module in MODULES}
    assert pack(write_adapter(tmp_path, alpha_pattern=names | pattern))[0].max_rank == 4  # the advice works


@given(
    _NAME,
    st.dictionaries(
        st.sampled_from(["q_proj", ".*q.*", "^q_proj", "v_proj$", r"0\.v_proj", "self.*", ".+"]), st.integers(1, 3)
    ),
)
def test_a_value_that_is_known_is_pefts(module: str, pattern: dict[str, int]) -> None:
    from peft.utils.other import get_pattern_key

    expected = pattern.get(get_pattern_key(list(pattern), module), 2)
    names = NamePattern(pattern.items())
    assert names.known(module, 2) in (None, expected)
    assert names.may_be(module, expected, 2)
