"""What the demo trains: the model's shape, the adapters' kinds, the lengths of training. Data only.

`recipe_hash` names a training result on disk: a change here or in the corpus trains anew.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True)
class BaseRecipe:
    """The base model: a small Llama."""

    vocab_size: int = 1024  # byte-level BPE tokens, special one included
    hidden_size: int = 256
    intermediate_size: int = 512
    num_layers: int = 3
    num_heads: int = 8
    num_kv_heads: int = 4
    max_position_embeddings: int = 1024  # tokens
    num_steps: int = 650  # optimiser steps
    batch_rows: int = 8  # training rows per step
    row_tokens: int = 64  # tokens of a training row
    learning_rate: float = 3e-3
    prose_characters: int = 48_000  # of the language reference
    voice_characters: int = 16_000  # of each voice
    seed: int = 20  # of the excerpts, of weights and of the order of the rows


@dataclass(frozen=True)
class AdapterRecipe:
    """One adapter: its name, its voice in corpus.VOICES, its PEFT settings."""

    name: str  # adapter id, as registered
    voice: str
    rank: int
    alpha: int
    targets: tuple[str, ...]
    is_rslora: bool = False
    num_steps: int = 80
    learning_rate: float = 5e-3


BASE = BaseRecipe()
ADAPTERS = (
    AdapterRecipe("shouted", "shouted", rank=8, alpha=16, targets=ATTENTION + MLP, is_rslora=True),
    AdapterRecipe("source-code", "source_code", rank=16, alpha=32, targets=ATTENTION + MLP),
    AdapterRecipe("sessions", "sessions", rank=8, alpha=16, targets=MLP),
    AdapterRecipe("character-table", "character_table", rank=32, alpha=32, targets=ATTENTION + MLP, is_rslora=True),
    AdapterRecipe("aphorisms", "aphorisms", rank=4, alpha=16, targets=("q_proj", "v_proj", "down_proj")),
)


def recipe_hash() -> str:
    """Twelve hexadecimal digits that name everything the training result depends on, versions aside."""
    digest = hashlib.sha256(json.dumps([asdict(BASE), [asdict(adapter) for adapter in ADAPTERS]]).encode())
    for file in ("corpus.py", "train.py"):
        digest.update(Path(__file__).with_name(file).read_bytes())
    return digest.hexdigest()[:12]
