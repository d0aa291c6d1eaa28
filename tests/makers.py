"""Tiny real checkpoints, PEFT adapters and tokenizers for tests: what transformers and PEFT themselves write.

Sizes are small enough for a laptop core and weights large enough that greedy tokens depend on the adapter. Every
random value comes from a seed. torch, transformers and PEFT are imported on use only, so that tests without a model
may import this file.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ARCHS = (
    "llama",
    "mistral",
    "qwen2",
    "qwen3",
    "gemma2",
    "gemma3",
    "phi3",
    "gpt_neox",
    "opt",
    "olmo2",
    "granite",
    "starcoder2",
    "mixtral",
    "qwen3_moe",
)
EOS_TOKEN_ID = 0
SLIDING_WINDOW = 16

_COMMON: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 256,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": EOS_TOKEN_ID,
    "pad_token_id": 0,
}
_GATED: dict[str, Any] = _COMMON | {"num_key_value_heads": 2, "intermediate_size": 128}
_GEMMA: dict[str, Any] = _GATED | {"head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": SLIDING_WINDOW}
_MOE: dict[str, Any] = {"num_experts_per_tok": 2}
# transformers model type and the sizes that differ from one architecture to the next.
_CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", _GATED),
    "mistral": ("mistral", _GATED | {"sliding_window": SLIDING_WINDOW}),
    "qwen2": ("qwen2", _GATED),
    "qwen3": ("qwen3", _GATED | {"head_dim": 16}),
    "gemma2": ("gemma2", _GEMMA),
    "gemma3": ("gemma3_text", _GEMMA),
    "phi3": ("phi3", _GATED | {"sliding_window": SLIDING_WINDOW}),
    "gpt_neox": ("gpt_neox", _COMMON | {"intermediate_size": 128}),
    "gpt2": (
        "gpt2",
        {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 512}
        | {key: _COMMON[key] for key in ("vocab_size", "bos_token_id", "eos_token_id", "pad_token_id")},
    ),
    "phi": ("phi", _GATED | {"partial_rotary_factor": 0.5}),
    "opt": ("opt", _COMMON | {"ffn_dim": 128, "word_embed_proj_dim": 64}),
    "olmo2": ("olmo2", _GATED),
    "granite": (
        "granite",
        _GATED | {"embedding_multiplier": 2.0, "attention_multiplier": 0.25, "residual_multiplier": 0.5},
    ),
    "starcoder2": ("starcoder2", _GATED | {"sliding_window": SLIDING_WINDOW}),
    "mixtral": ("mixtral", _GATED | _MOE | {"num_local_experts": 4}),
    "qwen3_moe": ("qwen3_moe", _GATED | _MOE | {"head_dim": 16, "num_experts": 4, "moe_intermediate_size": 32}),
    "qwen2_moe": (
        "qwen2_moe",
        _GATED | _MOE | {"num_experts": 4, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 48},
    ),
    "olmoe": ("olmoe", _GATED | _MOE | {"num_experts": 4, "intermediate_size": 32}),
    "gpt_oss": (
        "gpt_oss",
        _GATED
        | _MOE
        | {"num_local_experts": 4, "head_dim": 16, "intermediate_size": 32, "sliding_window": SLIDING_WINDOW},
    ),
}


def make_checkpoint(
    directory: Path, arch: str = "llama", *, seed: int = 0, max_shard_size: str = "", **sizes: Any
) -> Path:
    """Write a random fp32 checkpoint of `arch` with transformers and return `directory`.

    `sizes` override fields of the transformers config. `max_shard_size` such as "100KB" gives a sharded one.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    model_type, defaults = _CONFIGS[arch]
    config = AutoConfig.for_model(model_type, **(defaults | sizes))
    model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            parameter.copy_(_random_weight(name, parameter, generator, is_tied=config.tie_word_embeddings))
    model.generation_config.eos_token_id = config.eos_token_id
    model.save_pretrained(directory, **({"max_shard_size": max_shard_size} if max_shard_size else {}))
    return directory


def make_adapter(
    directory: Path,
    checkpoint: Path,
    *,
    rank: int = 8,
    alpha: float = 16,
    targets: Sequence[str] | str = "all-linear",
    seed: int = 0,
    rslora: bool = False,
    rank_pattern: dict[str, int] | None = None,
    alpha_pattern: dict[str, float] | None = None,
    scale_b: float = 0.3,
    resize: int | None = None,
    **config: Any,
) -> Path:
    """Write a random LoRA adapter for `checkpoint` with PEFT and return `directory`.

    For a mixture of experts "all-linear" means the attention linears: with PEFT's own meaning it would wrap the
    stacked expert weights too, which are not linears. `scale_b` is the standard deviation of B: 0 gives an adapter
    that changes nothing. `config` are further fields of LoraConfig. For GPT-2's transposed linears fan_in_fan_out is
    set, as PEFT requires. `resize` is the size of the model's vocabulary when it is trained: its new rows are random
    and saved. So are the rows of modules_to_save and trainable_token_indices.
    """
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    generator = torch.Generator().manual_seed(seed)
    if resize is not None:
        _resize(base, resize, generator)
    if targets == "all-linear" and base.config.model_type in ("mixtral", "qwen3_moe"):
        targets = ("q_proj", "k_proj", "v_proj", "o_proj")
    if base.config.model_type == "gpt2":
        config.setdefault("fan_in_fan_out", True)
    lora = LoraConfig(
        task_type=config.pop("task_type", "CAUSAL_LM"),
        r=rank,
        lora_alpha=alpha,  # type: ignore[arg-type]  # PEFT says int and takes any number
        target_modules=targets if isinstance(targets, str) else list(targets),
        use_rslora=rslora,
        rank_pattern=rank_pattern or {},
        alpha_pattern=alpha_pattern or {},
        **config,
    )
    model = get_peft_model(base, lora)
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            if ".modules_to_save." in name or "trainable_tokens_delta" in name:
                parameter.add_(torch.randn(parameter.shape, generator=generator) * parameter.std())
            elif ".lora_A." in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) / parameter.shape[1] ** 0.5)
            elif ".lora_embedding_A." in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
            elif ".lora_B." in name or ".lora_embedding_B." in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * scale_b)
            elif ".lora_magnitude_vector." in name:  # the norms of the base's rows
                parameter.mul_(torch.rand(parameter.shape, generator=generator) + 0.5)
            elif parameter.requires_grad and name.endswith(".bias") and ".lora_" not in name:  # of the base
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.5)
    model.save_pretrained(str(directory))
    return directory


def make_converted(
    directory: Path,
    checkpoint: Path,
    init: str,
    *,
    targets: Sequence[str] = ("q_proj", "v_proj", "down_proj"),
    seed: int = 0,
) -> Path:
    """An adapter that started as `init`, which changes the base weights, converted to plain LoRA by PEFT."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    start: Any = init  # one of PEFT's names
    lora = LoraConfig("CAUSAL_LM", r=4, lora_alpha=8, target_modules=list(targets), init_lora_weights=start)
    model = get_peft_model(base, lora)
    config = model.peft_config["default"]
    assert isinstance(config, LoraConfig)
    config.init_lora_weights = True  # as PEFT's examples do: loading must not start anew
    model.save_pretrained(str(directory / "start"))
    config.init_lora_weights = start
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            if ".lora_" in name:
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.3)
    model.save_pretrained(str(directory), path_initial_model_for_weight_conversion=str(directory / "start"))
    return directory


def _resize(base: Any, num_tokens: int, generator: Any) -> None:
    """Give the model a vocabulary of another size, with rows like those that it has."""
    import torch

    num_before = base.config.vocab_size
    base.resize_token_embeddings(num_tokens, mean_resizing=False)
    with torch.no_grad():
        for weight in {
            id(w): w for w in (m.weight for m in (base.get_input_embeddings(), base.get_output_embeddings()))
        }.values():
            new = weight[num_before:]
            new.copy_(torch.randn(new.shape, generator=generator) * weight[:num_before].std())


def make_tokenizer(directory: Path, *, vocab_size: int = 256) -> Path:
    """Write a byte-level BPE tokenizer.json, its config and a chat template into `directory` and return it.

    Token 0 is "</s>" (end of sequence), 1 is "<s>"; then one token for each byte that UTF-8 can contain first (0xC0
    and 0xC1 never occur), which makes 256; a larger `vocab_size` adds a few merges.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    symbols = sorted(pre_tokenizers.ByteLevel.alphabet())
    # Bytes that never occur in UTF-8 (0xC0, 0xC1) make room for the two special tokens.
    never = {_byte_symbol(0xC0), _byte_symbol(0xC1)}
    vocab = {"</s>": EOS_TOKEN_ID, "<s>": 1}
    for symbol in (s for s in symbols if s not in never):
        vocab[symbol] = len(vocab)
    merges: list[tuple[str, str]] = []
    for left, right in _MERGES:
        if len(vocab) >= vocab_size:
            break
        vocab[left + right] = len(vocab)
        merges.append((left, right))
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token="<s>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["</s>", "<s>"])
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "chat_template": CHAT_TEMPLATE,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(settings, indent=1), encoding="utf-8")
    return directory


def make_prompt(seed: int, num_tokens: int, *, vocab_size: int = 256) -> list[int]:
    """Random token ids without the special ones."""
    draw = random.Random(seed)
    return [draw.randrange(2, vocab_size) for _ in range(num_tokens)]


CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
_MERGES = [("t", "h"), ("th", "e"), ("i", "n"), ("a", "n"), ("e", "r"), ("o", "n"), ("r", "e"), ("Ġ", "the")]


def _random_weight(name: str, parameter: Any, generator: Any, *, is_tied: bool) -> Any:
    """Weights of unit gain; norms and biases near what they start from, yet all different.

    A tied embedding is small: beside it the layers must decide, or every token would repeat itself.
    """
    import torch

    noise = torch.randn(parameter.shape, generator=generator)
    if parameter.dim() == 1:
        return parameter + 0.1 * noise
    if ("embed" in name or "wte" in name or "wpe" in name) and "lm_head" not in name:
        return noise * (0.1 if is_tied else 1.0)
    fan_in = parameter.shape[-1]
    gain = 3.0 if "lm_head" in name or "embed_out" in name else 1.0
    return noise * gain / fan_in**0.5


def _byte_symbol(byte: int) -> str:
    """The character that byte-level BPE writes for a byte; 0xC0 and 0xC1 are printable, hence themselves."""
    return chr(byte)


def make_classifier(
    directory: Path, checkpoint: Path, *, num_labels: int = 3, rank: int = 4, seed: int = 0, **config: Any
) -> Path:
    """Write a random SEQ_CLS adapter for `checkpoint` with PEFT, its score head included, and return `directory`."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForSequenceClassification

    base = AutoModelForSequenceClassification.from_pretrained(checkpoint, dtype=torch.float32, num_labels=num_labels)
    model = get_peft_model(base, LoraConfig(task_type="SEQ_CLS", r=rank, lora_alpha=2 * rank, **config))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            if ".lora_A." in name or ".lora_B." in name or "modules_to_save" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    model.save_pretrained(str(directory))
    return directory
