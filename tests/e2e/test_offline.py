"""`LLM` as its users run it: a checkpoint and adapters in, results out, nothing left behind."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from motet import LLM, Cancelled, FinishReason, InvalidArgument, SamplingParams, TextPrompt, TokensPrompt, Unavailable

from tests.e2e.harness import ROOT, wait_until
from tests.e2e.test_scheduled_pooling import classes_of
from tests.e2e.traffic import prompts
from tests.makers import make_adapter, make_checkpoint, make_classifier, make_tokenizer
from tests.oracle import Oracle

PROMPTS = prompts([3, 9, 17, 30], vocab_size=256, seed=11)
SMALL: dict[str, Any] = {
    "device": "cpu",
    "threads": 1,
    "dtype": "float32",
    "num_blocks": 128,
    "max_rows": 8,
    "arena_bytes": "64MiB",
}

# PEFT says that it does not know id2label, which it leaves alone.
pytestmark = pytest.mark.filterwarnings("ignore:Unexpected keyword arguments:UserWarning")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Path]]:
    directory = tmp_path_factory.mktemp("offline")
    checkpoint = make_tokenizer(make_checkpoint(directory / "model"))
    adapters = {
        "one": make_adapter(directory / "one", checkpoint, rank=4, seed=1),
        "two": make_adapter(directory / "two", checkpoint, rank=9, seed=2),
        "mood": make_classifier(directory / "mood", checkpoint, target_modules=["q_proj"], seed=3),
    }
    return checkpoint, adapters


@pytest.fixture(scope="module")
def llm(made: tuple[Path, dict[str, Path]]) -> Iterator[LLM]:
    checkpoint, adapters = made
    with LLM(checkpoint, adapters=adapters, use_tqdm=False, **SMALL) as llm:
        yield llm


@pytest.fixture(scope="module")
def oracle(made: tuple[Path, dict[str, Path]]) -> Oracle:
    checkpoint, adapters = made
    return Oracle(checkpoint, {name: adapters[name] for name in ("one", "two")})


def test_every_prompt_has_the_completion_of_its_own_adapter(llm: LLM, oracle: Oracle) -> None:
    names = [None, "one", "two"]
    given = [list(prompt) for prompt in PROMPTS for _ in names]
    outputs = llm.generate(
        given, SamplingParams(max_tokens=12, ignore_eos=True), adapter=names * len(PROMPTS), use_tqdm=False
    )
    assert [output.prompt for output in outputs] == given
    assert [output.adapter for output in outputs] == names * len(PROMPTS)
    num_agreed = 0
    for output, prompt in zip(outputs, given, strict=True):
        [completion] = output.outputs
        assert completion.finish_reason is FinishReason.LENGTH
        assert isinstance(output.adapter, str | None)
        num_agreed += oracle.num_agreed(prompt, completion.token_ids, output.adapter)
    assert num_agreed >= 0.9 * 12 * len(outputs)


def test_prompts_have_parameters_of_their_own_and_the_bar_shows_tokens(
    llm: LLM, capfd: pytest.CaptureFixture[str]
) -> None:
    sampling = [SamplingParams(max_tokens=1 + index, n=1 + index % 2, ignore_eos=True) for index in range(40)]
    outputs = llm.generate([f"prompt {index}" for index in range(40)], sampling, adapter={"one": 0.5, "two": 0.5})
    assert [len(output.outputs) for output in outputs] == [1, 2] * 20
    assert [len(output.outputs[0].token_ids) for output in outputs] == list(range(1, 41))
    said = capfd.readouterr().err
    assert "40/40" in said
    assert "out tokens/s" in said


def test_chat_renders_the_template_as_the_server_does(llm: LLM) -> None:
    turns = [{"role": "user", "content": "hello"}]
    sampling = SamplingParams(max_tokens=6, ignore_eos=True)
    [alone] = llm.chat(turns, sampling, adapter="one", use_tqdm=False)
    [text] = llm.generate("user: hello\nassistant: ", sampling, adapter="one", use_tqdm=False)
    assert alone.outputs[0].token_ids == text.outputs[0].token_ids
    assert len(llm.chat([turns, turns], sampling, use_tqdm=False)) == 2


def test_embeddings_and_classes(llm: LLM, oracle: Oracle, made: tuple[Path, dict[str, Path]]) -> None:
    checkpoint, adapters = made
    embeddings = llm.encode([list(prompt) for prompt in PROMPTS], adapter=[None, "one", "two", None], use_tqdm=False)
    for embedding, prompt, name in zip(embeddings, PROMPTS, [None, "one", "two", None], strict=True):
        expected = torch.nn.functional.normalize(oracle.hidden(prompt, name)[-1].float(), dim=0)
        torch.testing.assert_close(torch.tensor(embedding.values), expected, rtol=1e-4, atol=1e-4)
    classes = llm.classify([list(prompt) for prompt in PROMPTS], adapter="mood", use_tqdm=False)
    for output, prompt in zip(classes, PROMPTS, strict=True):
        expected = classes_of(checkpoint, adapters["mood"], prompt, 3)
        torch.testing.assert_close(torch.tensor(output.outputs.logits), expected, rtol=1e-4, atol=1e-4)
        assert sum(output.outputs.probs) == pytest.approx(1.0) and output.outputs.num_classes == 3
        assert (output.prompt, output.adapter, output.num_prompt_tokens) == (list(prompt), "mood", len(prompt))
    with pytest.raises(InvalidArgument, match="adapter: names several"):
        llm.encode("a", adapter={"one": 1.0}, use_tqdm=False)  # type: ignore[arg-type]  # on purpose


def test_embed_has_the_vectors_of_encode_in_the_shape_of_vllm(llm: LLM) -> None:
    """For text, token ids and the dictionaries of both."""
    token_ids = llm.client.model.tokenize("hello").token_ids
    given: list[Any] = ["hello", token_ids, TextPrompt(prompt="hello"), TokensPrompt(prompt_token_ids=token_ids)]
    [expected] = llm.encode("hello", adapter="one", use_tqdm=False)
    outputs = llm.embed(given, adapter="one", use_tqdm=False)
    assert {output.outputs.embedding for output in outputs} == {expected.values}
    assert [output.prompt for output in outputs] == ["hello", token_ids, "hello", token_ids]
    assert {(output.num_prompt_tokens, output.outputs.hidden_size) for output in outputs} == {
        (expected.prompt_tokens, len(expected.values))
    }
    [short] = llm.embed("hello", dimensions=4, use_tqdm=False)
    assert short.outputs.hidden_size == 4 and short.adapter is None


def test_token_ids_in_a_dictionary_give_the_tokens_of_the_text(llm: LLM) -> None:
    sampling = SamplingParams(max_tokens=6, ignore_eos=True)
    token_ids = llm.client.model.tokenize("hello").token_ids
    given: list[Any] = ["hello", TokensPrompt(prompt_token_ids=token_ids), {"prompt": "hello"}]
    outputs = llm.generate(given, sampling, adapter="two", use_tqdm=False)
    assert len({output.outputs[0].token_ids for output in outputs}) == 1
    with pytest.raises(InvalidArgument, match="'multi_modal_data'"):
        llm.generate({"prompt": "hello", "multi_modal_data": {}}, use_tqdm=False)  # type: ignore[arg-type]  # on purpose


def test_a_result_has_what_the_server_reports_of_its_prompt(llm: LLM) -> None:
    prompt, sampling = [7] * 24, SamplingParams(max_tokens=2, ignore_eos=True)
    llm.generate([prompt], sampling, use_tqdm=False)
    again, scored = llm.generate([prompt, prompt], [sampling, {**sampling, "prompt_logprobs": 0}], use_tqdm=False)
    assert again.num_cached_tokens is not None and 0 < again.num_cached_tokens < len(prompt)
    assert again.prompt_logprobs == () and len(scored.prompt_logprobs) == len(prompt) - 1


def test_one_prompt_that_cannot_be_served_does_not_lose_the_others(llm: LLM) -> None:
    given: list[str | list[int]] = ["hello", [5] * 100_000, "again"]
    outputs = llm.generate(given, SamplingParams(max_tokens=2), use_tqdm=False, return_errors=True)
    assert [len(output.outputs) for output in outputs] == [1, 0, 1]
    assert [output.finished for output in outputs] == [True, False, True]
    assert len({output.request_id for output in outputs}) == 3 and not outputs[1].request_id
    assert isinstance(outputs[1].error, InvalidArgument) and outputs[1].num_cached_tokens is None
    with pytest.raises(InvalidArgument, match="shorten the prompt") as raised:
        llm.generate(given, use_tqdm=False)
    assert raised.value.__notes__ == ["this was input 1 of 3; the others were cancelled"]
    wait_until(lambda: llm.client.status().queues.num_running == 0, "the cancelled requests end")


def test_it_works_where_an_event_loop_runs_and_with_no_prompts(llm: LLM) -> None:
    async def in_a_notebook() -> int:
        return len(llm.generate(["a", "b"], SamplingParams(max_tokens=1), use_tqdm=False))

    assert asyncio.run(in_a_notebook()) == 2
    assert llm.generate([]) == []


def test_an_adapter_added_later_is_used(llm: LLM, made: tuple[Path, dict[str, Path]], tmp_path: Path) -> None:
    late = make_adapter(tmp_path / "late", made[0], rank=3, seed=9)
    llm.client.adapters.register("late", late)
    prompt = list(PROMPTS[2])
    [output] = llm.generate([prompt], SamplingParams(max_tokens=8, ignore_eos=True), adapter="late", use_tqdm=False)
    assert Oracle(made[0], {"late": late}).num_agreed(prompt, output.outputs[0].token_ids, "late") >= 7


def test_a_wrong_setting_or_model_is_said_in_the_error(made: tuple[Path, dict[str, Path]]) -> None:
    with pytest.raises(InvalidArgument, match="unrecognized arguments: --bogus"):
        LLM(made[0], bogus=1)
    with pytest.raises(InvalidArgument, match="is an adapter; give its base model"):
        LLM(made[1]["one"])
    with pytest.raises(InvalidArgument, match="max_in_flight: is 0"):
        LLM(made[0], max_in_flight=0)


def processes_below(parent: psutil.Process) -> list[psutil.Process]:
    return parent.children(recursive=True)


def test_close_ends_every_process_and_removes_the_directory(made: tuple[Path, dict[str, Path]], tmp_path: Path) -> None:
    before = {process.pid for process in processes_below(psutil.Process())}
    llm = LLM(made[0], work_dir=tmp_path, use_tqdm=False, **SMALL)
    started = [process for process in processes_below(psutil.Process()) if process.pid not in before]
    assert len(started) >= 3, "the command, the control plane and the worker"
    [directory] = tmp_path.iterdir()
    assert directory.stat().st_mode & 0o077 == 0
    llm.close()
    llm.close()
    assert list(tmp_path.iterdir()) == []
    assert not [process for process in started if process.is_running() and process.status() != psutil.STATUS_ZOMBIE]
    with pytest.raises(Cancelled):
        llm.generate("a")
    with pytest.raises(Cancelled):
        _ = llm.client


def test_the_end_of_the_server_is_an_error_with_its_log(made: tuple[Path, dict[str, Path]]) -> None:
    before = {process.pid for process in processes_below(psutil.Process())}
    with LLM(made[0], use_tqdm=False, **SMALL) as llm:
        [control_plane] = [
            process
            for process in processes_below(psutil.Process())
            if process.pid not in before and "control_plane" in process.cmdline()
        ]
        control_plane.kill()
        with pytest.raises(Unavailable, match=r"the server ended .*\n(.*\n)*.*the control plane ended with SIGKILL"):
            llm.generate(["a"] * 20, SamplingParams(max_tokens=400, ignore_eos=True), use_tqdm=False)


PROGRAM = """
import os, sys
from motet import LLM
llm = LLM(sys.argv[1], work_dir=sys.argv[2], use_tqdm=False, device="cpu", threads=1, num_blocks=64)
print("started", flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("how", ["kill", "end"])
def test_the_server_stops_with_the_program_that_has_it(
    how: str, made: tuple[Path, dict[str, Path]], tmp_path: Path
) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "client")])}
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(made[0]), str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    ) as program:
        assert program.stdin is not None and program.stdout is not None
        assert program.stdout.readline() == "started\n"
        children = processes_below(psutil.Process(program.pid))
        assert len(children) >= 3
        if how == "kill":
            program.send_signal(signal.SIGKILL)
        else:
            program.stdin.close()
    _, alive = psutil.wait_procs(children, timeout=60)
    assert not alive
    assert how == "kill" or list(tmp_path.iterdir()) == []


FORKING = """
import atexit, os, sys
from motet import LLM, FailedPrecondition
with LLM(sys.argv[1], work_dir=sys.argv[2], use_tqdm=False, device="cpu", threads=1, num_blocks=64) as llm:
    child = os.fork()
    if child == 0:
        try:
            llm.generate("a", use_tqdm=False)
        except FailedPrecondition as error:
            print(error.message, flush=True)
        llm.close()
        atexit._run_exitfuncs()
        os._exit(0)
    os.waitpid(child, 0)
    print(os.listdir(sys.argv[2]) != [], len(llm.generate("a", {"max_tokens": 3}, use_tqdm=False)), flush=True)
"""


def test_a_fork_is_refused_and_leaves_the_server_alone(made: tuple[Path, dict[str, Path]], tmp_path: Path) -> None:
    """It has no thread to run its requests, which waited for ever, and its end removed the server's directory."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "client")])}
    command = [sys.executable, "-c", FORKING, str(made[0]), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=240, check=True)
    said, left = done.stdout.splitlines()
    assert "of which this one is a fork; make another LLM here" in said
    assert left == "True 1" and list(tmp_path.iterdir()) == []
