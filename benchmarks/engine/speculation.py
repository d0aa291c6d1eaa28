"""What speculative decoding gains and costs: the same requests with and without, in turns, on the CPU.

    python -m benchmarks.engine.speculation [--mode auto] [--rows 1,8,64] [--adapters 0,8] [--tokens N] [--rounds N]

The model has the shape of the random one, and text by construction: its likeliest token follows from the last one, in
circles of 8 tokens. Four kinds of text: "repetitive" is greedy, "random" is drawn from nearly all tokens, "few words"
is drawn from 12 tokens, so that drafts are found all the time and are wrong, and "drifting" follows one of two circles
and leaves it with one token in five, so that most drafts are right. Both sides run plans of 4 steps and must return the
same tokens. Printed are the ratios of their throughputs (above 1: drafts gain), median and range over the rounds, and
the drafts accepted.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import time
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from benchmarks.engine.driver import load_adapters, make_engine
from benchmarks.serving.checkpoints import SEED, SHAPES, make_adapters, make_base
from benchmarks.system import ROOT
from contract.plan_stream.plan_bounds import MAX_PLAN_STEPS
from data_plane.engine.engine import TorchEngine
from data_plane.plan import NewRow, RowSampling, StepPlan

NUM_PROMPT = 16
BLOCK_SIZE = 16
CIRCLE = 8  # tokens
FIRST_TOKEN = 8  # of those that prompts have; those before are special
FEW_WORDS = np.arange(100, 112, dtype=np.int32)
TWO_CIRCLES = np.arange(96, 112, dtype=np.int32)
TEMPERATURES = {"repetitive": 0.0, "random": 100.0, "few words": 100.0, "drifting": 7.8}
TEXTS = tuple(TEMPERATURES)
DRAWN_FROM = {"few words": FEW_WORDS, "drifting": TWO_CIRCLES}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model-shape", choices=sorted(SHAPES), default="205m")
    parser.add_argument("--mode", choices=("auto", "ngram"), default="auto")
    parser.add_argument("--texts", default=",".join(TEXTS))
    parser.add_argument("--rows", default="1,8,64", help="rows that decode, counts separated by commas")
    parser.add_argument("--adapters", default="0,8", help="adapters that the rows take in turn, counts")
    parser.add_argument("--tokens", type=int, default=96, help="tokens that each row generates")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--cache", type=Path, default=ROOT / ".motet" / "bench")
    arguments = parser.parse_args()
    rows = [int(count) for count in arguments.rows.split(",")]
    adapters = [int(count) for count in arguments.adapters.split(",")]
    texts = arguments.texts.split(",")
    if unknown := set(texts) - set(TEXTS):
        parser.error(f"--texts: {sorted(unknown)} are not among {', '.join(TEXTS)}")
    model_dir = make_circling(arguments.model_shape, arguments.cache)
    adapter_dirs = make_adapters(arguments.model_shape, max(adapters), arguments.cache)
    engines = {}
    for speculative in ("off", arguments.mode):
        engines[speculative] = make_engine(
            model_dir,
            threads=None,
            max_rows=max(rows),
            tokens_per_row=NUM_PROMPT + arguments.tokens + 2 * BLOCK_SIZE,
            arena_bytes=(1 << 30) if adapter_dirs else 0,
            native_code="on",
            speculative=speculative,
        )
        load_adapters(engines[speculative], model_dir, adapter_dirs)
    for text in texts:
        for num_rows in rows:
            for num_adapters in adapters:
                compare(engines, arguments.rounds, arguments.tokens, num_rows, num_adapters, text)


def make_circling(shape_name: str, cache: Path) -> Path:
    """Directory of a model whose likeliest token follows from the last one, made where it is missing.

    Embeddings are so long that the layers hardly turn them, and the head's row of each token is the direction of the
    embedding before it in its circle. The layers compute as in any model of the shape.
    """
    out = cache / f"{shape_name}-circling-{SEED}"
    if (out / "model.safetensors").exists():
        return out
    base = make_base(shape_name, cache, None)
    weights = load_file(base / "model.safetensors")
    embeddings = weights["model.embed_tokens.weight"]
    directions = torch.nn.functional.normalize(embeddings.float(), dim=-1)
    tokens = torch.arange(len(embeddings))
    following = tokens - tokens % CIRCLE + (tokens + 1) % CIRCLE
    head = torch.zeros_like(directions)
    head[following] = directions
    weights["lm_head.weight"] = head.to(embeddings.dtype)
    weights["model.embed_tokens.weight"] = (directions * 64 * len(directions[0]) ** 0.5).to(embeddings.dtype)
    shutil.copytree(base, out, ignore=shutil.ignore_patterns("model.safetensors"), dirs_exist_ok=True)
    save_file(weights, out / "model.safetensors", metadata={"format": "pt"})
    return out


def compare(
    engines: dict[str, TorchEngine], rounds: int, num_tokens: int, num_rows: int, num_adapters: int, text: str
) -> None:
    """Run both sides in turns and print their ratio."""
    ratios, drafts, times_s = [], (0, 0), []
    mode = next(name for name in engines if name != "off")
    for turn in range(rounds + 1):
        runs = {
            name: Run(engine, num_rows, num_adapters, num_tokens, text, seed=turn) for name, engine in engines.items()
        }
        for plan in range(num_tokens // MAX_PLAN_STEPS):
            for name in list(runs) if plan % 2 else list(runs)[::-1]:
                runs[name].plan()
        for run in runs.values():
            run.end()
        assert runs["off"].tokens == runs[mode].tokens, "drafts changed a token"
        if turn:  # the first one warms up
            ratios.append(runs["off"].time_s / runs[mode].time_s)
            times_s.append(runs["off"].time_s)
            drafts = (drafts[0] + runs[mode].num_drafted, drafts[1] + runs[mode].num_accepted)
    tokens_per_s = num_rows * len(runs["off"].tokens) / statistics.median(times_s)
    print(
        f"{text} rows={num_rows} adapters={num_adapters}: {statistics.median(ratios):.3f} "
        f"({min(ratios):.3f} to {max(ratios):.3f}) of {tokens_per_s:.0f} tokens/s without drafts, "
        f"{drafts[1]} of {drafts[0]} drafts accepted",
        flush=True,
    )


class Run:
    """The same requests on one engine, plan by plan: the two sides take turns, so that slow seconds hit both."""

    def __init__(
        self, engine: TorchEngine, num_rows: int, num_adapters: int, num_tokens: int, text: str, *, seed: int
    ) -> None:
        self._engine = engine
        self._num_rows = num_rows
        self._step_id = 1
        self.tokens: list[list[int]] = []  # by step
        self.time_s = 0.0  # of the decode steps
        self.num_drafted = self.num_accepted = 0
        rng = np.random.default_rng(seed)
        blocks_of_row = -(-(NUM_PROMPT + num_tokens + 1) // BLOCK_SIZE)
        new_rows = []
        few = DRAWN_FROM.get(text)
        for row in range(num_rows):
            if few is not None:
                prompt = rng.choice(few, NUM_PROMPT)
            else:
                prompt = rng.integers(FIRST_TOKEN, engine.capacities.vocab_size, NUM_PROMPT).astype(np.int32)
            if text == "repetitive":  # it enters a circle at once, which its prompt holds already
                begin = prompt[0] - prompt[0] % CIRCLE
                prompt[-2 * CIRCLE :] = begin + np.arange(2 * CIRCLE) % CIRCLE
            sampling = RowSampling(
                temperature=TEMPERATURES[text],
                top_k=0,
                top_p=1.0,
                seed=seed + row,
                biased_token_ids=few,
                biases=None if few is None else np.full(len(few), 1e4, dtype=np.float32),
            )
            new_rows.append(
                NewRow(
                    row=row,
                    token_ids=prompt,
                    num_prompt_tokens=NUM_PROMPT,
                    num_computed_tokens=0,
                    block_ids=np.arange(row * blocks_of_row, (row + 1) * blocks_of_row, dtype=np.int32),
                    slot=row % num_adapters if num_adapters else None,
                    slot_generation=1 if num_adapters else 0,
                    sampling=sampling,
                )
            )
        prefills = np.array([(row, NUM_PROMPT) for row in range(num_rows)], dtype=np.int32)
        engine.execute(StepPlan(1, new_rows=new_rows, prefills=prefills))

    def plan(self) -> None:
        """One plan of as many steps as a plan may have."""
        start_s = time.perf_counter()
        outputs = []
        for more in range(MAX_PLAN_STEPS - 1, -1, -1):
            self._step_id += 1
            outputs.append(self._engine.execute(StepPlan(self._step_id, num_more=more)))
        self.time_s += time.perf_counter() - start_s
        self.tokens += [output.token_ids.tolist() for output in outputs]
        self.num_drafted += sum(output.num_drafted for output in outputs)
        self.num_accepted += sum(output.num_accepted for output in outputs)

    def end(self) -> None:
        """Free the rows."""
        self._engine.execute(StepPlan(self._step_id + 1, freed_rows=np.arange(self._num_rows, dtype=np.int32)))


if __name__ == "__main__":
    main()
