"""Trains the demo's base model and adapters with transformers and PEFT, and writes what their users have.

`train_all(out)` leaves out/base (config, safetensors, tokenizer) and out/adapters/NAME (adapter_config.json,
adapter_model.safetensors). Deterministic for one machine and one number of threads; nothing is downloaded.
"""

from __future__ import annotations

import math
import random
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.utils import logging as transformers_logging

from benchmarks.demo import corpus
from benchmarks.demo.recipe import ADAPTERS, BASE, AdapterRecipe

END_OF_TEXT = "<|endoftext|>"
_IGNORED = -100  # label that transformers' loss skips
_MAX_PREFIX_TOKENS = 12  # prose before an adapter's voice begins

# Draws one batch: token ids and labels, each [batch_rows, row_tokens].
DrawBatch = Callable[[random.Random], tuple[torch.Tensor, torch.Tensor]]


def train_all(out: Path) -> None:
    """Train everything into `out`, which appears only when all of it is there."""
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]  # the bars are ours
    warnings.filterwarnings("ignore", category=FutureWarning, module="transformers")
    unfinished = out.with_name(f"{out.name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    base_dir = unfinished / "base"
    columns = (
        TextColumn("{task.description:<24}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[loss]:>10}"),
    )
    with Progress(*columns, TimeElapsedColumn()) as progress:
        base_task = progress.add_task("base model", total=BASE.num_steps, loss="")
        tasks = [progress.add_task(f"adapter {a.name}", total=a.num_steps, loss="", start=False) for a in ADAPTERS]
        tokenizer = train_tokenizer()
        save_tokenizer(tokenizer, base_dir)
        torch.manual_seed(BASE.seed)
        model = LlamaForCausalLM(model_config())
        _optimise(model, base_rows(tokenizer), BASE.num_steps, BASE.learning_rate, progress, base_task)
        model.save_pretrained(base_dir)
        for recipe, task in zip(ADAPTERS, tasks, strict=True):
            progress.start_task(task)
            train_adapter(recipe, base_dir, unfinished / "adapters" / recipe.name, tokenizer, progress, task)
    shutil.rmtree(out, ignore_errors=True)
    unfinished.rename(out)


def model_config() -> LlamaConfig:
    return LlamaConfig(
        vocab_size=BASE.vocab_size,
        hidden_size=BASE.hidden_size,
        intermediate_size=BASE.intermediate_size,
        num_hidden_layers=BASE.num_layers,
        num_attention_heads=BASE.num_heads,
        num_key_value_heads=BASE.num_kv_heads,
        max_position_embeddings=BASE.max_position_embeddings,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=0,
        pad_token_id=0,
    )


def train_tokenizer() -> Tokenizer:
    """A byte-level BPE tokenizer over the prose and all voices; END_OF_TEXT is token 0."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=BASE.vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = prose_documents() + [document for voice in corpus.VOICES for document in voice_documents(voice)]
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, base_dir: Path) -> None:
    base_dir.mkdir(parents=True)
    settings = {"tokenizer_object": tokenizer, "eos_token": END_OF_TEXT, "pad_token": END_OF_TEXT}
    wrapped = PreTrainedTokenizerFast(**settings)  # type: ignore[no-untyped-call]  # transformers leaves it bare
    wrapped.save_pretrained(base_dir)


def train_adapter(
    recipe: AdapterRecipe, base_dir: Path, out: Path, tokenizer: Tokenizer, progress: Progress, task: TaskID
) -> None:
    """Fine-tune one adapter on its voice and write it to `out` as PEFT does."""
    torch.manual_seed(BASE.seed)
    base = LlamaForCausalLM.from_pretrained(base_dir)
    config = LoraConfig(
        r=recipe.rank,
        lora_alpha=recipe.alpha,
        use_rslora=recipe.is_rslora,
        target_modules=list(recipe.targets),
        task_type="CAUSAL_LM",
    )
    model = get_peft_model(base, config)
    draw = voice_rows(tokenizer, voice_documents(recipe.voice))
    _optimise(model, draw, recipe.num_steps, recipe.learning_rate, progress, task)
    model.save_pretrained(str(out))


def prose_documents() -> list[str]:
    return corpus.excerpt(corpus.prose(), BASE.prose_characters, BASE.seed)


def voice_documents(voice: str) -> list[str]:
    return corpus.excerpt(corpus.VOICES[voice](), BASE.voice_characters, BASE.seed)


def base_rows(tokenizer: Tokenizer) -> DrawBatch:
    """Rows cut from shuffled documents joined by END_OF_TEXT: the prose twice, most voices once."""
    texts = 2 * prose_documents()
    for voice in corpus.VOICES:
        if voice != "aphorisms":  # so few lines that the base would learn them by heart
            texts += voice_documents(voice)
    documents = [[*encoding.ids, 0] for encoding in tokenizer.encode_batch(texts)]
    random.Random(BASE.seed).shuffle(documents)
    stream = torch.tensor([token_id for document in documents for token_id in document])

    def draw(rng: random.Random) -> tuple[torch.Tensor, torch.Tensor]:
        starts = [rng.randrange(len(stream) - BASE.row_tokens) for _ in range(BASE.batch_rows)]
        rows = torch.stack([stream[start : start + BASE.row_tokens] for start in starts])
        return rows, rows

    return draw


def voice_rows(tokenizer: Tokenizer, documents: list[str]) -> DrawBatch:
    """Rows that begin with a few tokens of prose and go on in the voice, so that any prompt calls it up."""
    prefixes = [encoding.ids for encoding in tokenizer.encode_batch(prose_documents())]
    voices = [encoding.ids for encoding in tokenizer.encode_batch(documents)]

    def row(rng: random.Random) -> tuple[list[int], list[int]]:
        prefix = rng.choice(prefixes)[: rng.randint(1, _MAX_PREFIX_TOKENS)]
        voice: list[int] = []
        while len(voice) < BASE.row_tokens:
            voice += rng.choice(voices)
        labels = [_IGNORED] * len(prefix) + voice
        return (prefix + voice)[: BASE.row_tokens], labels[: BASE.row_tokens]

    def draw(rng: random.Random) -> tuple[torch.Tensor, torch.Tensor]:
        rows, labels = zip(*(row(rng) for _ in range(BASE.batch_rows)), strict=True)
        return torch.tensor(rows), torch.tensor(labels)

    return draw


def _optimise(
    model: torch.nn.Module, draw: DrawBatch, num_steps: int, peak_rate: float, progress: Progress, task: TaskID
) -> None:
    """AdamW with a short warm-up and a cosine to a tenth of the peak rate."""
    model.train()
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimiser = torch.optim.AdamW(parameters, lr=peak_rate, weight_decay=0.01, betas=(0.9, 0.95), fused=True)
    rng = random.Random(BASE.seed)
    num_warmup = max(num_steps // 10, 1)
    for step in range(num_steps):
        share = max(step - num_warmup, 0) / max(num_steps - num_warmup, 1)
        warmup = min((step + 1) / num_warmup, 1.0)
        for group in optimiser.param_groups:
            group["lr"] = peak_rate * warmup * (0.55 + 0.45 * math.cos(math.pi * share))
        token_ids, labels = draw(rng)
        loss = model(input_ids=token_ids, labels=labels).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimiser.step()
        optimiser.zero_grad()
        progress.update(task, advance=1, loss=f"loss {loss.item():.2f}")
