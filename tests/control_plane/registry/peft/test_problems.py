"""All that is wrong with an adapter is reported at once."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from control_plane.api.rpc import error_status
from control_plane.errors import FieldViolation, InvalidAdapter
from control_plane.registry.model.embedding_modules import CheckpointTensor
from control_plane.registry.model.served_modules import ModuleKind, ServedModule
from control_plane.registry.peft import problems
from control_plane.registry.peft.ingest import CONFIG_FILE, WEIGHTS_FILE
from control_plane.registry.peft.problems import Problems
from tests.control_plane.registry.peft.test_adapter_config import count_calls
from tests.control_plane.registry.rig import MODULES, base_model, pack, safetensors_bytes, tensors, write_adapter


def problems_of(files: dict[str, Path]) -> dict[str, str]:
    with pytest.raises(InvalidAdapter) as caught:
        pack(files)
    return {violation.field: violation.description for violation in caught.value.violations}


def test_configuration_and_tensors_are_reported_together(tmp_path: Path) -> None:
    content = tensors(rank=5) | {"base_model.model.score.weight": np.ones((2, 16), "<f4")}
    files = write_adapter(
        tmp_path, weights=safetensors_bytes(content), bias="some", future=1, use_qalora=True, alpha_pattern={"q.*": 1}
    )
    found = problems_of(files)
    assert found.keys() == {
        "bias",
        "future",
        "use_qalora",
        "base_model.model.score.weight",
        f"{MODULES[0]}.lora_A",
        "alpha_pattern",
    }
    assert found[f"{MODULES[0]}.lora_A"].startswith("shape [5, 16], expected [4, 16]")
    assert found[f"{MODULES[0]}.lora_A"].endswith("(and 3 more like it)")


def test_a_configuration_that_cannot_be_read_does_not_hide_the_tensors(tmp_path: Path) -> None:
    content = {name.replace("base_model.model.", ""): values for name, values in tensors().items()}
    weights = safetensors_bytes(content)
    first = f"{MODULES[0]}.lora_A.weight"
    assert problems_of(write_adapter(tmp_path, weights=weights, r=0)).keys() == {"r", first}
    assert problems_of(write_adapter(tmp_path, b"{", weights=weights)).keys() == {CONFIG_FILE, first}
    assert problems_of(write_adapter(tmp_path, weights=b"PK", r=0, lora_alpha="8")).keys() == {
        "r",
        "lora_alpha",
        WEIGHTS_FILE,
    }


def test_a_bad_name_is_not_reported_again_as_a_missing_tensor(tmp_path: Path) -> None:
    content = {name.replace("layers", "_orig_mod.layers"): values for name, values in tensors().items()}
    found = problems_of(write_adapter(tmp_path, weights=safetensors_bytes(content)))
    ((field, description),) = found.items()
    assert field == f"base_model.model.{MODULES[0]}.lora_A.weight".replace("layers", "_orig_mod.layers")
    assert description.endswith("rename the tensors (and 7 more like it)")


def test_all_tensors_with_bad_values_are_reported(tmp_path: Path) -> None:
    content = tensors()
    for values in content.values():
        values[0, 0] = np.nan
    ((_, description),) = problems_of(write_adapter(tmp_path, weights=safetensors_bytes(content))).items()
    assert description == "holds NaN or infinite values; the training diverged (and 7 more like it)"


def test_all_tensors_of_types_that_are_not_read_are_reported(tmp_path: Path) -> None:
    content = {name: values.astype("<f8") for name, values in tensors().items()}
    ((_, description),) = problems_of(
        write_adapter(tmp_path, weights=safetensors_bytes(content).replace(b'"F32"', b'"F64"'))
    ).items()
    assert description == "dtype F64; expected one of F32, F16, BF16: convert the tensors (and 7 more like it)"


def test_missing_and_other_files_are_reported_together(tmp_path: Path) -> None:
    files = write_adapter(tmp_path, r=0)
    assert problems_of({CONFIG_FILE: files[CONFIG_FILE], "other.bin": tmp_path}).keys() == {
        "r",
        WEIGHTS_FILE,
        "other.bin",
    }


def test_what_does_not_fit_into_an_error_is_named() -> None:
    many = Problems()
    for name in "abcdefgh":
        many.add(FieldViolation(name, f"is {name}"))
    with pytest.raises(InvalidAdapter) as caught:
        many.raise_all()
    assert [violation.field for violation in caught.value.violations] == list("abcdef")
    assert caught.value.violations[-1].description == (
        "3 more problems are not described here: f, g, h; correct the others first"
    )
    assert problems.MAX_VIOLATIONS == error_status.MAX_VIOLATIONS


def test_nothing_is_raised_where_nothing_is_wrong() -> None:
    Problems().raise_all()


def test_many_bad_names_cost_no_more_than_one_for_each(tmp_path: Path) -> None:
    """Of a model with 20 000 linears: each name was compared with each of them."""
    names = [f"model.layers.{layer}.mlp.experts.{expert}" for layer in range(200) for expert in range(100)]
    linears = {f"{name}.up_proj": ServedModule(ModuleKind.LINEAR, 4, 4) for name in names}
    own = CheckpointTensor(Path("/nowhere"), "F32", (4, 4), 0)
    base = dataclasses.replace(base_model(), tensors={f"{name}.weight": own for name in linears})

    def calls(num_bad: int) -> int:
        bad: dict[str, np.ndarray[Any, Any]] = {}
        bad |= {f"base_model.model._orig_mod.{name}.lora_A.weight": np.ones((4, 4), "<f4") for name in names[:num_bad]}
        bad |= {f"base_model.model.{name}.bias": np.ones(4, "<f4") for name in names[:num_bad]}
        files = write_adapter(tmp_path, weights=safetensors_bytes(bad), target_modules=".*", bias="all")

        def refuse() -> None:
            with pytest.raises(InvalidAdapter):
                pack(files, base, reported=linears)

        return count_calls(refuse)

    assert calls(200) - calls(100) < 100 * 2000
