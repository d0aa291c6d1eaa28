"""The worker's flags, their environment defaults, and what is refused."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from data_plane.config import WorkerConfig, add_arguments, from_args
from data_plane.errors import ConfigError


def parse(*argv: str) -> WorkerConfig:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return from_args(parser.parse_args(["--model", "m", *argv]))


@pytest.fixture(autouse=True)
def no_motet_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    for name in list(os.environ):
        if name.startswith("MOTET_"):
            monkeypatch.delenv(name)


def test_defaults() -> None:
    config = parse("--worker-id", "w0")
    assert config == WorkerConfig(control_plane="127.0.0.1:50052", model_dir=Path("m"), worker_id="w0")
    assert (config.step_tokens("cpu"), config.step_tokens("cuda")) == (1024, 8192)


@pytest.mark.parametrize(
    ("value", "expected"), [("auto", (False, True)), ("on", (True, True)), ("off", (False, False))]
)
def test_a_warm_up_is_for_devices_that_compile_unless_set(value: str, expected: tuple[bool, bool]) -> None:
    config = parse("--warm-up", value)
    assert (config.warms_up("cpu"), config.warms_up("cuda")) == expected


def test_start_logs_the_settings_that_were_changed() -> None:
    config = parse("--worker-id", "w0", "--threads", "3")
    assert config.describe(only_changed=True) == "control_plane=127.0.0.1:50052 model_dir=m worker_id=w0 threads=3"
    assert "num_slots=256" in config.describe()


def test_flags_set_every_field() -> None:
    config = parse(
        "--num-blocks", "8", "--arena-bytes", "64MiB", "--token-budget", "32", "--threads", "3", "--device", "cpu"
    )  # fmt: skip
    assert (config.num_blocks, config.arena_bytes, config.step_tokens("cuda")) == (8, 64 << 20, 32)
    assert (config.num_threads, config.device) == (3, "cpu")


def test_a_profile_is_of_a_step_at_least_and_its_directory_exists(tmp_path: Path) -> None:
    config = parse("--profile", "3", "--profile-out", str(tmp_path / "steps.json"))
    assert (config.profile, config.profile_out) == (3, tmp_path / "steps.json")
    with pytest.raises(ConfigError, match=r"^--profile: 0 is below 1$"):
        parse("--profile", "0")
    with pytest.raises(ConfigError, match=r"^--profile: 10001 is above 10000$"):
        parse("--profile", "10001")
    with pytest.raises(ConfigError, match=f"^--profile-out: {tmp_path / 'none'} is not a directory"):
        parse("--profile", "3", "--profile-out", str(tmp_path / "none" / "steps.json"))


def test_environment_is_the_default_and_a_flag_overrides_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOTET_NUM_BLOCKS", "12")
    monkeypatch.setenv("MOTET_ARENA_BYTES", "1MiB")
    assert (parse().num_blocks, parse().arena_bytes) == (12, 1 << 20)
    assert parse("--num-blocks", "3").num_blocks == 3


def test_an_arena_is_given_in_bytes_or_as_a_share() -> None:
    assert parse("--arena-memory-share", "0.25").arena_memory_share == 0.25
    for share in ("0", "0.95"):
        with pytest.raises(ConfigError, match=r"^--arena-memory-share: "):
            parse("--arena-memory-share", share)
    with pytest.raises(ConfigError, match=r"--arena-memory-share: 0\.25 is given beside --arena-bytes 1048576"):
        parse("--arena-memory-share", "0.25", "--arena-bytes", "1MiB")


def test_an_empty_cache_folder_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    assert parse("--native-cache", "/c").native_cache == Path("/c")
    monkeypatch.setenv("MOTET_NATIVE_CACHE", "/e")
    assert parse().native_cache == Path("/e")
    monkeypatch.setenv("MOTET_NATIVE_CACHE", "")
    assert parse().native_cache is None


@pytest.mark.parametrize(
    ("flag", "value", "match"),
    [
        ("--num-blocks", "0", "--num-blocks: 0 is below 1"),
        ("--max-rows", "65537", "--max-rows: 65537 is above 65536"),
        ("--threads", "1025", "--threads: 1025 is above 1024"),
        ("--max-model-len", "1", "--max-model-len: 1 is below 2"),
        ("--device", "tpu", "--device: 'tpu' is not valid: use one of auto, cpu, cuda"),
        ("--dtype", "int8", "--dtype: 'int8'"),
        ("--native-code", "no", "--native-code: 'no' is not valid: use one of on, off"),
        ("--warm-up", "yes", "--warm-up: 'yes' is not valid: use one of auto, on, off"),
        ("--kv-cache-dtype", "int8", "--kv-cache-dtype: 'int8'"),
        ("--worker-id", "Host 1", "--worker-id: 'Host 1'"),
        ("--control-plane", "localhost", "--control-plane: 'localhost'"),
        ("--control-plane", "localhost:70000", "HOST:PORT"),
        ("--worker-redis-url", "REDIS://x", "--worker-redis-url: must begin with redis://"),
        ("--worker-redis-url", "unix:///s?colour=red", "--worker-redis-url: has an option that .*: colour"),
        ("--exit-when-disconnected-s", "-1", "--exit-when-disconnected-s"),
    ],
)
def test_a_wrong_value_names_flag_value_and_limit(flag: str, value: str, match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        parse(flag, value)


def test_help_gives_every_flag_its_default(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse("--help")
    text = capsys.readouterr().out
    assert text.count("default") >= 15
    assert "(required)" in text
