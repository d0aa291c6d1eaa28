"""Which modules a configuration names, and what finding that out costs."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from control_plane.errors import InvalidAdapter
from control_plane.registry.peft.adapter_config import MAX_CONFIG_BYTES, AdapterConfig, read_adapter_config
from tests.control_plane.registry.rig import CONFIG, pack, write_adapter

_NAME = st.lists(st.sampled_from(["q_proj", "v_proj", "layers", "0", "1", "self_attn"]), min_size=1, max_size=4).map(
    ".".join
)


def read(**fields: Any) -> AdapterConfig:
    return read_adapter_config(json.dumps(CONFIG | fields).encode())


def fits(name: str, module: str) -> bool:
    """The definition: the module's name, or the end of it from behind a dot."""
    return module == name or module.endswith("." + name)


@given(_NAME, st.lists(_NAME, min_size=1, max_size=6), st.lists(_NAME, max_size=3))
def test_names_fit_by_their_definition(module: str, targets: list[str], excluded: list[str]) -> None:
    config = read(target_modules=targets, exclude_modules=excluded)
    expected = any(fits(name, module) for name in targets) and not any(fits(name, module) for name in excluded)
    assert config.is_targeted(module) == expected


@given(_NAME, st.dictionaries(st.tuples(st.booleans(), _NAME), st.integers(1, 64), max_size=6))
def test_the_first_name_of_a_pattern_that_fits_counts(module: str, pattern: dict[tuple[bool, str], int]) -> None:
    ranks = {("^" if is_exact else "") + name: rank for (is_exact, name), rank in pattern.items()}
    expected = next(
        (rank for (is_exact, name), rank in pattern.items() if (module == name if is_exact else fits(name, module))), 4
    )
    assert read(rank_pattern=ranks).rank_of(module) == expected


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
            read_adapter_config(raw)
        config = read(**{"target_modules": ["q_proj"], field: dict.fromkeys(names[:70_000], 8)})
    modules = [f"model.layers.{layer}.self_attn.{name}_proj" for layer in range(32) for name in "qkvo"]

    def look() -> None:
        for module in modules:
            config.is_targeted(module)
            config.rank_of(module)
            config.scaling_of(module)

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


@pytest.mark.parametrize("name", ["q_proj\n", "q_proj.", ".q_proj", "q proj", "q_proj|v_proj", "", "q_proj\0"])
@pytest.mark.parametrize("field", ["target_modules", "exclude_modules", "rank_pattern", "alpha_pattern"])
def test_only_plain_names_are_read(name: str, field: str) -> None:
    with pytest.raises(InvalidAdapter, match=field):
        read(**{field: {name: 8} if field.endswith("pattern") else [name]})


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
