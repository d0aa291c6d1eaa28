"""Weights that requests bring under a number generate PEFT's tokens: at once, later, evicted, and for other tenants."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest
from motet import AlreadyExists, Client, Generation, LoraTask, NotFound
from motet.trtllm.to_rows import peft_to_trtllm

from tests.e2e.harness import System, active_version
from tests.e2e.traffic import prompts
from tests.makers import make_adapter, make_checkpoint
from tests.oracle import Oracle

NUM_TOKENS = 12
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
# Two slots for up to four adapters at once.
WORKER_FLAGS = ["--dtype", "float32", "--block-size", "4", "--num-blocks", "512", "--token-budget", "64"]
WORKER_FLAGS += ["--max-model-len", "128", "--num-slots", "2"]
NAMES = ["one", "two", "three", "dora"]
TEXTS = prompts([5, 17, 33], vocab_size=256, seed=31)


@dataclass(frozen=True)
class Served:
    """A system whose cache has room for two tasks and a half."""

    client: Client
    directories: dict[str, Path]
    oracle: Oracle

    def generate(self, prompt: Sequence[int], task: LoraTask | int | None, *, tenant: str = "") -> Generation:
        with self.client.generate(
            list(prompt), lora_task=task, max_tokens=NUM_TOKENS, ignore_eos=True, temperature=0.0, tenant=tenant
        ) as stream:
            return stream.result()

    def check(self, task: LoraTask | int | None, name: str, *, tenant: str = "") -> None:
        """All prompts generate what PEFT does with the adapter of that name."""
        num_agreed = sum(
            self.oracle.num_agreed(prompt, self.generate(prompt, task, tenant=tenant).token_ids, name)
            for prompt in TEXTS
        )
        assert num_agreed >= 0.9 * NUM_TOKENS * len(TEXTS), "too few tokens that rounding cannot turn"


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    directory = tmp_path_factory.mktemp("tasks")
    checkpoint = make_checkpoint(directory / "base", arch="llama")
    directories = {
        name: make_adapter(
            directory / name, checkpoint, rank=8, alpha=12, targets=TARGETS, seed=40 + seed, use_dora=name == "dora"
        )
        for seed, name in enumerate(NAMES)
    }
    size_bytes = (directories["one"] / "adapter_model.safetensors").stat().st_size
    room = ["--task-cache-bytes", str(size_bytes * 5 // 2)]
    with System(checkpoint, directory / "system", control_flags=room) as system:
        system.start_worker(flags=WORKER_FLAGS)
        yield Served(system.client(), directories, Oracle(checkpoint, directories))


@pytest.mark.parametrize("name", ["one", "dora"])
def test_rows_of_tensorrt_llm_and_files_of_peft_are_one_adapter(served: Served, name: str, tmp_path: Path) -> None:
    """They generate PEFT's tokens beside base rows, and have the digest that registering gives."""
    peft_to_trtllm(served.directories[name], tmp_path / "rows", base_model=served.directories[name].parent / "base")
    rows = {path.name: path.read_bytes() for path in (tmp_path / "rows").iterdir() if path.name != "peft_tensors.json"}
    number = 100 + 2 * NAMES.index(name)
    tasks = [LoraTask(number, rows), LoraTask(number + 1, served.directories[name])]
    with ThreadPoolExecutor(3) as pool:
        list(pool.map(served.check, [*tasks, None], [name, name, ""]))
    registered = active_version(served.client.adapters.register(name, served.directories[name]))
    assert {task.digest for task in tasks} == {registered.digest}
    started = served.generate(TEXTS[0], number).started
    assert (started.adapter, started.lora_task_id) == (f"lora_tasks/{number}", number)
    assert started.adapter_digest == registered.digest
    served.client.adapters.delete(name)
    served.check(number, name)  # the task keeps the weights that the name has no more


def test_first_requests_at_once_with_one_number_and_the_same_weights_all_get_them(served: Served) -> None:
    tasks = [LoraTask(200, served.directories["one"]) for _ in range(8)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(served.check, tasks, ["one"] * len(tasks)))
    assert len({task.digest for task in tasks}) == 1


def test_first_requests_at_once_with_one_number_and_other_weights_get_their_own_or_a_refusal(served: Served) -> None:
    names = ["one", "two"] * 4
    tasks = [LoraTask(300, served.directories[name]) for name in names]

    def outcome(task: LoraTask, name: str) -> str:
        try:
            served.check(task, name)
        except AlreadyExists as error:
            assert error.reason == "LORA_TASK_TAKEN"
            return ""
        return name

    with ThreadPoolExecutor(8) as pool:
        outcomes = list(pool.map(outcome, tasks, names))
    assert len(set(outcomes) - {""}) == 1, "one of the two got the number"
    assert outcomes.count("") == 4, "and everyone who brought the other one was refused"


def test_a_task_that_made_room_is_missed_by_its_number_and_sent_again_by_the_sdk(served: Served) -> None:
    tasks = {name: LoraTask(400 + number, served.directories[name]) for number, name in enumerate(NAMES[:3])}
    for name, task in tasks.items():
        served.check(task, name)
    with pytest.raises(NotFound, match="LoRA task 400 is not cached; send the weights again") as missed:
        served.generate(TEXTS[0], 400)
    assert missed.value.reason == "LORA_TASK_NOT_CACHED"
    for _ in range(2):  # each makes room for the next one, and slots are used again
        for name, task in tasks.items():
            served.check(task, name)


def test_two_tenants_with_one_number_never_get_each_others_weights(served: Served) -> None:
    tasks = {tenant: LoraTask(500, served.directories[name]) for tenant, name in (("team-a", "one"), ("team-b", "two"))}
    with pytest.raises(NotFound):
        served.generate(TEXTS[0], 500, tenant="team-a")
    served.check(tasks["team-a"], "one", tenant="team-a")
    with pytest.raises(NotFound):
        served.generate(TEXTS[0], 500, tenant="team-b")
    served.check(tasks["team-b"], "two", tenant="team-b")
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda tenant, name: served.check(500, name, tenant=tenant), tasks, ["one", "two"]))
    with pytest.raises(NotFound):
        served.generate(TEXTS[0], 500)


def test_other_weights_under_a_cached_number_are_refused_and_the_first_ones_stay(served: Served) -> None:
    served.check(LoraTask(600, served.directories["one"]), "one")
    with pytest.raises(AlreadyExists, match="use another id"):
        served.generate(TEXTS[0], LoraTask(600, served.directories["two"]))
    served.check(600, "one")
