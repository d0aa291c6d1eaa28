"""Flags are defined once; the documentation has them all, with their units and defaults."""

from __future__ import annotations

import argparse
import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from contract.process_log import settings_line
from contract.settings.flags import (
    add_arguments,
    find_mistake,
    flag_of,
    flags_of,
    from_args,
    group,
    groups_of,
    setting,
    shown_default,
)
from control_plane.access.settings import AccessSettings
from control_plane.config import ServerConfig
from data_plane.config import WorkerConfig
from gateway.config import GatewayConfig

OPERATIONS = Path(__file__).resolve().parents[2] / "docs" / "operations.md"
# How a unit is written in the tables.
SHORT_UNITS = {"seconds": "s", "milliseconds": "ms", "a count": "count", "a share": "share"}
TABLES = {ServerConfig: "Control plane", AccessSettings: "Access", WorkerConfig: "Worker", GatewayConfig: "Gateway"}


@dataclass(frozen=True, kw_only=True)
class Sample:
    name: str = setting("what to call it")
    num_things: int = setting("things; more are refused", 3, unit="a count", lowest=1, highest=9)
    size_bytes: int | None = setting("size", None, unit="bytes", shown_default="none", parse=len)
    is_loud: bool = setting("speak up", False)
    pairs: tuple[str, ...] = setting("pairs", (), name="--pair", shown_default="none", parse=str, is_repeatable=True)


@dataclass(frozen=True, kw_only=True)
class Outer:
    num_wheels: int = setting("wheels", 4, unit="a count")
    sample: Sample = group(Sample)


def parse(*argv: str) -> Sample:
    parser = argparse.ArgumentParser()
    add_arguments(parser, Sample)
    return from_args(parser.parse_args(argv), Sample)


def test_a_field_makes_its_flag_default_and_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    assert parse("--name", "x") == Sample(name="x")
    assert parse("--name", "x", "--num-things", "4", "--size-bytes", "four", "--is-loud") == Sample(
        name="x", num_things=4, size_bytes=4, is_loud=True
    )
    monkeypatch.setenv("MOTET_NAME", "y")
    monkeypatch.setenv("MOTET_PAIR", "a,b")
    assert parse() == Sample(name="y", pairs=("a", "b"))


def test_flags_of_a_group_are_flags_of_the_whole() -> None:
    parser = argparse.ArgumentParser()
    add_arguments(parser, Outer)
    outer = from_args(parser.parse_args(["--num-wheels", "3", "--name", "x", "--num-things", "4"]), Outer)
    assert outer == Outer(num_wheels=3, sample=Sample(name="x", num_things=4))
    assert settings_line(outer, only_changed=True) == "num_wheels=3 name=x num_things=4"


@dataclass(frozen=True, kw_only=True)
class Remote:
    place_url: str | None = setting(
        "where", None, shown_default="here", is_secret_url=True, password_flag="--place-file"
    )
    other_url: str | None = setting("elsewhere", None, shown_default="here", is_secret_url=True)


def test_a_url_with_a_password_is_taken_from_the_environment_only(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def parse_remote(*argv: str) -> Remote:
        parser = argparse.ArgumentParser()
        add_arguments(parser, Remote)
        remote: Remote = from_args(parser.parse_args(argv), Remote)
        return remote

    assert parse_remote("--place-url", "redis://me@host").place_url == "redis://me@host"
    for argv in (["--place-url", "redis://me:planted@h"], ["--other-url=s3://key:planted@bucket"]):
        with pytest.raises(SystemExit):
            parse_remote(*argv)
    said = capsys.readouterr().err
    assert "the environment variable MOTET_PLACE_URL, or the password in a file by --place-file" in said
    assert "the environment variable MOTET_OTHER_URL\n" in said and "planted" not in said
    monkeypatch.setenv("MOTET_PLACE_URL", "redis://me:planted@host")
    remote = parse_remote()
    assert remote.place_url == "redis://me:planted@host" and "planted" not in repr(remote)


def test_help_has_unit_and_default() -> None:
    parser = argparse.ArgumentParser()
    add_arguments(parser, Sample)
    text = " ".join(parser.format_help().split())
    assert "what to call it (required)" in text
    assert "things, a count; more are refused (default: 3)" in text
    assert "size, bytes with KiB/MiB/GiB (default: none)" in text


def test_values_out_of_bounds_are_named() -> None:
    assert find_mistake(Sample(name="x")) is None
    assert find_mistake(Sample(name="x", num_things=0)) == "--num-things: 0 is below 1"
    assert find_mistake(Sample(name="x", num_things=10)) == "--num-things: 10 is above 9"


def rows_of(config_class: type[Any]) -> list[tuple[list[str], str]]:
    """Of the table of one side: the flags of each row, and its column of units and defaults."""
    text = OPERATIONS.read_text("utf-8").split(f"\n{TABLES[config_class]}")[1]
    table = text[text.index("| flag |") :].split("\n\n")[0]
    cells = [line.strip("| ").split(" | ") for line in table.splitlines()[2:]]
    return [(re.findall(r"`(--[a-z-]+)", flags), default) for flags, default, *_ in cells]


@pytest.mark.parametrize("config_class", TABLES, ids=lambda config_class: config_class.__name__)
def test_the_documentation_has_every_flag_with_unit_and_default(config_class: type[Any]) -> None:
    rows = rows_of(config_class)
    documented = [flag for flags, _ in rows for flag in flags]
    described = [config_class, *(group for group in groups_of(config_class).values() if group not in TABLES)]
    names = [(part, name) for part in described for name in flags_of(part)]
    assert sorted(documented) == sorted(flag_of(part, name) for part, name in names)
    column = {flag: default for flags, default in rows for flag in flags}
    wrong = []
    for part, name in names:
        flag = flags_of(part)[name]
        text = column[flag_of(part, name)].replace("`", "")
        unit = SHORT_UNITS.get(flag.unit, flag.unit.split(" ")[0])
        default = shown_default(part, name) or "required"
        wrong += [f"{name}: {word!r} is not in {text!r}" for word in (unit, default) if word not in text]
    assert not wrong


@pytest.mark.parametrize(
    "config_class", [ServerConfig, WorkerConfig, GatewayConfig], ids=lambda config_class: config_class.__name__
)
def test_no_two_fields_have_one_name(config_class: type[Any]) -> None:
    """The command line keeps the values of all groups side by side, by the names of their fields."""
    parts = [config_class, *groups_of(config_class).values()]
    assert not [name for name, count in Counter(name for part in parts for name in flags_of(part)).items() if count > 1]
