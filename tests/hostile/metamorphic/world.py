"""The system that relations are compared on: real workers, adapters that are related to each other, an SDK client.

The cache is too small for all requests at once, the two workers compute prompts in parts of different sizes, and
their arenas hold fewer adapters than there are: so requests are preempted, swapped, moved and served by both.
"""

from __future__ import annotations

import json
import random
import shutil
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import grpc
import numpy as np
from motet import Client, Generation
from motet.v1 import generation_pb2, generation_pb2_grpc, types_pb2
from safetensors.numpy import load_file, save_file
from tokenizers import Tokenizer

from tests.e2e.harness import System, active_version, wait_until
from tests.makers import make_adapter, make_checkpoint, make_prompt, make_tokenizer

VOCAB_SIZE = 256
NUM_TOKENS = 16
TARGETS = ["q_proj", "v_proj", "o_proj", "gate_proj", "down_proj"]
ADAPTERS = ["", "one", "two", "three"]  # "" is the base model
WORKER_FLAGS = ["--dtype", "float32", "--block-size", "4", "--num-blocks", "120", "--max-rows", "12"]
WORKER_FLAGS += ["--max-model-len", "128", "--arena-bytes", "64MiB", "--num-slots", "3", "--host-kv-bytes", "4MiB"]
TOKEN_BUDGETS = {"w0": 7, "w1": 40}  # tokens of a step: how prompts are cut into parts
CONTROL_FLAGS = ["--swap-us-per-block", "0.1"]
TIMEOUT_S = 120.0


@dataclass(frozen=True)
class Request:
    """One request; `options` are keyword arguments of generate()."""

    prompt: Any  # token ids, text or messages
    options: dict[str, Any] = field(default_factory=dict)

    def but(self, **options: Any) -> Request:
        """The same with some options replaced."""
        return replace(self, options={**self.options, **options})


class World:
    """The running system. A context manager."""

    def __init__(self, work_dir: Path, *, seed: int) -> None:
        self.work_dir = work_dir
        self.draw = random.Random(seed)
        self.model_dir = make_tokenizer(make_checkpoint(work_dir / "model", arch="llama"))
        self.adapter_dirs: dict[str, Path] = {}
        self.tokenizer = Tokenizer.from_file(str(self.model_dir / "tokenizer.json"))
        self.client: Client
        self.system: System
        self._stub: Any
        self._num_salts = 0
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            self.system = stack.enter_context(System(self.model_dir, self.work_dir, control_flags=CONTROL_FLAGS))
            for worker_id, budget in TOKEN_BUDGETS.items():
                self.system.start_worker(worker_id, [*WORKER_FLAGS, "--token-budget", str(budget)], wait=False)
            self.client = self.system.client()
            channel = stack.enter_context(grpc.insecure_channel(self.system.address))
            self._stub = generation_pb2_grpc.GenerationServiceStub(channel)
            self._make_adapters()
            wait_until(self._is_whole, "both workers are attached", TIMEOUT_S)
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stack.__exit__(kind, value, traceback)

    def _is_whole(self) -> bool:
        return len(self.client.status().workers) == len(TOKEN_BUDGETS)

    # ---- adapters ----

    def _make_adapters(self) -> None:
        """Register adapters and, by other names, what must generate alike."""
        base = self.work_dir / "adapters"
        for index, (name, rank) in enumerate([("one", 8), ("two", 3), ("three", 17)], start=1):
            made = make_adapter(base / name, self.model_dir, rank=rank, alpha=2 * rank, targets=TARGETS, seed=index)
            self.add(name, made)
        self.add("one-again", self.adapter_dirs["one"])
        self.add("zero", self._changed("one", "zero", lambda name, w: w * 0 if ".lora_B." in name else w))
        self.add("padded", self._changed("one", "padded", _padded, r=24, lora_alpha=48))
        halved = self._changed("one", "halved", lambda name, w: w / 2 if ".lora_B." in name else w, lora_alpha=32)
        self.add("halved", halved)
        permuted = self._changed("one", "permuted", _permuted)
        self.add("permuted", permuted)

    def add(self, name: str, directory: Path) -> str:
        """Register an adapter; its digest."""
        self.adapter_dirs[name] = directory
        return str(active_version(self.client.adapters.register(name, directory)).digest)

    def _changed(self, source: str, name: str, change: Callable[[str, Any], Any], **config: Any) -> Path:
        """A copy of an adapter whose weights are changed."""
        directory = self.work_dir / "adapters" / name
        shutil.copytree(self.adapter_dirs[source], directory)
        weights = load_file(directory / "adapter_model.safetensors")
        changed = {key: np.ascontiguousarray(change(key, values)) for key, values in weights.items()}
        save_file(changed, directory / "adapter_model.safetensors", metadata={"format": "pt"})
        path = directory / "adapter_config.json"
        path.write_text(json.dumps({**json.loads(path.read_text("utf-8")), **config}), encoding="utf-8")
        return directory

    # ---- requests ----

    def salt(self) -> str:
        """A cache partition that nobody used: a request with it is computed from its first token."""
        self._num_salts += 1
        return f"salt-{self._num_salts}"

    def salted(self, requests: Sequence[Request]) -> list[Request]:
        """The same requests, each in a cache partition of its own."""
        return [request.but(cache_salt=self.salt()) for request in requests]

    def greedy(self, *, num_prompt: int | None = None, adapter: str | None = None) -> Request:
        """A request that computes everything itself, and takes the most likely tokens."""
        length = self.draw.choice((1, 3, 9, 22, 45)) if num_prompt is None else num_prompt
        prompt = make_prompt(self.draw.randrange(1 << 30), length)
        name = self.draw.choice(ADAPTERS) if adapter is None else adapter
        options = {"adapter": name, "max_tokens": NUM_TOKENS, "ignore_eos": True, "cache_salt": self.salt()}
        return Request(prompt, options)

    def sampled(self, **changes: Any) -> Request:
        """The same, drawn by a seed, with filters now and then."""
        filters: dict[str, Any] = {
            "temperature": self.draw.choice((0.3, 0.8, 1.5)),
            "seed": self.draw.randrange(1 << 62),
        }
        for name, values in (("top_k", (5, 40)), ("top_p", (0.5, 0.95)), ("min_p", (0.01, 0.1))):
            if self.draw.random() < 0.4:
                filters[name] = self.draw.choice(values)
        return self.greedy().but(**filters).but(**changes)

    def any(self) -> Request:
        """Either."""
        return self.greedy() if self.draw.random() < 0.5 else self.sampled()

    def get(self, request: Request) -> Generation:
        """The whole completion."""
        return self.client.generate(request.prompt, timeout_s=TIMEOUT_S, **request.options).result()

    def get_all(self, requests: Sequence[Request], *, num_at_once: int = 24) -> list[Generation]:
        """All at once, in the order of the requests."""
        with ThreadPoolExecutor(num_at_once) as pool:
            return list(pool.map(self.get, requests))

    def get_cold(self, requests: Sequence[Request]) -> list[Generation]:
        """One after the other, each alone and from its first token."""
        return [self.get(request) for request in self.salted(requests)]

    def resumed(self, request: Request, whole: Generation, offset: int) -> list[int]:
        """The tokens of a stream that is continued behind `offset` tokens."""
        options = dict(request.options)
        message = generation_pb2.GenerateRequest(
            adapter=options["adapter"],
            adapter_digest=whole.started.adapter_digest,
            token_ids=types_pb2.TokenIds(ids=request.prompt),
            sampling=types_pb2.SamplingParams(
                **{name: options[name] for name in ("temperature", "top_k", "top_p", "min_p") if name in options},
                seed=whole.started.seed,
            ),
            stopping=types_pb2.StoppingParams(max_tokens=options["max_tokens"], ignore_eos=True),
            cache_salt=self.salt(),
            resume_from=types_pb2.TokenIds(ids=whole.token_ids[:offset]),
        )
        responses = self._stub.Generate(message, timeout=TIMEOUT_S)
        return [token for response in responses for token in response.delta.token_ids]

    @contextmanager
    def stopped_worker(self, worker_id: str, seconds: float) -> Iterator[None]:
        """Stop one worker for a while, so that its requests move to the other one."""
        worker = self.system.workers[worker_id]
        worker.send(signal.SIGSTOP)
        timer = threading.Timer(seconds, worker.send, [signal.SIGCONT])
        timer.start()
        try:
            yield
        finally:
            timer.join()
            wait_until(self._is_whole, "the worker is back", TIMEOUT_S)

    def num_preemptions(self) -> int:
        """Of both workers since they attached, a count."""
        return sum(worker.num_preemptions for worker in self.client.status().workers)

    def text_of(self, token_ids: Sequence[int]) -> str:
        return str(self.tokenizer.decode(list(token_ids), skip_special_tokens=True))


def _padded(name: str, values: Any) -> Any:
    """Ranks 8 to 24 of nothing."""
    size = (16, values.shape[1]) if ".lora_A." in name else (values.shape[0], 16)
    return np.concatenate([values, np.zeros(size, values.dtype)], axis=0 if ".lora_A." in name else 1)


def _permuted(name: str, values: Any) -> Any:
    """The ranks in another order."""
    return values[::-1] if ".lora_A." in name else values[:, ::-1]
