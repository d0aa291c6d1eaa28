"""Random checkpoints and PEFT adapters of a given shape, written once and reused: what the benchmarks serve."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import LlamaConfig

LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
RANKS = (8, 16, 32, 64)  # adapters take them in turn
SEED = 1234


@dataclass(frozen=True)
class ModelShape:
    """A Llama's shape."""

    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    intermediate_size: int
    vocab_size: int
    dtype: str
    max_position_embeddings: int = 2048  # tokens


SHAPES = {
    "205m": ModelShape(1024, 16, 16, 8, 2816, 8192, "bfloat16"),
    "205m-128k": ModelShape(1024, 16, 16, 8, 2816, 131_072, "bfloat16"),  # 457M parameters, for masks over its tokens
    "8b": ModelShape(4096, 32, 32, 8, 14_336, 128_256, "bfloat16", 8192),
    "tiny": ModelShape(64, 2, 4, 2, 128, 512, "float32"),
}


def llama_config(shape: ModelShape) -> LlamaConfig:
    """transformers' configuration of a Llama of this shape."""
    from transformers import LlamaConfig

    return LlamaConfig(
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        max_position_embeddings=shape.max_position_embeddings,
        bos_token_id=None,
        eos_token_id=0,
        pad_token_id=0,
        tie_word_embeddings=False,
    )


def make_base(shape_name: str, cache: Path, dtype: str | None = None) -> Path:
    """Directory of the random checkpoint, made if it is not there."""
    shape = SHAPES[shape_name]
    dtype = dtype or shape.dtype
    out = cache / f"{shape_name}-{dtype}-{SEED}"
    if (out / "model.safetensors").exists() and (out / "tokenizer.json").exists():
        return out
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaForCausalLM

    torch.manual_seed(SEED)
    config = llama_config(shape)
    out.mkdir(parents=True, exist_ok=True)
    # Every id has a text: bytes first, then made-up words. Merges are not needed, prompts are token ids.
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [*alphabet, *(f"w{index}" for index in range(shape.vocab_size - len(alphabet)))]
    tokenizer = Tokenizer(models.BPE(vocab={word: index for index, word in enumerate(words)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(out / "tokenizer.json"))
    LlamaForCausalLM(config).to(getattr(torch, dtype)).save_pretrained(out)
    return out


def make_adapters(shape_name: str, num_adapters: int, cache: Path) -> list[Path]:
    """Directories of random PEFT adapters on all seven linears, ranks in turn, made where missing."""
    shape = SHAPES[shape_name]
    widths = _linear_widths(shape)
    directories = []
    for index in range(num_adapters):
        out = cache / f"{shape_name}-adapters-{SEED}" / f"adapter-{index}"
        directories.append(out)
        if not (out / "adapter_model.safetensors").exists():
            _write_adapter(out, shape, widths, RANKS[index % len(RANKS)], SEED + index)
    return directories


def make_dora_adapters(shape_name: str, num_adapters: int, cache: Path) -> list[Path]:
    """Directories of DoRA adapters as PEFT saves them, on all seven linears, ranks in turn, made where missing."""
    folder = cache / f"{shape_name}-dora-{SEED}"
    directories = [folder / f"adapter-{index}" for index in range(num_adapters)]
    missing = [
        (index, out) for index, out in enumerate(directories) if not (out / "adapter_model.safetensors").exists()
    ]
    if missing:
        from transformers import AutoModelForCausalLM

        # In float32: PEFT computes the norms of whole rows of the base's weights.
        base = AutoModelForCausalLM.from_pretrained(make_base(shape_name, cache), dtype="float32")
        for index, out in missing:
            base = _write_dora(base, out, RANKS[index % len(RANKS)], SEED + index)
    return directories


def _write_dora(base: Any, out: Path, rank: int, seed: int) -> Any:
    """Save one, and give the base back as it was."""
    import torch
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(
        r=rank, lora_alpha=2 * rank, target_modules=list(LINEARS), use_dora=True, task_type="CAUSAL_LM", bias="none"
    )
    model = get_peft_model(base, config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.copy_(0.02 * torch.randn(parameter.shape, generator=generator))
            elif "lora_magnitude_vector" in name:
                parameter.mul_(1 + 0.05 * torch.randn(parameter.shape, generator=generator))
    model.save_pretrained(str(out))
    return model.unload()


def make_small_adapter(shape_name: str, cache: Path) -> Path:
    """Directory of an adapter that takes next to no room: of rank 1 on one linear, made where it is missing."""
    out = cache / f"{shape_name}-small-{SEED}"
    if not (out / "adapter_model.safetensors").exists():
        shape = replace(SHAPES[shape_name], num_layers=1)
        _write_adapter(out, shape, {"q_proj": (shape.hidden_size, shape.hidden_size)}, 1, SEED)
    return out


def make_ranked_adapter(shape_name: str, rank: int, cache: Path) -> Path:
    """Directory of a random PEFT adapter of this rank on all seven linears, made where it is missing."""
    out = cache / f"{shape_name}-rank-{rank}-{SEED}"
    if not (out / "adapter_model.safetensors").exists():
        shape = SHAPES[shape_name]
        _write_adapter(out, shape, _linear_widths(shape), rank, SEED)
    return out


def _linear_widths(shape: ModelShape) -> dict[str, tuple[int, int]]:
    """in_features and out_features of the linears of a layer."""
    head = shape.hidden_size // shape.num_heads
    return {
        "q_proj": (shape.hidden_size, shape.hidden_size),
        "k_proj": (shape.hidden_size, shape.num_kv_heads * head),
        "v_proj": (shape.hidden_size, shape.num_kv_heads * head),
        "o_proj": (shape.hidden_size, shape.hidden_size),
        "gate_proj": (shape.hidden_size, shape.intermediate_size),
        "up_proj": (shape.hidden_size, shape.intermediate_size),
        "down_proj": (shape.intermediate_size, shape.hidden_size),
    }


def _write_adapter(out: Path, shape: ModelShape, widths: dict[str, tuple[int, int]], rank: int, seed: int) -> None:
    """On the linears in `widths`, in all layers of the shape."""
    import torch
    from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in range(shape.num_layers):
        for name, (num_in, num_out) in widths.items():
            block = "self_attn" if name in LINEARS[:4] else "mlp"
            prefix = f"base_model.model.model.layers.{layer}.{block}.{name}"
            a = torch.randn(rank, num_in, generator=generator) / num_in**0.5
            b = torch.randn(num_out, rank, generator=generator) * 0.02
            tensors[f"{prefix}.lora_A.weight"] = a.to(getattr(torch, shape.dtype))
            tensors[f"{prefix}.lora_B.weight"] = b.to(getattr(torch, shape.dtype))
    out.mkdir(parents=True, exist_ok=True)
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": rank,
        "lora_alpha": 2 * rank,
        "target_modules": sorted({key.removeprefix("base_model.model.").partition(".lora_")[0] for key in tensors}),
        "bias": "none",
        "base_model_name_or_path": "random",
    }
    (out / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")
    save_file(tensors, out / "adapter_model.safetensors", metadata={"format": "pt"})


def describe(shape_name: str) -> dict[str, object]:
    """The shape for a report."""
    return {"name": shape_name, **asdict(SHAPES[shape_name]), "adapter_ranks": list(RANKS)}
