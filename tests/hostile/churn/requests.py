"""Requests at random: generations of a name, of the base, of combinations, with task ids; embeddings and classes."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Mapping, Sequence

from motet import (
    AdapterUse,
    Client,
    DeadlineExceeded,
    FailedPrecondition,
    Generation,
    LoraTask,
    NotFound,
    ResourceExhausted,
    Unavailable,
)

from tests.hostile.churn.ledger import Ledger
from tests.hostile.churn.truth import NUM_TOKENS, Combined, Known, Version
from tests.makers import make_prompt

TIMEOUT_S = 120.0
SLOW_S = 30.0  # with workers that are killed and started again meanwhile
VECTOR_TOLERANCE = 1e-4  # of values of vectors of length 1, and of logits near 1: sums of another order


class Requests:
    """Any thread may call `send`."""

    def __init__(
        self,
        client: Client,
        ledger: Ledger,
        versions: Mapping[str, Sequence[Version]],
        base: Sequence[Known],
        combined: Sequence[Combined],
    ) -> None:
        self._client = client
        self._ledger = ledger
        self._versions = versions
        self._base = base
        self._combined = combined
        self._by_digest = {version.digest: version for each in versions.values() for version in each}
        self._classifiers = [name for name, each in versions.items() if each[0].classes]
        self._embeddable = [name for name, each in versions.items() if each[0].kind != "activated"]
        # Every version that comes without a tokenizer may be sent with a number; one of each kind is enough.
        kinds = {each[0].kind: each[0] for each in versions.values() if not each[0].made.has_tokenizer}
        self._tasks = [
            (LoraTask(number, version.made.served), version) for number, version in enumerate(kinds.values())
        ]
        self._first: dict[tuple[str, Known, int], tuple[int, ...]] = {}  # samples, by version, request and seed
        self._vectors: dict[tuple[str, tuple[int, ...]], tuple[float, ...]] = {}  # by version and prompt
        self._lock = threading.Lock()

    def send(self, draw: random.Random) -> None:
        """One request, and its judgement."""
        sends = [
            self._name,
            self._combination,
            self._base_model,
            self._sampled,
            self._task,
            self._vector,
            self._classes,
        ]
        chosen = draw.choices(sends, weights=(50, 15, 10, 10, 10, 5, 5))[0]
        begin_s = time.monotonic()
        try:
            chosen(draw)
        except (Unavailable, ResourceExhausted, DeadlineExceeded, FailedPrecondition) as error:
            self._ledger.count(f"refused: {type(error).__name__}")
        if time.monotonic() - begin_s > SLOW_S:
            self._ledger.count(f"requests of more than {SLOW_S:.0f} s")

    def _generate(self, known: Known, adapter: str = "", task: LoraTask | int | None = None) -> Generation:
        return self._client.generate(
            known.sent,
            adapter=adapter,
            lora_task=task,
            max_tokens=NUM_TOKENS,
            ignore_eos=True,
            timeout_s=TIMEOUT_S,
        ).result()

    def _base_model(self, draw: random.Random) -> None:
        known = draw.choice(self._base)
        self._ledger.check_tokens("base", list(self._generate(known).token_ids), known.token_ids)

    def _combination(self, draw: random.Random) -> None:
        chosen = draw.choice(self._combined)
        names = {versions[0].digest: name for name, versions in self._versions.items()}
        uses = [AdapterUse(names[digest], scale, digest) for digest, scale in chosen.scales.items()]
        found = self._client.generate(
            chosen.known.prompt,
            adapters=uses,
            combination="linear" if chosen.combination == "linear" else None,
            max_tokens=NUM_TOKENS,
            ignore_eos=True,
            timeout_s=TIMEOUT_S,
        ).result()
        self._ledger.check_tokens(f"combination of {len(uses)}", list(found.token_ids), chosen.known.token_ids)
        self._ledger.count("combinations")

    def _sampled(self, draw: random.Random) -> None:
        """A version's tokens by a seed are those of the first time, whatever happened meanwhile."""
        name = draw.choice(list(self._versions))
        known, seed = self._versions[name][0].known[0], draw.randrange(3)
        view = self._ledger.look(name)
        try:
            found = self._client.generate(
                known.sent,
                adapter=name,
                temperature=1.3,
                seed=seed,
                max_tokens=NUM_TOKENS,
                ignore_eos=True,
                timeout_s=TIMEOUT_S,
            ).result()
        except NotFound:
            self._ledger.check_missing(view)
            return
        digest = found.started.adapter_digest
        self._ledger.check_version(view, digest)
        with self._lock:
            first = self._first.setdefault((digest, known, seed), found.token_ids)
        self._ledger.check_tokens(f"{name}, sampled", list(found.token_ids), first)

    def _task(self, draw: random.Random) -> None:
        """Weights that came with a request, under a number: sent again where they are gone, or missed by the number."""
        task, version = draw.choice(self._tasks)
        known = draw.choice(version.known)
        is_bare = draw.random() < 0.3
        try:
            found = self._generate(known, task=task.task_id if is_bare else task)
        except NotFound as error:
            if not is_bare or error.reason != "LORA_TASK_NOT_CACHED":
                self._ledger.blame(f"task of {version.kind}: {error}")
            self._ledger.count("tasks missed")
            return
        if found.started.adapter_digest != version.digest:
            self._ledger.blame(f"task of {version.kind}: digest {found.started.adapter_digest[:12]}")
        self._ledger.check_tokens(f"task, {version.kind}", list(found.token_ids), known.token_ids)
        self._ledger.count("tasks")

    def _vector(self, draw: random.Random) -> None:
        """The embedding of a prompt is transformers', or that of the first time, up to rounding."""
        name = draw.choice(self._embeddable)
        known = self._versions[name][0].states
        prompt = draw.choice(list(known)) if known else tuple(make_prompt(draw.randrange(3), 12, vocab_size=250))
        view = self._ledger.look(name)
        try:
            found = self._client.embed(prompt, adapter=name, timeout_s=TIMEOUT_S)
        except NotFound:
            self._ledger.check_missing(view)
            return
        self._ledger.check_version(view, found.adapter_digest)
        values = found.embeddings[0].values
        version = self._by_digest.get(found.adapter_digest)
        due = None if version is None else version.states.get(prompt)
        with self._lock:
            first = self._vectors.setdefault((found.adapter_digest, prompt), values)
        self._ledger.check_values(f"{name}, embedding", values, due or first, VECTOR_TOLERANCE)
        self._ledger.count("vectors")

    def _classes(self, draw: random.Random) -> None:
        """The logits of a score head are transformers'."""
        name = draw.choice(self._classifiers)
        view = self._ledger.look(name)
        expected = self._by_digest.get(view.active) or self._versions[name][0]
        prompt = draw.choice(list(expected.classes))
        try:
            found = self._client.classify(prompt, adapter=name, timeout_s=TIMEOUT_S)
        except NotFound:
            self._ledger.check_missing(view)
            return
        self._ledger.check_version(view, found.adapter_digest)
        if found.adapter_digest == expected.digest:
            logits = found.classifications[0].logits
            self._ledger.check_values(f"{name}, classes", logits, expected.classes[prompt], VECTOR_TOLERANCE)
            self._ledger.count("classes")

    def _name(self, draw: random.Random) -> None:
        """The prompt is one of the version that is likely to be active; another version's tokens are not known."""
        name = draw.choice(list(self._versions))
        view = self._ledger.look(name)
        expected = self._by_digest.get(view.active) or self._versions[name][0]
        known = draw.choice(expected.known)
        num_cancelled = draw.randrange(1, NUM_TOKENS) if draw.random() < 0.1 else 0
        pinned = view.active if draw.random() < 0.2 else ""
        stream = self._client.generate(
            known.sent,
            adapter=name,
            adapter_digest=pinned,
            max_tokens=NUM_TOKENS,
            ignore_eos=True,
            timeout_s=TIMEOUT_S,
        )
        try:
            token_ids, digest = list[int](), ""
            for chunk in stream:
                token_ids += chunk.token_ids
                digest = chunk.adapter_digest
                if num_cancelled and len(token_ids) >= num_cancelled:
                    break
        except NotFound:
            self._ledger.check_missing(view)
            return
        finally:
            stream.close()
        if pinned and digest != pinned:
            self._ledger.blame(f"{name}: version {digest[:12]} where {pinned[:12]} is pinned")
        self._ledger.check_version(view, digest)
        if digest == expected.digest:
            due: Sequence[int] = known.token_ids
            if num_cancelled and len(token_ids) < NUM_TOKENS:
                due = due[: len(token_ids)]
            self._ledger.check_tokens(f"{name}, {expected.kind}", token_ids, tuple(due))
            self._ledger.count(f"streams of {expected.kind}")
        else:
            self._ledger.count("streams of a version that changed")
