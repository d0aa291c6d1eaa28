"""Every thread of a worker has a name: profilers and stack dumps show what it does."""

from __future__ import annotations

import ast
import re
import threading
from collections.abc import Iterator
from pathlib import Path

from tests.fakes.fleet_rig import GrpcRig, make_request, read_all

ROOT = Path(__file__).parents[3]
# Threads that gRPC starts by itself; Python adds the function to names that it makes up.
OF_GRPC = re.compile(r"Thread-\d+ \((channel_spin|consume_request_iterator|poll_connectivity|_poll_wrapper|_run)\)")
MADE_UP = re.compile(r"Thread-\d+|ThreadPoolExecutor-")


async def test_all_threads_of_a_worker_that_serves_have_names() -> None:
    before = set(threading.enumerate())
    async with GrpcRig() as rig:
        await rig.add_worker("w0")
        digest = rig.weights.add("a")
        await read_all(rig.fleet.submit(make_request(rig.fleet, [1, 2, 3], 4, digest)))
        names = {thread.name for thread in threading.enumerate() if thread not in before}
        assert {"worker-w0", "plan-reader", "plan-watch", "adapter-load_0"} <= names
        assert not {name for name in names if MADE_UP.match(name) and not OF_GRPC.fullmatch(name)}


def thread_calls() -> Iterator[tuple[str, ast.Call]]:
    """Where the worker's code makes threads."""
    for folder in ("data_plane", "kernels", "contract"):
        for path in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Call):
                    name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
                    if name in ("Thread", "ThreadPoolExecutor"):  # a Timer is named after it is made
                        yield f"{path.relative_to(ROOT)}:{node.lineno}", node


def test_every_thread_that_the_worker_s_code_makes_is_given_a_name() -> None:
    calls = list(thread_calls())
    assert len(calls) >= 7
    unnamed = [
        place for place, call in calls if not {"name", "thread_name_prefix"} & {key.arg for key in call.keywords}
    ]
    assert not unnamed
