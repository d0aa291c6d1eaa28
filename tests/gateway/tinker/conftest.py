"""A system with a real worker and two adapters, a gateway before it, and the Tinker SDK as its client."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import tinker
from motet import Client
from tinker import types

from tests.e2e.harness import System
from tests.e2e.traffic import prompts
from tests.gateway.gateway_process import Gateway
from tests.makers import make_adapter, make_checkpoint, make_tokenizer
from tests.oracle import Oracle

PROMPT = list(prompts([9], vocab_size=256, seed=3)[0])
NUM_TOKENS = 8
STEPS = ("legal", "medical", "newer")
WORKER_FLAGS = ["--dtype", "float32", "--block-size", "4", "--num-blocks", "64", "--max-rows", "8"]
WORKER_FLAGS += ["--max-model-len", "64", "--num-slots", "4", "--arena-bytes", "64MiB"]
WAIT_S = 120.0


@dataclass(frozen=True)
class Served:
    """Adapters `legal` and `medical` are registered; `newer` is a directory, in the oracle, too."""

    system: System
    client: Client
    gateway: Gateway
    service: tinker.ServiceClient
    oracle: Oracle
    directories: dict[str, Path]

    def sampler(self, path: str) -> tinker.SamplingClient:
        """A sampling client of a model path."""
        return self.service.create_sampling_client(model_path=path).result(WAIT_S)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The SDK 0.38 leaves connections open: the one on which it reads its configuration, and those that broke."""
    for item in items:
        if item.path.parent == Path(__file__).parent:
            item.add_marker(pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning"))


@pytest.fixture(autouse=True)
def collected() -> Iterator[None]:
    """What the SDK left open is collected here, where the warning is expected, and not in another module's test."""
    yield
    gc.collect()


def model_input(tokens: list[int]) -> types.ModelInput:
    return types.ModelInput.from_ints(tokens)


def params(**more: object) -> types.SamplingParams:
    """Greedy, NUM_TOKENS tokens, and nothing ends them but where `more` says so."""
    given: dict[str, object] = {"max_tokens": NUM_TOKENS, "temperature": 0.0, "stop": [], **more}
    return types.SamplingParams(**given)  # type: ignore[arg-type]  # the SDK checks them


def tokens_of(sampler: tinker.SamplingClient, tokens: list[int] = PROMPT, **more: object) -> list[int]:
    """A greedy sample."""
    [sequence] = sampler.sample(model_input(tokens), 1, params(**more)).result(WAIT_S).sequences
    return list(sequence.tokens)


@pytest.fixture(scope="session")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    directory = tmp_path_factory.mktemp("tinker")
    checkpoint = make_tokenizer(make_checkpoint(directory / "model", arch="llama"))
    directories = {
        name: make_adapter(directory / name, checkpoint, rank=4, targets=["q_proj", "down_proj"], seed=seed)
        for seed, name in enumerate(STEPS)
    }
    with System(checkpoint, directory) as system:
        system.start_worker(flags=WORKER_FLAGS)
        client = system.client()
        for name in STEPS[:2]:
            client.adapters.register(name, directories[name])
        flags = ["--server-absence-s", "2", "--base-model-name", "test/tiny"]
        with Gateway(system.address, directory, flags) as gateway:
            service = tinker.ServiceClient(base_url=gateway.url, api_key="tml-no-key-is-needed")
            yield Served(system, client, gateway, service, Oracle(checkpoint, directories), directories)
            service.close("success").result(WAIT_S)
