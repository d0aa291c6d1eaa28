"""Models of random weights that are made on the device, of any configuration: nothing is read from files.

For benchmarks of shapes whose checkpoints would take minutes to write and read.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from data_plane.models.loader import ReadWeights
from data_plane.models.probe import PROBE_NAME, Recorder, register_probe

SEED = 1234
_HEADER_DTYPES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}


def random_weights(device: torch.device) -> ReadWeights:
    """To be given to `build_engine`, whose config names a folder with a config.json alone."""

    def make(_: Path, config: PretrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
        register_probe(Recorder())
        torch.manual_seed(SEED)
        with torch.device(device):
            auto: Any = AutoModelForCausalLM
            model: PreTrainedModel = auto.from_config(config, dtype=dtype, attn_implementation=PROBE_NAME)
        return model

    return make


def hollow_checkpoint(folder: Path, config: PretrainedConfig, dtype: str) -> None:
    """A checkpoint whose weights are zeros that take no room on the disk: for all that reads no more than headers.

    The control plane and a registration of adapters take it for a whole one.
    """
    config.dtype = dtype
    config.save_pretrained(folder)
    with torch.device("meta"):
        auto: Any = AutoModelForCausalLM
        tensors = auto.from_config(config, dtype=getattr(torch, dtype)).state_dict()
    header, end = {}, 0
    for name, tensor in tensors.items():
        begin, end = end, end + tensor.numel() * tensor.itemsize
        header[name] = {"dtype": _HEADER_DTYPES[dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
    head = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(head).to_bytes(8, "little") + head)
        file.truncate(8 + len(head) + end)
