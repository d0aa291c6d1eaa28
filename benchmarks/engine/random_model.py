"""Models of random weights that are made on the device, of any configuration: nothing is read from files.

For benchmarks of shapes whose checkpoints would take minutes to write and read.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from data_plane.models.loader import ReadWeights
from data_plane.models.probe import PROBE_NAME, Recorder, register_probe

SEED = 1234


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
