"""What a correct system generates: requests whose tokens and text are known before they are sent.

Two truths: the hash worker's model, of which any request is known, and a real model, of which some requests are,
computed once by transformers and PEFT.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from tokenizers import Tokenizer

from contract.fingerprint import checkpoint_fingerprint
from control_plane.scheduler.types import sample_seed
from tests.fakes import hash_model
from tests.makers import make_prompt


@dataclass(frozen=True)
class Job:
    """One request of the load. End-of-sequence tokens are ignored."""

    prompt: tuple[int, ...]
    adapter: str  # empty: the base model
    num_tokens: int
    temperature: float = 0.0
    seed: int = 0
    n: int = 1


class Truth(Protocol):
    """Draws requests and knows their completions."""

    def draw(self, draw: random.Random) -> Job:
        """A request over all adapters."""

    def tokens(self, job: Job, digest: str, index: int) -> Sequence[int]:
        """The completion with this index by this version; raises KeyError if no such version is known."""

    def text(self, token_ids: Sequence[int]) -> str:
        """The text that a client gets with these tokens."""


class _Texts:
    def __init__(self, model_dir: Path) -> None:
        self._tokenizer = Tokenizer.from_file(str(model_dir / "tokenizer.json"))

    def text(self, token_ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=True))


class HashTruth(_Texts):
    """Any prompt, any settings."""

    def __init__(self, model_dir: Path, adapters: Sequence[str], *, max_tokens: int = 100) -> None:
        super().__init__(model_dir)
        self._fingerprint = checkpoint_fingerprint(model_dir)
        self._adapters = ["", *adapters]
        self._max_tokens = max_tokens
        self._shared = make_prompt(0, 48)  # many prompts begin with it
        self._tokens = functools.lru_cache(maxsize=4096)(self._compute)

    def draw(self, draw: random.Random) -> Job:
        own = make_prompt(draw.randrange(1 << 30), draw.choice((1, 5, 20, 90)))
        prompt = [*self._shared[: draw.choice((0, 0, 17, 48))], *own]
        is_sampled = draw.random() < 0.5
        return Job(
            tuple(prompt),
            draw.choice(self._adapters),
            draw.choice((1, self._max_tokens // 3, self._max_tokens)),
            temperature=0.8 if is_sampled else 0.0,
            seed=draw.randrange(1 << 62) if is_sampled else 0,
            n=draw.choice((1, 1, 1, 1, 1, 3)),
        )

    def tokens(self, job: Job, digest: str, index: int) -> Sequence[int]:
        return self._tokens(job, digest, index)

    def _compute(self, job: Job, digest: str, index: int) -> tuple[int, ...]:
        seed = sample_seed(job.seed, index) if job.temperature > 0 else None
        return tuple(hash_model.oracle(self._fingerprint, digest, job.prompt, job.num_tokens, seed=seed))


class RealTruth(_Texts):
    """Prompts of a real model whose greedy completions rounding cannot change."""

    def __init__(
        self,
        model_dir: Path,
        adapters: Mapping[str, Path],
        names: Mapping[str, Sequence[str]],
        *,
        seed: int = 0,
        num_prompts: int = 4,
        num_tokens: int = 40,
    ) -> None:
        """`adapters`: directories by digest; `names`: for each adapter that is drawn, the digests it may have."""
        from tests.oracle import Oracle  # imports torch

        super().__init__(model_dir)
        oracle = Oracle(model_dir, {digest[:16]: directory for digest, directory in adapters.items()})
        self._known: dict[tuple[tuple[int, ...], str], tuple[int, ...]] = {}
        self._jobs: list[Job] = []
        draw = random.Random(seed)
        for name, digests in {"": [""], **names}.items():
            wanted = len(self._jobs) + num_prompts
            while len(self._jobs) < wanted:
                prompt = tuple(make_prompt(draw.randrange(1 << 30), draw.choice((3, 9, 30))))
                completions = {digest: oracle.greedy(prompt, num_tokens, digest[:16]) for digest in digests}
                if all(completion.is_decisive for completion in completions.values()):
                    self._known |= {
                        (prompt, digest): tuple(completion.token_ids) for digest, completion in completions.items()
                    }
                    self._jobs.append(Job(prompt, name, num_tokens))

    def draw(self, draw: random.Random) -> Job:
        return draw.choice(self._jobs)

    def tokens(self, job: Job, digest: str, index: int) -> Sequence[int]:
        assert index == 0 and job.temperature == 0, "a real model's samples are not known before"
        return self._known[job.prompt, digest][: job.num_tokens]
