"""The files that an adapter consists of, by the format that it is written in. The names decide about the format."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
WEIGHTS_ARRAY = "model.lora_weights.npy"
ROWS_ARRAY = "model.lora_config.npy"
EXACT_ARRAY = "model.lora_exact.npy"
_PICKLE = "adapter_model.bin"  # PEFT's in place of WEIGHTS_FILE; loading it can run code
TOKENIZER_FILE = "tokenizer.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
SPECIAL_TOKENS_FILE = "special_tokens_map.json"
ADDED_TOKENS_FILE = "added_tokens.json"
TEMPLATE_FILE = "chat_template.jinja"
GENERATION_FILE = "generation_config.json"
# What an adapter may bring beside its weights, and how large each file may be, bytes.
COMPANION_LIMITS = {
    TOKENIZER_FILE: 64 << 20,
    TOKENIZER_CONFIG: 4 << 20,
    SPECIAL_TOKENS_FILE: 1 << 20,
    ADDED_TOKENS_FILE: 1 << 20,
    TEMPLATE_FILE: 1 << 20,
    GENERATION_FILE: 1 << 20,
}


@dataclass(frozen=True, slots=True)
class AdapterFormat:
    """One way to write an adapter."""

    required: tuple[str, ...]
    optional: tuple[str, ...]
    written_by: str  # for messages
    companions: tuple[str, ...] = ()  # files that say nothing of the weights; all of them are optional

    @property
    def names(self) -> tuple[str, ...]:
        """All files that it may have."""
        return (*self.required, *self.optional, *self.companions)


PEFT = AdapterFormat((CONFIG_FILE, WEIGHTS_FILE), (), "PEFT's save_pretrained", tuple(COMPANION_LIMITS))
TRTLLM = AdapterFormat(
    (WEIGHTS_ARRAY, ROWS_ARRAY), (CONFIG_FILE, EXACT_ARRAY), "TensorRT-LLM's hf_lora_convert.py or `motet convert`"
)
FORMATS = (PEFT, TRTLLM)
ALL_NAMES = tuple(dict.fromkeys(name for known in FORMATS for name in known.names))


def format_of(names: Collection[str]) -> AdapterFormat:
    """TensorRT-LLM's where one of its two arrays is among the names, and PEFT's otherwise."""
    return TRTLLM if any(name in names for name in TRTLLM.required) else PEFT


def missing_file(name: str, written: AdapterFormat, present: Collection[str]) -> str:
    """What to say of a place that has files of these names and lacks one that the format requires."""
    if name == WEIGHTS_FILE and _PICKLE in present:
        return (
            f"has its weights only as {_PICKLE}, a pickle, which can run code and is refused; load the adapter with "
            "PEFT where you trust it and save it again with save_pretrained"
        )
    shards = [other for other in present if other.startswith("adapter_model-") and other.endswith(".safetensors")]
    if name == WEIGHTS_FILE and shards:
        return f"has no {name}; its weights are in {len(shards)} shards: join them into one {WEIGHTS_FILE}"
    return f"has no {name}; name a directory that {written.written_by} wrote"


def names_error(names: Collection[str]) -> str:
    """What is wrong with the names of an adapter's files, a signature left out; empty if nothing is."""
    written = format_of(names)
    is_complete = all(name in names for name in written.required) and len(set(names)) == len(names)
    if is_complete and all(name in written.names for name in names):
        return ""
    expected = [" and ".join(known.required) for known in FORMATS]
    beside = f", beside these {' and '.join(written.optional)}" if written.optional else ""
    return f"has {len(names)} files; send {', or '.join(expected)}{beside}, each once"
