"""A system with a real worker and two adapters, a gateway before it, and the `openai` package as its client."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import openai
import pytest
from motet import Client

from tests.e2e.harness import System
from tests.gateway.gateway_process import Gateway
from tests.makers import make_adapter, make_checkpoint, make_tokenizer
from tests.oracle import Oracle

PROMPT = "The contract"
NUM_TOKENS = 8
NAMES = ("legal", "medical")
WORKER_FLAGS = ["--dtype", "float32", "--block-size", "4", "--num-blocks", "64", "--max-rows", "8"]
WORKER_FLAGS += ["--max-model-len", "128", "--num-slots", "4", "--arena-bytes", "64MiB"]
WAIT_S = 120.0


@dataclass(frozen=True)
class Served:
    """Adapters `legal` and `medical` are registered. The base model is called `test/tiny` and `model`."""

    system: System
    client: Client
    gateway: Gateway
    api: openai.OpenAI
    oracle: Oracle


@pytest.fixture(scope="session")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    directory = tmp_path_factory.mktemp("openai")
    checkpoint = make_tokenizer(make_checkpoint(directory / "model", arch="llama"))
    directories = {
        name: make_adapter(directory / name, checkpoint, rank=4, targets=["q_proj", "down_proj"], seed=seed)
        for seed, name in enumerate(NAMES)
    }
    with System(checkpoint, directory) as system:
        system.start_worker(flags=WORKER_FLAGS)
        client = system.client()
        for name in NAMES:
            client.adapters.register(name, directories[name])
        flags = ["--server-absence-s", "2", "--base-model-name", "test/tiny"]
        with Gateway(system.address, directory, flags) as gateway:
            url = f"{gateway.url}/v1"
            with openai.OpenAI(base_url=url, api_key="no-key-is-needed", max_retries=0, timeout=WAIT_S) as api:
                yield Served(system, client, gateway, api, Oracle(checkpoint, directories))
