"""The server of one LLM: `motet up` on free ports of 127.0.0.1, with one key and a directory of its own."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypeAlias

from motet.cli import server_parts
from motet.command_line import WRONG_COMMAND_LINE
from motet.errors import InvalidArgument, MotetError, Unavailable, invalid_field

Setting: TypeAlias = str | int | float | bool | os.PathLike[str] | Sequence[str] | None

_READY = re.compile(r"motet ready: clients at (\S+),")
_NUM_LAST_LINES = 20
_STOP_S = 20.0
_DRAIN_S = 5.0  # nothing runs when an LLM is closed, unless its program ends within a call
# Arguments of vLLM's LLM that are not flags here, and what to do instead.
_BY_BYTES = "leave it out: adapters have no maximum rank, and arena_bytes bounds their memory"
OF_VLLM = {
    "enable_lora": "leave it out: adapters=... is all it takes",
    "max_loras": "use num_slots, if more than 256 adapters are to be loaded at once",
    "max_cpu_loras": _BY_BYTES,
    "max_lora_rank": _BY_BYTES,
    "gpu_memory_utilization": "use memory_utilization",
    "kv_cache_memory_bytes": "use kv_bytes",
    "swap_space": "use host_kv_bytes",
    "max_num_seqs": "use max_rows",
    "max_num_batched_tokens": "use max_step_tokens",
    "enable_prefix_caching": "leave it out: prefixes are always cached",
    "enable_chunked_prefill": "leave it out: long prompts are always cut",
    "enforce_eager": "leave it out, or use cuda_graphs",
    "tokenizer": "leave it out: the tokenizer is the checkpoint's",
    "trust_remote_code": "leave it out: code of a checkpoint is never run",
    "tensor_parallel_size": "leave it out: a model runs on one device",
    "pipeline_parallel_size": "leave it out: a model runs on one device",
    "data_parallel_size": "leave it out: start further workers with `motet worker`",
    "seed": "give a seed in SamplingParams",
    "speculative_config": 'use speculative="auto"',
    "load_format": "leave it out: weights are read from safetensors",
    "revision": "give the directory of that revision as the model",
    "download_dir": "give the directory of a checkpoint as the model",
    "hf_overrides": "leave it out, or change the checkpoint's config.json",
    "disable_log_stats": "leave it out",
    "tokenizer_mode": "leave it out: the tokenizer is the checkpoint's",
    "skip_tokenizer_init": "leave it out: prompts may be token ids all the same",
    "task": "leave it out: generate, embed and classify are served at once",
    "runner": "leave it out: generate, embed and classify are served at once",
}
# What this module gives itself.
_OWN = ("--api-keys", "--data-dir", "--drain-timeout-s", "--listen", "--model", "--worker-listen")


def flags_of(settings: Mapping[str, Setting]) -> list[str]:
    """Keyword arguments as flags of `motet up`. Raises InvalidArgument for a flag that has its value already.

    Worked example: {"num_blocks": 512, "no_reflection": True, "tenants": None} gives
    ["--num-blocks", "512", "--no-reflection"].
    """
    flags: list[str] = []
    for name, value in settings.items():
        flag = "--" + name.replace("_", "-")
        if flag in _OWN:
            raise invalid_field(name, "is set by LLM itself; leave it out")
        if name in OF_VLLM:
            raise invalid_field(name, f"is an argument of vLLM's LLM and not of Motet's: {OF_VLLM[name]}")
        if value is True:
            flags.append(flag)
        elif isinstance(value, str | int | float | os.PathLike) and value is not False:
            flags += [flag, os.fspath(value) if isinstance(value, os.PathLike) else str(value)]
        elif isinstance(value, list | tuple):
            for each in value:
                flags += [flag, str(each)]
        elif value not in (None, False):
            raise invalid_field(
                name, f"is {type(value).__name__}; give a text, a number, a path, True, or a list of texts"
            )
    return flags


class PrivateServer:
    """Starts, watches and stops it. Used from one event loop; `address` and `api_key` are set by start()."""

    def __init__(self, work_dir: Path, flags: Sequence[str]) -> None:
        """`work_dir`: an empty directory, which only this user may read. `flags`: of `motet up`."""
        self.log_file = work_dir / "server.log"
        self.address = ""
        self.api_key = ""
        self._work_dir = work_dir
        self._flags = flags
        self._process: asyncio.subprocess.Process | None = None
        self._reader: asyncio.Task[None] | None = None

    async def start(self, timeout_s: float) -> None:
        """Start it and wait until its worker is attached. Raises Unavailable, or InvalidArgument for a wrong flag."""
        environment = _environment()
        keys = self._work_dir / "keys.json"
        key_file = self._work_dir / "key"
        making = [sys.executable, "-m", "motet", "keys", "new", "--file", str(keys), "--tenant", "offline"]
        await self._run([*making, "--role", "admin", "--out", str(key_file)], environment)
        self.api_key = key_file.read_text("ascii").strip()
        own = [
            *("--listen", "127.0.0.1:0", "--worker-listen", "127.0.0.1:0", "--api-keys", str(keys)),
            *("--data-dir", str(self._work_dir / "data"), "--drain-timeout-s", str(_DRAIN_S)),
        ]
        with self.log_file.open("wb") as log:
            self._process = process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "motet.offline.watched_up", *self._flags, *own),
                stdin=subprocess.PIPE,  # its end stops the server, however this process ends
                stdout=subprocess.PIPE,
                stderr=log,
                env=environment,
                start_new_session=True,  # Ctrl-C is for this process
            )
        assert process.stdout is not None, "started with a pipe"
        try:
            async with asyncio.timeout(timeout_s):
                while not (ready := _READY.match(line := (await process.stdout.readline()).decode(errors="replace"))):
                    if not line:
                        raise await self._failure("did not start")
        except TimeoutError:
            raise Unavailable(f"the server was not ready within {timeout_s:g} s\n{self._last_lines()}") from None
        self.address = ready[1]
        self._reader = asyncio.create_task(self._read(process.stdout))

    async def wait_end(self) -> MotetError:
        """Wait until it ends by itself, and return what to raise."""
        return await self._failure("ended")

    async def stop(self) -> None:
        """Stop it, with everything it started."""
        if self._process is None:
            return
        process = self._process
        assert process.stdin is not None, "started with a pipe"
        process.stdin.close()
        try:
            async with asyncio.timeout(_STOP_S):
                await process.wait()
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # its children end with it
            await process.wait()
        if self._reader is not None:
            await self._reader

    async def _run(self, command: Sequence[str], environment: dict[str, str]) -> None:
        process = await asyncio.create_subprocess_exec(
            *command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment
        )
        said, _ = await process.communicate()
        if process.returncode:
            raise Unavailable(f"the server's key could not be made\n{said.decode(errors='replace')}")

    async def _failure(self, how: str) -> MotetError:
        assert self._process is not None, "after start()"
        code = await self._process.wait()
        text = f"the server {how} (exit code {code}); the end of its log:\n{self._last_lines()}"
        return InvalidArgument(text) if code == WRONG_COMMAND_LINE else Unavailable(text)

    async def _read(self, stream: asyncio.StreamReader) -> None:
        """Else its pipe would fill up."""
        while await stream.read(1 << 16):
            pass

    def _last_lines(self) -> str:
        return "\n".join(self.log_file.read_text("utf-8", errors="replace").splitlines()[-_NUM_LAST_LINES:])


def _environment() -> dict[str, str]:
    """Without the flags that the environment has for another server."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MOTET_")}
    return server_parts.child_environment(environment)
