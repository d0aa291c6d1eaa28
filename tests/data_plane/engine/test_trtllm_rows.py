"""Adapters in TensorRT-LLM's rows, as its own tools write them, generate the tokens of PEFT's adapter.

Each is in one batch with base rows and adapters of PEFT's files; in a second round every slot holds another one.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
from motet.adapters.files import ROWS_ARRAY, WEIGHTS_ARRAY, WEIGHTS_FILE
from motet.trtllm.to_rows import peft_to_trtllm

from tests.data_plane.engine.test_adapter_forms import check_forms

QKV, GATE_UP = ("q_proj", "k_proj", "v_proj"), ("up_proj", "gate_proj")


def bare_rows(name: str, directory: Path, checkpoint: Path) -> Path:
    """The two arrays and nothing else; of an adapter called "PEFT" its own files."""
    if name == "PEFT":
        return directory
    out = directory / "rows"
    peft_to_trtllm(directory, out, base_model=checkpoint)
    for path in out.iterdir():
        if path.name not in (WEIGHTS_ARRAY, ROWS_ARRAY):
            path.unlink()
    return out


@pytest.mark.parametrize(
    ("arch", "lora_form"),
    [("llama", "native"), ("llama", "torch"), ("phi3", "native"), ("gpt2", "torch"), ("gpt_neox", "native")],
    indirect=["lora_form"],
)
@pytest.mark.usefixtures("lora_form")
def test_rows_generate_as_peft(arch: str, tmp_path: Path) -> None:
    """Every linear, a part of them, mixed ranks, another scaling and DoRA."""
    some = {"phi3": ["qkv_proj"], "gpt2": ["c_attn"], "gpt_neox": ["query_key_value"]}.get(arch, ["q_proj", "v_proj"])
    forms: dict[str, dict[str, Any]] = {
        "PEFT": {"rank": 8},
        "all": {"rank": 8, "alpha": 12},
        "some": {"rank": 4, "targets": some, "rslora": True},
        "ranks": {"rank": 3, "rank_pattern": {some[0]: 11}},
        "dora": {"rank": 4, "alpha": 6, "use_dora": True},
    }
    check_forms(tmp_path, arch, forms, registered=bare_rows)


@pytest.mark.parametrize("lora_form", ["native"], indirect=True)
@pytest.mark.usefixtures("lora_form")
def test_a_row_of_query_key_and_value_is_served_by_three_linears(tmp_path: Path) -> None:
    """They share A, and each has its own rows of B. Of gate and up, a row has up first."""
    forms: dict[str, dict[str, Any]] = {
        "PEFT": {"rank": 8},
        "joined": {"rank": 5, "alpha": 7, "targets": [*QKV, *GATE_UP]},
    }

    def joined(name: str, directory: Path, checkpoint: Path) -> Path:
        if name == "PEFT":
            return directory
        tensors, rows, table = safetensors.numpy.load_file(directory / WEIGHTS_FILE), [], []
        for layer in range(2):
            prefix = f"base_model.model.model.layers.{layer}."
            for module_id, module, parts in ((0, "self_attn", QKV), (18, "mlp", GATE_UP)):
                keys = [f"{prefix}{module}.{part}.lora_" for part in parts]
                a = tensors[keys[0] + "A.weight"]
                for key in keys:
                    tensors[key + "A.weight"] = a
                b = np.concatenate([tensors[key + "B.weight"] for key in keys]) * np.float32(7 / 5)
                rows.append(np.concatenate([a.ravel(), b.ravel()]))
                table.append([module_id, layer, 5])
        table.append([0, 0, 0])  # fills the table up
        weights = np.zeros((1, len(table), max(row.size for row in rows)), np.float32)
        for index, row in enumerate(rows):
            weights[0, index, : row.size] = row
        safetensors.numpy.save_file(tensors, directory / WEIGHTS_FILE, {"format": "pt"})  # for the oracle
        out = directory / "rows"
        out.mkdir()
        np.save(out / WEIGHTS_ARRAY, weights)
        np.save(out / ROWS_ARRAY, np.array([table], np.int32))
        return out

    check_forms(tmp_path, "llama", forms, registered=joined)
