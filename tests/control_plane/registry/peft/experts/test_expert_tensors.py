"""Files of adapters on experts and routers: what they become, and what is refused by name."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from contract.expert_names import of_all, of_expert
from control_plane.errors import InvalidAdapter
from control_plane.registry.model.served_modules import ModuleKind, Modules, ServedModule
from control_plane.registry.peft.fields.activation import FIELD
from control_plane.registry.peft.ingest import CONFIG_FILE, WEIGHTS_FILE, PackedInfo
from tests.control_plane.registry.rig import base_model, pack
from tests.paged_chunks import read_arrays

HIDDEN, WIDTH, EXPERTS, RANK = 16, 8, 4, 2
EXPERTS_PATH = "model.layers.0.mlp.experts"
FUSED = ["experts.gate_up_proj", "experts.down_proj"]
PREFIX = "base_model.model."
INNER, OUTER = f"{PREFIX}{EXPERTS_PATH}.base_layer.lora_", f"{PREFIX}{EXPERTS_PATH}.lora_"
Tensors = dict[str, np.ndarray[Any, Any]]


def modules(*, is_interleaved: bool = False, router: str = "mlp.gate") -> Modules:
    """One layer of experts, its router, and a linear."""
    sides = {"gate_proj": (HIDDEN, WIDTH), "up_proj": (HIDDEN, WIDTH), "down_proj": (WIDTH, HIDDEN)}
    found = {
        f"{EXPERTS_PATH}.*.{part}": ServedModule(
            ModuleKind.EXPERT, *size, num_experts=EXPERTS, is_interleaved=is_interleaved
        )
        for part, size in sides.items()
    }
    found[f"model.layers.0.{router}"] = ServedModule(ModuleKind.ROUTER, HIDDEN, EXPERTS)
    found["model.layers.0.self_attn.q_proj"] = ServedModule(ModuleKind.LINEAR, HIDDEN, HIDDEN)
    return found


def fused(rank: int = RANK) -> Tensors:
    random = np.random.default_rng(0)
    return {
        f"{INNER}A.weight": random.standard_normal((EXPERTS * rank, HIDDEN), dtype=np.float32),
        f"{INNER}B.weight": random.standard_normal((2 * WIDTH, EXPERTS * rank), dtype=np.float32),
        f"{OUTER}A.weight": random.standard_normal((EXPERTS * rank, WIDTH), dtype=np.float32),
        f"{OUTER}B.weight": random.standard_normal((HIDDEN, EXPERTS * rank), dtype=np.float32),
    }


def one(name: str, rank: int = RANK, sides: tuple[int, int] = (HIDDEN, WIDTH)) -> Tensors:
    random = np.random.default_rng(1)
    return {
        f"{PREFIX}{name}.lora_A.weight": random.standard_normal((rank, sides[0]), dtype=np.float32),
        f"{PREFIX}{name}.lora_B.weight": random.standard_normal((sides[1], rank), dtype=np.float32),
    }


def register(
    directory: Path, tensors: Tensors, reported: Modules, **fields: Any
) -> tuple[PackedInfo, dict[str, np.ndarray[Any, Any]]]:
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": 4, "target_modules": []} | fields
    (directory / CONFIG_FILE).write_text(json.dumps(config), encoding="utf-8")
    save_file(tensors, directory / WEIGHTS_FILE)
    files = {name: directory / name for name in (CONFIG_FILE, WEIGHTS_FILE)}
    info, chunks = pack(files, dataclasses.replace(base_model(), linear_shapes={}), reported=reported)
    return info, read_arrays(info.manifest, chunks)


def problems(directory: Path, tensors: Tensors, reported: Modules | None = None, **fields: Any) -> dict[str, str]:
    with pytest.raises(InvalidAdapter) as refusal:
        register(directory, tensors, modules() if reported is None else reported, **fields)
    return {violation.field: violation.description for violation in refusal.value.violations}


@pytest.mark.parametrize("is_interleaved", [False, True])
def test_fused_tensors_become_a_pair_for_every_product_of_every_expert(tmp_path: Path, is_interleaved: bool) -> None:
    """PEFT's get_delta_weight: A is [experts, rank, in], B is [out, rank, experts]."""
    tensors = fused()
    info, packed = register(tmp_path, tensors, modules(is_interleaved=is_interleaved), target_parameters=FUSED)
    b = tensors[f"{INNER}B.weight"].reshape(2 * WIDTH, RANK, EXPERTS)
    a = tensors[f"{INNER}A.weight"].reshape(EXPERTS, RANK, HIDDEN)
    down_b = tensors[f"{OUTER}B.weight"].reshape(HIDDEN, RANK, EXPERTS)
    down_a = tensors[f"{OUTER}A.weight"].reshape(EXPERTS, RANK, WIDTH)
    for expert in range(EXPERTS):
        path = f"{EXPERTS_PATH}.{expert}"
        for index, part in enumerate(("gate_proj", "up_proj")):
            rows = slice(index, None, 2) if is_interleaved else slice(index * WIDTH, (index + 1) * WIDTH)
            assert np.array_equal(packed[f"{path}.{part}.a"], a[expert])
            assert np.array_equal(packed[f"{path}.{part}.b"], b[rows, :, expert].T)
        assert np.array_equal(packed[f"{path}.down_proj.a"], down_a[expert])
        assert np.array_equal(packed[f"{path}.down_proj.b"], down_b[:, :, expert].T)
    assert len(packed) == 2 * 3 * EXPERTS
    assert info.target_modules == tuple(sorted(f"{EXPERTS_PATH}.*.{part}_proj" for part in ("gate", "up", "down")))


def test_experts_and_routers_do_not_act_from_invocation_tokens_on(tmp_path: Path) -> None:
    """An activated adapter on them is refused, fused or one by one; on the linear beside them it is accepted."""
    linear = one("model.layers.0.self_attn.q_proj", sides=(HIDDEN, HIDDEN))
    router = one("model.layers.0.mlp.gate", sides=(HIDDEN, EXPERTS))
    single = {
        f"{PREFIX}{EXPERTS_PATH}.1.gate_proj.lora_{part}.weight": each
        for part, each in zip("AB", one("x").values(), strict=True)
    }
    activated: dict[str, Any] = {"alora_invocation_tokens": [3, 4]}
    refused: list[tuple[Tensors, dict[str, Any], str]] = [
        (fused(), {"target_parameters": FUSED}, "LoRA on experts"),
        ({**fused(), **linear}, {"target_parameters": FUSED, "target_modules": ["q_proj"]}, "LoRA on experts"),
        (single, {"target_modules": r".*experts\.1\.gate_proj"}, "LoRA on experts"),
        (router, {"target_parameters": ["gate.weight"]}, "LoRA on routers"),
    ]
    for number, (tensors, fields, what) in enumerate(refused):
        (directory := tmp_path / str(number)).mkdir()
        assert f"the adapter has {what}" in problems(directory, tensors, **fields, **activated)[FIELD]
    info, _ = register(tmp_path, linear, modules(), target_modules=["q_proj"], **activated)
    assert info.alora_invocation_tokens == (3, 4)


def test_the_same_weights_one_by_one_have_the_same_digest(tmp_path: Path) -> None:
    tensors = fused()
    (tmp_path / "fused").mkdir()
    info, packed = register(tmp_path / "fused", tensors, modules(), target_parameters=FUSED)
    separate = {}
    for name, values in packed.items():
        module, part = name.rsplit(".", 1)
        key = f"{PREFIX}{module}.lora_{part.upper()}.weight"
        separate[key] = np.ascontiguousarray(values if part == "a" else values.T)
    other, _ = register(tmp_path, separate, modules(), target_modules=["gate_proj", "up_proj", "down_proj"])
    assert other.digest == info.digest


def test_mixtrals_old_names_are_those_of_the_base_model(tmp_path: Path) -> None:
    """Its ranks and alphas are looked up under the names that it was trained with."""
    old = EXPERTS_PATH.replace("mlp", "block_sparse_moe")
    tensors: Tensors = {}
    for expert in range(EXPERTS):
        tensors |= one(f"{old}.{expert}.w1", rank=3 if expert == 1 else RANK)
    tensors |= one("model.layers.0.block_sparse_moe.gate", sides=(HIDDEN, EXPERTS))
    fields = {"target_modules": ["w1", "gate"], "rank_pattern": {"experts.1.w1": 3}, "alpha_pattern": {"gate": 8}}
    info, packed = register(tmp_path, tensors, modules(), **fields)
    assert info.target_modules == (f"{EXPERTS_PATH}.*.gate_proj", "model.layers.0.mlp.gate")
    assert packed[f"{EXPERTS_PATH}.1.gate_proj.a"].shape == (3, HIDDEN)
    entries = {module["name"]: module for module in json.loads(info.manifest)["chunks"][0]["modules"]}
    assert entries["model.layers.0.mlp.gate"]["scaling"] == 4.0
    assert entries[f"{EXPERTS_PATH}.1.gate_proj"]["scaling"] == pytest.approx(4 / 3)


def test_experts_without_tensors_take_no_bytes(tmp_path: Path) -> None:
    info, packed = register(
        tmp_path, one(f"{EXPERTS_PATH}.2.up_proj"), modules(), target_modules=r".*experts\.2\.up_proj"
    )
    assert sorted(packed) == [f"{EXPERTS_PATH}.2.up_proj.a", f"{EXPERTS_PATH}.2.up_proj.b"]
    assert info.arena_bytes == 8 * (HIDDEN + WIDTH) * 4


def test_names_that_mean_a_shared_expert_leave_the_experts_alone(tmp_path: Path) -> None:
    """PEFT with transformers 5: no module of an expert is called gate_proj, that of the shared expert is."""
    shared = "model.layers.0.mlp.shared_expert.gate_proj"
    reported = {**modules(), shared: ServedModule(ModuleKind.LINEAR, HIDDEN, WIDTH)}
    info, _ = register(tmp_path, one(shared), reported, target_modules=["gate_proj"])
    assert info.target_modules == (shared,)


def changed(name: str, shape: tuple[int, int]) -> Tensors:
    return fused() | {name: np.zeros(shape, np.float32)}


BAD: list[tuple[str, Tensors, dict[str, Any], str, str]] = [
    (
        "an expert beyond the last",
        one(f"{EXPERTS_PATH}.4.gate_proj"),
        {"target_modules": ["gate_proj"]},
        f"{PREFIX}{EXPERTS_PATH}.4.gate_proj.lora_A.weight",
        "the base model has 4 experts here, 0 to 3",
    ),
    (
        "ranks that contradict the configuration",
        fused(rank=3),
        {"target_parameters": FUSED},
        f"{EXPERTS_PATH}.gate_up_proj.lora_A",
        "shape [12, 16], expected [8, 16] (4 experts and rank 2 by the config, 16 x 16 of the base model)",
    ),
    (
        "a number of rows that no number of experts divides",
        changed(f"{OUTER}A.weight", (7, WIDTH)),
        {"target_parameters": FUSED},
        f"{EXPERTS_PATH}.down_proj.lora_A",
        "shape [7, 8], expected [8, 8]",
    ),
    (
        "inputs and outputs exchanged",
        changed(f"{OUTER}A.weight", (8, HIDDEN)) | {f"{OUTER}B.weight": np.zeros((WIDTH, 8), np.float32)},
        {"target_parameters": FUSED},
        f"{EXPERTS_PATH}.down_proj",
        "as early versions of PEFT wrote them",
    ),
    (
        "a parameter that is not named",
        fused(),
        {"target_parameters": FUSED[:1]},
        "target_parameters",
        "the file has tensors of 2",
    ),
    (
        "A without B",
        {name: values for name, values in fused().items() if name != f"{OUTER}B.weight"},
        {"target_parameters": FUSED},
        f"{EXPERTS_PATH}.down_proj.lora_B",
        "is missing",
    ),
    (
        "DoRA on stacked parameters",
        fused(),
        {"target_parameters": FUSED, "use_dora": True},
        f"{EXPERTS_PATH}.0.down_proj.lora_magnitude_vector",
        "is missing, but use_dora is true",
    ),
    (
        "LoRA bias on stacked parameters",
        fused(),
        {"target_parameters": FUSED, "lora_bias": True},
        f"{EXPERTS_PATH}.0.down_proj.lora_B.bias",
        "is missing, but lora_bias is true",
    ),
    (
        "the weight of a linear",
        one("model.layers.0.self_attn.q_proj", sides=(HIDDEN, HIDDEN)),
        {"target_parameters": ["q_proj.weight"]},
        "target_parameters",
        "for the weight of a linear, train with target_modules",
    ),
    (
        "an expert that is left out of a list",
        one(f"{EXPERTS_PATH}.0.gate_proj"),
        {"target_modules": ["gate_proj"]},
        f"{EXPERTS_PATH}.1.gate_proj.lora_A",
        "is missing",
    ),
]


@pytest.mark.parametrize(("tensors", "fields", "field", "words"), [c[1:] for c in BAD], ids=[c[0] for c in BAD])
def test_what_does_not_fit_is_refused_by_name(
    tmp_path: Path, tensors: Tensors, fields: dict[str, Any], field: str, words: str
) -> None:
    found = problems(tmp_path, tensors, **fields)
    assert words in found[field], found


def test_dora_on_experts_with_biases_is_refused(tmp_path: Path) -> None:
    """gpt-oss: the scale would have to leave out each expert's own bias."""
    tensors = one(f"{EXPERTS_PATH}.0.down_proj", sides=(WIDTH, HIDDEN))
    tensors[f"{PREFIX}{EXPERTS_PATH}.0.down_proj.lora_magnitude_vector"] = np.ones(HIDDEN, np.float32)
    fields = {"target_modules": r".*down_proj", "use_dora": True}
    found = problems(tmp_path, tensors, modules(is_interleaved=True), **fields)
    assert any("only lora_A and lora_B are served there" in words for words in found.values()), found


def test_nan_in_one_experts_columns_is_refused_by_its_name(tmp_path: Path) -> None:
    tensors = fused()
    tensors[f"{INNER}B.weight"][3, 6] = np.nan  # column 6: rank 1 of expert 2
    found = problems(tmp_path, tensors, target_parameters=FUSED)
    assert f"{PREFIX}{EXPERTS_PATH}.2.gate_proj.lora_B.weight" in found, found


def test_names_of_one_expert_and_of_all() -> None:
    name = "model.layers.3.mlp.experts.*.up_proj"
    assert of_expert(name, 12) == "model.layers.3.mlp.experts.12.up_proj"
    assert of_all(of_expert(name, 12)) == name
    assert of_all("model.layers.3.mlp.gate") == "model.layers.3.mlp.gate"
