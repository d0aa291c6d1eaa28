"""Settings: flags, environment, checks as a whole, no secret printed."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from control_plane.config import ConfigError, ServerConfig, add_arguments, from_args
from control_plane.scheduler.settings import Policy, SchedulerSettings
from tests.fakes.authority import Authority


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text("{}")
    return tmp_path


def parse(model_dir: Path, *argv: str) -> ServerConfig:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return from_args(parser.parse_args(["--model", str(model_dir), *argv]))


def test_flags_defaults_equal_the_dataclass_defaults(model_dir: Path) -> None:
    assert parse(model_dir) == ServerConfig(model_dir=model_dir)


def test_every_flag_is_read(model_dir: Path) -> None:
    config = parse(
        model_dir,
        *("--listen", "127.0.0.1:0", "--worker-listen", "127.0.0.1:0", "--host-cache-bytes", "64MiB"),
        *("--max-model-len", "77", "--adapter-root", f"team={model_dir}", "--no-reflection", "--dtype", "float32"),
        *("--redis-url", "redis://me@host:1/0", "--drain-timeout-s", "1.5", "--max-adapter-bytes", "512KiB"),
    )
    assert config.host_cache_bytes == 64 << 20 and config.max_adapter_bytes == 512 << 10
    assert config.adapter_roots == (("team", model_dir),) and config.no_reflection
    assert (config.max_model_len, config.drain_timeout_s) == (77, 1.5)
    assert config.redis is not None and config.redis.url == "redis://me@host:1/0"


def test_start_reports_the_settings_that_were_changed(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOTET_REDIS_URL", "redis://:secret@host:1/0")
    config = parse(model_dir, "--plan-depth", "3", "--dtype", "auto")
    assert "secret" not in repr(config)
    assert config.describe(only_changed=True) == f"model_dir={model_dir} redis_url=redis://***@host:1/0 plan_depth=3"
    assert "dtype=auto" in config.describe()


def test_start_reports_files_of_redis_under_the_names_of_their_flags(model_dir: Path) -> None:
    """The clients' port has files of the same kinds."""
    ca = Authority().write(model_dir)
    config = parse(model_dir, "--redis-url", "rediss://host:1/0", "--redis-tls-ca", str(ca))
    assert f" redis_tls_ca={ca}" in config.describe(only_changed=True)


def test_start_reports_roots_and_hosts(model_dir: Path) -> None:
    roots = ["--adapter-root", "models=hf://acme", "--adapter-root", f"team={model_dir}"]
    config = parse(model_dir, *roots, "--hub-host", "cdn.example:8443", "--hub-host", ".hub.example")
    line = config.describe(only_changed=True)
    assert f"adapter_roots=models=hf://acme,team={model_dir}" in line
    assert "hub_hosts=cdn.example:8443,.hub.example" in line


def test_environment_gives_the_default_and_a_flag_wins(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOTET_MAX_WAITING_REQUESTS", "7")
    monkeypatch.setenv("MOTET_REDIS_URL", "unix:///run/redis.sock")
    monkeypatch.setenv("MOTET_ADAPTER_ROOT", f"a={model_dir},b={model_dir}")
    config = parse(model_dir)
    assert (config.max_waiting_requests, config.redis_url) == (7, "unix:///run/redis.sock")
    assert [name for name, _ in config.adapter_roots] == ["a", "b"]
    assert parse(model_dir, "--max-waiting-requests", "9").max_waiting_requests == 9
    assert parse(model_dir, "--max-waiting-tokens", "8").max_waiting_tokens == 8


def test_wrong_root_in_the_environment_is_refused_by_name(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOTET_ADAPTER_ROOT", f"a={model_dir},bad")
    with pytest.raises(ConfigError, match="--adapter-root: 'bad' is not NAME=DIR"):
        parse(model_dir)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--max-waiting-requests", "0"], "--max-waiting-requests: 0 is below 1"),
        (["--plan-depth", "0"], "--plan-depth: 0"),
        (["--drain-timeout-s", "nan"], "--drain-timeout-s: nan"),
        (
            ["--dead-after-ms", "600"],
            "--dead-after-ms: 600 is below two heartbeat intervals (heartbeat_interval_ms is 500)",
        ),
        (["--dtype", "int8"], "--dtype: 'int8' is not valid: use one of"),
        (["--listen", "0.0.0.0:1"], "--listen: 0.0.0.0:1 is reached from other machines"),
        (["--worker-listen", "host.example:1"], "--worker-listen: host.example:1 is reached from other machines"),
        (["--listen", "nowhere"], "--listen: 'nowhere' is not HOST:PORT"),
        (["--listen", "127.0.0.1:99999"], "--listen"),
        (["--worker-listen", "127.0.0.1:50051"], "--worker-listen"),
        (["--scaler-listen", "keda"], "--scaler-listen: 'keda' is not HOST:PORT"),
        (["--scaler-listen", "0.0.0.0:1"], "--scaler-listen: 0.0.0.0:1 is reached from other machines"),
        (
            ["--tls-cert", __file__, "--tls-key", __file__, "--scaler-tls-client-ca", __file__],
            "--scaler-tls-client-ca: needs --scaler-listen",
        ),
        (["--worker-start-s", "0"], "--worker-start-s: 0.0 is not above 0"),
        (["--redis-url", "REDIS://x"], "--redis-url: must begin with redis://"),
        (["--redis-url", "redis://x?colour=red"], "--redis-url: has an option that Motet does not take: colour"),
        (["--redis-url", "redis://x:9999999"], "--redis-url: cannot be read as SCHEME://"),
        (["--redis-password-file", "/nowhere"], "--redis-password-file: needs --redis-url"),
        (
            ["--redis-url", "redis://x", "--redis-password-file", "/nowhere"],
            "--redis-password-file: /nowhere cannot be read",
        ),
        (["--redis-url", "redis://x", "--redis-tls-ca", __file__], "need a --redis-url that begins with rediss://"),
        (["--redis-url", "rediss://x", "--redis-tls-cert", __file__], "--redis-tls-key: is missing"),
        (["--redis-url", "rediss://x", "--redis-tls-ca", "/nowhere"], "--redis-tls-ca: /nowhere is not a file"),
        (["--host-cache", "memory", "--redis-url", "redis://x"], "--host-cache redis"),
        (["--adapter-root", "team=/nowhere/at/all"], "--adapter-root"),
        (["--adapter-root", "a=/", "--adapter-root", "a=/"], "given twice"),
        (["--adapter-root", "A/B=/"], "--adapter-root: name"),
        (["--model", "/nowhere/at/all"], "--model"),
        (["--max-model-len", "1"], "--max-model-len"),
        (
            ["--scheduling-policy", "lifo"],
            "--scheduling-policy: 'lifo' is not valid: use one of chunked_prefill, prefill_first, fcfs",
        ),
        (["--max-step-tokens", "0"], "--max-step-tokens: 0 is below 1"),
        (["--watermark", "1"], "--watermark: 1.0 is not a share"),
        (["--max-long-partial-prefills", "5"], "--max-long-partial-prefills: 5 is above"),
        (["--swap-us-per-block", "nan"], "--swap-us-per-block: nan"),
        (["--tenants", "/nowhere/at/all"], "--tenants: /nowhere/at/all: cannot be read"),
    ],
)
def test_wrong_value_is_refused_by_name(model_dir: Path, argv: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(model_dir, *argv)
    assert message in str(caught.value)


def test_scheduling_flags_make_the_schedulers_settings(model_dir: Path) -> None:
    assert parse(model_dir).scheduler_settings() == SchedulerSettings()
    config = parse(
        model_dir,
        *("--scheduling-policy", "prefill_first", "--max-step-tokens", "512", "--max-sequences", "9"),
        *("--watermark", "0.05", "--max-partial-prefills", "3", "--max-long-partial-prefills", "2"),
        *("--long-prefill-tokens", "100", "--prefill-us-per-token", "1.5", "--swap-us-per-block", "2.5"),
        *("--adapter-us-per-mib", "3.5", "--step-us", "4.5", "--max-blocked-steps", "8"),
    )
    assert config.scheduler_settings() == SchedulerSettings(
        policy=Policy.PREFILL_FIRST,
        max_step_tokens=512,
        max_sequences=9,
        watermark=0.05,
        max_blocked_steps=8,
        max_partial_prefills=3,
        max_long_partial_prefills=2,
        long_prefill_tokens=100,
        prefill_us_per_token=1.5,
        swap_us_per_block=2.5,
        adapter_us_per_mib=3.5,
        step_us=4.5,
    )


def test_requests_wait_for_workers_that_an_autoscaler_starts(model_dir: Path) -> None:
    def start_s(*argv: str) -> float | None:
        return parse(model_dir, *argv).fleet_settings().worker_start_s

    scaler = ("--scaler-listen", "127.0.0.1:0")
    assert start_s() is None and start_s("--worker-start-s", "60") == 60
    assert start_s(*scaler) == 900 and start_s(*scaler, "--worker-start-s", "60") == 60


def test_names_of_tenants_are_trusted_only_where_that_is_said(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = model_dir / "tenants.json"
    file.write_text("{}")
    for argv in ([], ["--tenants", str(file)]):
        assert not parse(model_dir, *argv).tenant_table().trusts_names
        assert parse(model_dir, *argv, "--trust-tenant-names").tenant_table().trusts_names
    monkeypatch.setenv("MOTET_TRUST_TENANT_NAMES", "1")
    assert parse(model_dir).tenant_table().trusts_names


def test_tenants_are_read_from_their_file(model_dir: Path) -> None:
    file = model_dir / "tenants.json"
    file.write_text('{"a": {"weight": 2, "max_running_requests": 3}}')
    limits = parse(model_dir, "--tenants", str(file)).tenant_table().limits_of("a")
    assert (limits.weight, limits.max_running_requests) == (2, 3)
    for content, message in [
        (b'{"a": {"wieght": 2}}', "a.wieght: unknown"),
        (b'{"a": {}, "a": {}}', "'a' appears twice"),
        (b"{", "is not valid JSON"),
        (b"\xff\xfe\xff", "is not valid JSON"),
        (b" " * ((16 << 20) + 1), "larger than 16777216 bytes"),
    ]:
        file.write_bytes(content)
        with pytest.raises(ConfigError, match="--tenants: ") as caught:
            parse(model_dir, "--tenants", str(file))
        assert message in str(caught.value)


def test_help_names_a_default_for_every_optional_flag() -> None:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    for action in parser._actions:
        if action.dest not in ("help", "model_dir", "adapter_roots", "no_reflection"):
            assert "default" in (action.help or ""), action.dest


def test_a_password_is_given_once(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = model_dir / "password"
    file.write_text("pw\n")
    monkeypatch.setenv("MOTET_WORKER_REDIS_URL", "redis://me:planted@host")
    with pytest.raises(
        ConfigError, match="--worker-redis-password-file: the URL of --worker-redis-url has a"
    ) as caught:
        parse(model_dir, "--worker-redis-password-file", str(file))
    assert "planted" not in str(caught.value)
