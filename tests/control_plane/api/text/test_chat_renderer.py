"""Conversations are rendered in processes that end alone, whatever the template does."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest

from control_plane.api.text.chat_renderer import ChatRenderer, RenderLimits, RenderRefused
from control_plane.api.text.chat_template import MAX_RENDERED_CHARS, ChatTemplate
from control_plane.api.text.conversation import Conversation
from control_plane.errors import ShuttingDown, Unavailable
from tests.control_plane.api.text.test_chat_template import LLAMA_LIKE, MESSAGES

LOOP = "{% for i in range(90000) %}" * 3 + "{% endfor %}" * 3
# What the template does is what the conversation says.
OBEDIENT = (
    "{% set what = messages[0].content %}"
    "{% if what == 'loop' %}" + LOOP + "{% elif what == 'indent' %}{{ messages | tojson(indent=10**8) }}"
    "{% elif what == 'large' %}{{ 'x' * 10**7 }}{% elif what == 'number' %}{{ 9 ** (99999 * messages | length) }}"
    "{% elif what == 'attribute' %}{{ what | dictsort }}{% else %}{{ what }}!{% endif %}"
)
Make = Callable[..., ChatRenderer]


@pytest.fixture
async def make() -> AsyncIterator[Make]:
    made: list[ChatRenderer] = []

    def make(source: str = OBEDIENT, **limits: float) -> ChatRenderer:
        made.append(ChatRenderer(source, {"bos_token": "<s>"}, limits=RenderLimits(**limits)))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for renderer in made:
        await renderer.close()


def say(renderer: ChatRenderer, what: str) -> Awaitable[str]:
    return renderer.render(Conversation([{"role": "user", "content": what}]))


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0.01)


async def test_text_is_what_the_template_renders_in_this_process(make: Make) -> None:
    expected = ChatTemplate(LLAMA_LIKE, {"bos_token": "<s>"}).render(MESSAGES)
    renderer = make(LLAMA_LIKE)
    assert [await renderer.render(Conversation(MESSAGES)) for _ in range(3)] == [expected] * 3
    assert len(renderer.pids) == 1, "the child is kept"


async def test_moment_reaches_the_template(make: Make) -> None:
    renderer = make("{{ strftime_now('%s') }}")
    assert await renderer.render(Conversation(MESSAGES), 86400.0) == "86400"


async def test_template_that_loops_ends_alone_while_others_are_served(make: Make) -> None:
    renderer = make(cpu_limit_s=0.4)
    assert list(await asyncio.gather(say(renderer, "a"), say(renderer, "b"))) == ["a!", "b!"]
    assert len(renderer.pids) == 2
    looping = asyncio.ensure_future(say(renderer, "loop"))
    await asyncio.sleep(0)
    assert await say(renderer, "hello") == "hello!"
    assert not looping.done()
    with pytest.raises(RenderRefused, match=r"took more than 0\.4 s of CPU time for this conversation; send text or"):
        await looping
    assert await say(renderer, "again") == "again!"


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("indent", "takes too much memory for this conversation"),
        ("large", f"exceeds {MAX_RENDERED_CHARS} characters"),
        ("number", "fails on this conversation"),
        ("attribute", "fails on this conversation"),
    ],
)
async def test_template_that_takes_too_much_is_refused_and_its_process_goes_on(
    make: Make, what: str, message: str
) -> None:
    renderer = make(cpu_limit_s=30.0)
    await renderer.start()
    pids = renderer.pids
    with pytest.raises(RenderRefused, match=message):
        await say(renderer, what)
    assert await say(renderer, "hello") == "hello!" and renderer.pids == pids


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{% if %}", "it does not compile: TemplateSyntaxError"),
        ("{{ 9 ** 99999 }}", "it does not compile: ValueError"),
        ("{{ 9 ** (9 ** 9) }}", r"more than 0\.4 s of CPU time for being compiled"),
    ],
)
async def test_template_that_cannot_be_compiled_is_refused_at_the_start(make: Make, source: str, message: str) -> None:
    renderer = make(source, cpu_limit_s=0.4)
    with pytest.raises(RenderRefused, match=message):
        await renderer.start()
    await until(lambda: not renderer.pids)


async def test_process_that_was_killed_is_replaced(make: Make) -> None:
    renderer = make()
    await renderer.start()
    (pid,) = renderer.pids
    os.kill(pid, signal.SIGKILL)
    assert await say(renderer, "hello") == "hello!"
    assert renderer.pids != [pid]


async def test_conversation_whose_processes_are_killed_may_be_sent_again(make: Make) -> None:
    renderer = make(cpu_limit_s=600.0)
    looping = asyncio.ensure_future(say(renderer, "loop"))
    killed = 0
    while not looping.done():
        for pid in renderer.pids:
            os.kill(pid, signal.SIGKILL)
            killed = pid
            await until(lambda: killed not in renderer.pids)  # noqa: B023 - awaited here
        await asyncio.sleep(0.01)
    with pytest.raises(Unavailable, match=r"ended .*; try again"):
        await looping


async def test_process_that_neither_computes_nor_responds_is_ended(make: Make) -> None:
    renderer = make(wall_limit_s=4.0)
    await renderer.start()
    (pid,) = renderer.pids
    os.kill(pid, signal.SIGSTOP)
    with pytest.raises(RenderRefused, match="more than 4 s for this conversation"):
        await say(renderer, "hello")
    assert not Path(f"/proc/{pid}").exists()


async def test_caller_that_leaves_costs_no_process(make: Make) -> None:
    renderer = make()
    await renderer.start()
    pids = renderer.pids
    for _ in range(20):
        leaving = asyncio.ensure_future(say(renderer, "hello"))
        await asyncio.sleep(0)
        leaving.cancel()
        await asyncio.wait([leaving])
    assert await say(renderer, "last") == "last!"
    assert set(pids) <= set(renderer.pids) and len(renderer.pids) <= 2


async def test_close_ends_processes_that_compute(make: Make) -> None:
    renderer = make(cpu_limit_s=600.0)
    looping = [asyncio.ensure_future(say(renderer, "loop")) for _ in range(3)]  # one waits for a process
    await until(lambda: len(renderer.pids) == 2)
    pids = renderer.pids
    await asyncio.wait_for(renderer.close(), 30)
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
    await asyncio.wait(looping)
    assert all(call.cancelled() or isinstance(call.exception(), Unavailable) for call in looping)
    with pytest.raises(ShuttingDown, match="shutting down"):
        await say(renderer, "hello")
