"""What the start of a control plane refuses, and what it prints."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import logging
import os
import sys
from asyncio.subprocess import PIPE
from dataclasses import replace
from pathlib import Path

import motet
import motet.aio
import pytest

from control_plane.config import ConfigError, add_arguments, from_args
from control_plane.registry.store.store import StoreLocked
from control_plane.server import build
from tests.control_plane.server_processes import (
    ROOT,
    STEP_S,
    adapter_files,
    checkpoint,
    control_plane,
    ready_line,
    start,
)


async def test_broken_tokenizer_file_ends_the_start_with_a_line_that_names_it(tmp_path: Path) -> None:
    model = checkpoint(tmp_path / "model")
    (model / "tokenizer_config.json").write_text(json.dumps({"chat_template": [{"template": "x"}]}))
    process = await start("control_plane", "--model", str(model), "--data-dir", str(tmp_path / "data"), cwd=tmp_path)
    _, err = await asyncio.wait_for(process.communicate(), STEP_S)
    assert process.returncode == 2
    last = err.decode().splitlines()[-1]
    assert 'tokenizer_config.json: chat_template[0] has no string "name"' in last and b"Traceback" not in err


async def test_second_server_on_a_directory_touches_nothing_of_the_first(tmp_path: Path) -> None:
    model = checkpoint(tmp_path / "model")
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    flags = ["--model", str(model), "--data-dir", str(tmp_path / "data"), "--host-cache", "memory"]
    config = from_args(parser.parse_args([*flags, "--listen", "127.0.0.1:0", "--worker-listen", "127.0.0.1:0"]))
    under_way = [tmp_path / "data" / name / "under-way" for name in ("uploads", "scratch")]
    async with contextlib.AsyncExitStack() as stack:
        await build(config, stack)
        for name in (".", "store", "uploads", "scratch"):
            assert (tmp_path / "data" / name).stat().st_mode & 0o777 == 0o700, name
        for file in under_way:
            file.write_bytes(b"half")
        # Whatever the second one has for a store: the directory itself is the first one's.
        for other in (config, replace(config, store=str(tmp_path / "other")), replace(config, store="memory://other")):
            with pytest.raises(ConfigError, match=r"--data-dir: .* in use by another control plane"):
                async with contextlib.AsyncExitStack() as second:
                    await build(other, second)
        elsewhere = replace(config, data_dir=tmp_path / "elsewhere", store=str(tmp_path / "data" / "store"))
        with pytest.raises(StoreLocked):
            async with contextlib.AsyncExitStack() as second:
                await build(elsewhere, second)
        assert all(file.read_bytes() == b"half" for file in under_way)
    async with contextlib.AsyncExitStack() as stack:
        await build(config, stack)
        assert not any(file.exists() for file in under_way)  # what a killed server left goes


async def test_second_server_on_a_directory_spares_the_redis_of_the_first(tmp_path: Path) -> None:
    """It was taken for the leftover of a killed server, and killed."""
    async with control_plane(tmp_path) as (first, _, _):
        pid = int((tmp_path / "data" / "redis" / "redis.pid").read_text())
        second = await start(
            "control_plane",
            *("--model", str(tmp_path / "model"), "--data-dir", str(tmp_path / "data")),
            *("--store", str(tmp_path / "other"), "--listen", "127.0.0.1:0", "--worker-listen", "127.0.0.1:0"),
            cwd=tmp_path,
        )
        out, err = await asyncio.wait_for(second.communicate(), STEP_S)
        assert second.returncode == 2 and not out
        assert b"--data-dir: " in err and b"in use by another control plane" in err and b"Traceback" not in err
        os.kill(pid, 0)
        assert first.returncode is None


@pytest.mark.parametrize(
    ("flag", "value", "words"),
    [
        (
            "--data-dir",
            "/proc/nope",
            "--data-dir: /proc/nope cannot be made or locked: No such file or directory; give a",
        ),
        (
            "--store",
            "nosuch://bucket",
            "--store: nosuch:// is not a store that Motet knows; give a directory, or a URL",
        ),
        (
            "--redis-url",
            "redis://h?ssl_verify=no",
            "--redis-url: has an option that Motet does not take: ssl_verify; remove it",
        ),
        ("--redis-url", "redis://:planted@h", "--redis-url: its password would be shown to every user of this machine"),
        ("--store", "s3://key:planted@bucket", "--store: its password would be shown to every user of this machine"),
        ("--worker-redis-url", "unix:///s?a=b", "--worker-redis-url: has an option that Motet does not take: a; "),
    ],
)
async def test_a_place_that_cannot_be_used_is_named_with_its_flag(
    tmp_path: Path, flag: str, value: str, words: str
) -> None:
    model = checkpoint(tmp_path / "model")
    flags = ("--model", str(model), "--data-dir", str(tmp_path / "data"), flag, value)
    process = await start("control_plane", *flags, cwd=tmp_path)
    out, err = await asyncio.wait_for(process.communicate(), STEP_S)
    last = err.decode().strip().splitlines()[-1]
    assert process.returncode == 2 and not out
    assert last.startswith("motet control-plane: ") and words in last and "Traceback" not in err.decode()
    assert b"planted" not in err


async def test_start_shows_people_what_is_served_and_what_is_off(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = checkpoint(tmp_path / "model")
    (model / "tokenizer.json").unlink()
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    flags = ["--model", str(model), "--data-dir", str(tmp_path / "data"), "--host-cache", "memory"]
    config = from_args(parser.parse_args([*flags, "--listen", "127.0.0.1:0", "--worker-listen", "127.0.0.1:0"]))
    with caplog.at_level(logging.INFO):
        async with contextlib.AsyncExitStack() as stack:
            await build(config, stack)
    shown = [vars(record).get("shown") for record in caplog.records]
    assert f"Motet {motet.__version__} serves {model}" in shown
    assert "base model model: llama, 2 layers, float32, context 256 tokens" in shown
    assert f"0 adapters registered in {tmp_path / 'data' / 'store'}" in shown
    assert "host cache for adapters: this process's memory, up to 2.0 GiB" in shown
    warnings = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(warnings) == 1 and warnings[0].startswith("text is off, token ids work: the checkpoint has no tokenizer")
    assert warnings[0].endswith(f"; put a tokenizer.json into {model}")


async def test_wrong_setting_ends_with_a_line_that_names_it(tmp_path: Path) -> None:
    process = await start("control_plane", "--model", str(tmp_path), cwd=tmp_path)
    out, err = await asyncio.wait_for(process.communicate(), STEP_S)
    assert process.returncode == 2 and not out
    assert err.startswith(b"motet control-plane: --model: ") and err.count(b"\n") == 1 and b"config.json" in err


async def test_too_low_a_limit_of_open_files_ends_the_start_before_anything_is_touched(tmp_path: Path) -> None:
    model, data_dir = checkpoint(tmp_path / "model"), tmp_path / "data"
    program = 'ulimit -n 300 && exec "$0" -m control_plane "$@"'
    flags = ("--model", str(model), "--data-dir", str(data_dir))
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'client'}"}
    process = await asyncio.create_subprocess_exec(
        *("sh", "-c", program, sys.executable, *flags), cwd=tmp_path, env=environment, stdout=PIPE, stderr=PIPE
    )
    out, err = await asyncio.wait_for(process.communicate(), STEP_S)
    assert process.returncode == 2 and not out and not data_dir.exists()
    assert b"--max-connections: " in err.splitlines()[-1] and b"ulimit -Hn" in err.splitlines()[-1]


async def test_checkpoint_that_cannot_be_served_ends_as_a_wrong_setting_does(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"quantization_config": {"quant_method": "gptq"}}')
    process = await start("control_plane", "--model", str(tmp_path), "--host-cache", "memory", cwd=tmp_path)
    out, err = await asyncio.wait_for(process.communicate(), STEP_S)
    assert process.returncode == 2 and not out
    assert (
        b"motet control-plane: " in err.splitlines()[-1] and b"checkpoints quantised with 'gptq' are not served" in err
    )


async def test_a_file_of_settings_starts_a_server_and_a_flag_wins(tmp_path: Path) -> None:
    path = tmp_path / "motet.toml"
    data = tmp_path / "data"
    path.write_text(
        f'[common]\nmodel = "{checkpoint(tmp_path / "model")}"\n'
        f'[control-plane]\ndata-dir = "{data}"\nhost-cache = "memory"\n'
        'listen = "127.0.0.1:1"\nworker-listen = "127.0.0.1:0"\nmax-waiting-requests = 17\n'
    )
    server = await start("control_plane", "--config", str(path), "--listen", "127.0.0.1:0", cwd=tmp_path)
    try:
        clients = (await ready_line(server, r"clients=(\S+) "))[1]
        async with motet.AsyncClient(clients, tenant="t") as client:
            status = await client.status()
    finally:
        server.terminate()
        await server.communicate()
    assert not clients.endswith(":1"), "the flag wins over the file"
    assert status.limits.max_waiting_requests == 17 and data.is_dir()


async def test_a_mistake_in_the_file_of_settings_ends_the_start_of_each_part(tmp_path: Path) -> None:
    path = tmp_path / "motet.toml"
    path.write_text("[common]\nmodle = '/models/base'\n")
    for module in ("control_plane", "data_plane"):
        process = await start(module, "--config", str(path), cwd=tmp_path)
        _, err = await process.communicate()
        assert process.returncode == 2 and f"{path}: [common] modle: is not a flag of the" in err.decode()
        assert "did you mean model?" in err.decode()


async def test_adapters_of_directories_are_there_when_the_server_is_ready_and_while_it_runs(tmp_path: Path) -> None:
    watched = tmp_path / "watched"
    for seed, folder in enumerate((tmp_path / "named", watched / "first")):
        folder.mkdir(parents=True)
        for name, data in adapter_files(seed).items():
            (folder / name).write_bytes(data)
    flags = ("--adapter", f"one={tmp_path / 'named'}", "--adapter-dir", str(watched), "--adapter-dir-interval-s", "0.1")
    async with (
        control_plane(tmp_path, *flags, "--host-cache", "memory") as (_, clients, _workers),
        motet.AsyncClient(clients, tenant="t") as client,
    ):
        version = (await client.adapters.get("one")).active_version
        assert version is not None and version.source == str(tmp_path / "named")
        names: list[str] = []
        async with asyncio.timeout(STEP_S):
            while names != ["first", "one"]:
                names = [adapter.id async for adapter in client.adapters.list()]


async def test_an_adapter_that_cannot_be_registered_ends_the_start(tmp_path: Path) -> None:
    (tmp_path / "bad").mkdir()
    model = checkpoint(tmp_path / "model")
    flags = ("--listen", "127.0.0.1:0", "--worker-listen", "127.0.0.1:0", "--host-cache", "memory")
    server = await start(
        "control_plane", "--model", str(model), *flags, "--adapter", f"one={tmp_path / 'bad'}", cwd=tmp_path
    )
    _, err = await asyncio.wait_for(server.communicate(), STEP_S)
    assert server.returncode == 2, err.decode()
    assert f"--adapter: one: source: directory '{tmp_path / 'bad'}' has no adapter_config.json" in err.decode()
