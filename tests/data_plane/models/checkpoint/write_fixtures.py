"""Writes the quantised checkpoints of `fixtures`, with what transformers and PEFT compute on them: run by hand.

    python -m tests.data_plane.models.checkpoint.write_fixtures

It needs bitsandbytes and compressed-tensors, which no test needs: 60 MB of packages for the bytes of a few matrices.
Written with bitsandbytes 0.50.2, compressed-tensors 0.20.0, transformers 5.23 and PEFT 0.21 on a CPU.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

FIXTURES = Path(__file__).parent / "fixtures"
PROMPT = [1, 17, 33, 5, 60, 2, 48, 9]
SIZES: dict[str, Any] = {"vocab_size": 64, "hidden_size": 64, "num_hidden_layers": 1, "intermediate_size": 128}
EXPECTED = "expected.safetensors"
# Settings of bitsandbytes, and the dtype that the weights had before.
BITSANDBYTES: dict[str, tuple[dict[str, Any], str]] = {
    "nf4": ({"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}, "float32"),
    "nf4_double": (
        {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True},
        "bfloat16",
    ),
    "fp4": ({"load_in_4bit": True, "bnb_4bit_quant_type": "fp4"}, "float16"),
    "int8": ({"load_in_8bit": True}, "bfloat16"),
}


def main() -> None:
    from tests.makers import make_checkpoint

    shutil.rmtree(FIXTURES, ignore_errors=True)
    with tempfile.TemporaryDirectory() as work:
        base = make_checkpoint(Path(work) / "base", **SIZES)
        for name, (settings, dtype) in BITSANDBYTES.items():
            _write_bitsandbytes(base, FIXTURES / name, settings, dtype)
        _write_compressed(base, FIXTURES / "compressed")


def _write_bitsandbytes(base: Path, out: Path, settings: dict[str, Any], dtype: str) -> None:
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    config = BitsAndBytesConfig(bnb_4bit_compute_dtype=torch.float32, **settings)
    model: Any = AutoModelForCausalLM.from_pretrained(
        base, quantization_config=config, dtype=getattr(torch, dtype), device_map="cpu"
    )
    model.save_pretrained(out)

    def load() -> Any:
        loaded: Any = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32, device_map="cpu")
        # Its own products round inputs, too: to int8, and on a CPU to bfloat16.
        return _in_float32(loaded.dequantize())

    _write_expected(out, load)


def _write_compressed(base: Path, out: Path) -> None:
    """As llm-compressor writes FP8: a scale for each output, in bfloat16."""
    from transformers import AutoModelForCausalLM

    shutil.copytree(base, out)
    tensors = {name: value.bfloat16() for name, value in load_file(out / "model.safetensors").items()}
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        weight = tensors[name].float()
        scale = (weight.abs().amax(dim=1, keepdim=True) / 448).bfloat16()
        tensors[name] = (weight / scale.float()).clamp(-448, 448).to(torch.float8_e4m3fn)
        tensors[f"{name}_scale"] = scale
    save_file(tensors, out / "model.safetensors", {"format": "pt"})
    weights = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel", "dynamic": False}
    inputs = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "token", "dynamic": True}
    config = json.loads((out / "config.json").read_text())
    config["dtype"] = "bfloat16"
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": inputs}},
        "ignore": ["lm_head"],
    }
    (out / "config.json").write_text(json.dumps(config, indent=2))

    def load() -> Any:
        from transformers import CompressedTensorsConfig

        given = CompressedTensorsConfig(run_compressed=False)
        model: Any = AutoModelForCausalLM.from_pretrained(out, quantization_config=given, dtype=torch.float32)
        for module in model.modules():
            if hasattr(module, "quantization_enabled"):
                module.quantization_enabled = False  # the weights as they are, inputs not rounded
        return _in_float32(model)

    _write_expected(out, load)


def _in_float32(model: Any) -> Any:
    """With all that is not quantised in float32: transformers leaves it in the dtype of the file."""
    for parameter in model.parameters():
        if parameter.is_floating_point():
            parameter.data = parameter.data.float()
    return model


def _write_expected(out: Path, load: Any) -> None:
    """An adapter, and the logits without and with it."""
    from peft import LoraConfig, PeftModel, get_peft_model

    lora = LoraConfig(task_type="CAUSAL_LM", r=2, lora_alpha=4, target_modules=["q_proj", "down_proj"])
    model = get_peft_model(load(), lora)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            if "lora_" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    model.save_pretrained(str(out / "adapter"))
    (out / "adapter" / "README.md").unlink(missing_ok=True)
    written = out / "adapter" / "adapter_config.json"
    config = json.loads(written.read_text()) | {"base_model_name_or_path": "base"}  # not a path of this machine
    written.write_text(json.dumps(config, indent=2, sort_keys=True))
    expected = {}
    with torch.inference_mode():
        for name, one in (("base", load()), ("adapter", PeftModel.from_pretrained(load(), str(out / "adapter")))):
            expected[name] = one.eval()(input_ids=torch.tensor([PROMPT])).logits[0].float().contiguous()
    save_file(expected, out / EXPECTED)


if __name__ == "__main__":
    main()
