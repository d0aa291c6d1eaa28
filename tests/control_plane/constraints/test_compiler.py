"""The compiler: what it keeps, what the end of a child means, and whom a constraint delays."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from control_plane.constraints.compiler import MAX_WAITING, CompileLimits, ConstraintCompiler, ConstraintRefused
from control_plane.errors import QueueFull, ShuttingDown, Unavailable
from control_plane.framed_child.child import FramedChild
from control_plane.scheduler.types import Vocabulary

COSTLY = [f"{number:x}" * 40 for number in range(1024)]  # takes milliseconds


@pytest.fixture
async def compiler() -> AsyncIterator[ConstraintCompiler]:
    compiler = ConstraintCompiler()
    yield compiler
    await compiler.close()


async def test_a_constraint_is_compiled_once_for_a_vocabulary(
    compiler: ConstraintCompiler, vocabulary: Vocabulary
) -> None:
    first = await compiler.compile("choices", ["a", "b"], vocabulary)
    assert await compiler.compile("choices", ["a", "b"], vocabulary) is first
    assert (await compiler.compile("choices", ["a"], vocabulary)).digest != first.digest
    assert len(compiler.child_pids()) == 1


async def test_a_refusal_is_kept_with_its_reason(compiler: ConstraintCompiler, vocabulary: Vocabulary) -> None:
    for _ in range(2):
        with pytest.raises(ConstraintRefused, match="look-around"):
            await compiler.compile("regex", "(?=a)b", vocabulary)
    pids = compiler.child_pids()
    await compiler.compile("regex", "ab", vocabulary)
    assert compiler.child_pids() == pids


async def test_a_vocabulary_that_cannot_be_used_is_tried_once(
    compiler: ConstraintCompiler, vocabulary: Vocabulary, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[str] = []
    start = FramedChild.start

    async def noted(module: str) -> FramedChild:
        started.append(module)
        return await start(module)

    monkeypatch.setattr(FramedChild, "start", noted)
    unusable = replace(vocabulary, digest="other", num_tokens=8)
    requests = [compiler.compile("regex", f"{number}", unusable) for number in range(5)]
    refusals = await asyncio.gather(*requests, return_exceptions=True)
    with pytest.raises(ConstraintRefused, match="cannot be used with the tokenizer of this model"):
        await compiler.compile("regex", "a", unusable)
    assert {type(refusal) for refusal in refusals} == {ConstraintRefused}
    assert len(started) == 1 and compiler.child_pids() == []


async def test_a_constraint_that_takes_too_much_is_refused_and_not_tried_again(vocabulary: Vocabulary) -> None:
    compiler = ConstraintCompiler(CompileLimits(cpu_limit_s=0.001))
    try:
        with pytest.raises(ConstraintRefused, match="takes more than 1 ms"):
            await compiler.compile("choices", COSTLY, vocabulary)
        assert compiler.child_pids() == []
        with pytest.raises(ConstraintRefused, match="takes more than 1 ms"):
            await compiler.compile("choices", COSTLY, vocabulary)
        assert compiler.child_pids() == [], "a child was started for a constraint whose refusal is kept"
    finally:
        await compiler.close()


async def test_a_child_that_dies_of_another_cause_costs_no_constraint_its_name(
    compiler: ConstraintCompiler, vocabulary: Vocabulary
) -> None:
    await compiler.compile("choices", ["a"], vocabulary)
    (pid,) = compiler.child_pids()
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(Unavailable, match="try again"):
        await compiler.compile("choices", ["b"], vocabulary)
    assert "b" in (await compiler.compile("choices", ["b"], vocabulary)).grammar
    assert compiler.child_pids() != [pid]


async def test_a_child_that_does_not_respond_is_replaced(vocabulary: Vocabulary) -> None:
    compiler = ConstraintCompiler(CompileLimits(wall_limit_s=0.2))
    try:
        await compiler.compile("choices", ["a"], vocabulary)
        (pid,) = compiler.child_pids()
        os.kill(pid, signal.SIGSTOP)
        with pytest.raises(Unavailable):
            await compiler.compile("choices", ["b"], vocabulary)
        assert pid not in compiler.child_pids()
    finally:
        await compiler.close()


async def test_tenants_take_turns_and_what_is_kept_waits_for_nobody(
    compiler: ConstraintCompiler, vocabulary: Vocabulary
) -> None:
    kept = await compiler.compile("choices", ["kept"], vocabulary)
    (pid,) = compiler.child_pids()
    os.kill(pid, signal.SIGSTOP)  # whoever holds the turn now keeps it
    done: list[str] = []

    async def ask(tenant: str, text: str) -> None:
        await compiler.compile("choices", [text], vocabulary, tenant)
        done.append(tenant)

    greedy = [asyncio.create_task(ask("greedy", f"g{number}")) for number in range(MAX_WAITING + 1)]
    await asyncio.sleep(0)
    with pytest.raises(QueueFull):
        await ask("greedy", "one too many")
    modest = asyncio.create_task(ask("modest", "m"))
    await asyncio.sleep(0)
    assert await compiler.compile("choices", ["kept"], vocabulary, "third") is kept
    assert not done
    os.kill(pid, signal.SIGCONT)
    await asyncio.gather(*greedy, modest)
    assert done.index("modest") <= 2


async def test_a_closed_compiler_says_that_the_server_shuts_down(
    compiler: ConstraintCompiler, vocabulary: Vocabulary
) -> None:
    """DRAINING: the SDK goes on to the next server, for nothing of the request was begun."""
    await compiler.close()
    with pytest.raises(ShuttingDown, match="shutting down") as caught:
        await compiler.compile("choices", ["a", "b"], vocabulary)
    assert caught.value.reason == "DRAINING"
    assert compiler.child_pids() == []
