"""The file of --config: flags win over the environment, and that over the file; whatever nothing reads is refused."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import pytest
from motet.command_line import Parser

from contract.settings import config_file, flags
from contract.settings.config_file import ConfigFileError, environment, path_of, read
from contract.settings.flags import group, setting


@dataclass(frozen=True, kw_only=True)
class Inner:
    depth: float = setting("depth", 1.0, unit="seconds")


@dataclass(frozen=True, kw_only=True)
class Sample:
    model_dir: Path = setting("where", name="--model")
    num_things: int = setting("things", 3, unit="a count")
    is_loud: bool = setting("speak up", False)
    roots: tuple[str, ...] = setting("roots", (), name="--root", shown_default="none", parse=str, is_repeatable=True)
    redis_url: str | None = setting(
        "cache", None, shown_default="none", is_secret_url=True, password_flag="--redis-password-file"
    )
    inner: Inner = group(Inner)


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "motet.toml"
    path.write_text(text, encoding="utf-8")
    return path


def parsed(path: Path, *argv: str, environ: dict[str, str] | None = None, part: str = "worker") -> Sample:
    words = ["--config", str(path), *argv]
    given = environment(words, part, Sample, environ or {})
    parser = Parser(allow_abbrev=False)
    config_file.add_argument(parser, given)
    flags.add_arguments(parser, Sample, given)
    sample: Sample = flags.from_args(parser.parse_args(words), Sample)
    return sample


WHOLE = """
[common]
model = "/models/base"

[worker]
num-things = 5
is-loud = true
root = ["a=/x", "b=/y"]
depth = 2.5
redis-url = "redis://cache:6379"
"""


def test_every_kind_of_value_is_read(tmp_path: Path) -> None:
    assert parsed(written(tmp_path, WHOLE)) == Sample(
        model_dir=Path("/models/base"),
        num_things=5,
        is_loud=True,
        roots=("a=/x", "b=/y"),
        redis_url="redis://cache:6379",
        inner=Inner(depth=2.5),
    )


def test_a_flag_wins_over_the_environment_and_that_over_the_file(tmp_path: Path) -> None:
    path = written(tmp_path, WHOLE)
    environ = {"MOTET_NUM_THINGS": "6", "MOTET_IS_LOUD": "0", "MOTET_DEPTH": "3"}
    sample = parsed(path, "--depth", "4", environ=environ)
    assert (sample.num_things, sample.is_loud, sample.inner.depth) == (6, False, 4.0)


def test_the_file_may_be_named_by_the_environment_and_a_flag_wins(tmp_path: Path) -> None:
    assert path_of([], {"MOTET_CONFIG": "a.toml"}) == Path("a.toml")
    assert path_of(["--config=b.toml"], {"MOTET_CONFIG": "a.toml"}) == Path("b.toml")
    assert path_of(["--other", "x"], {}) is None and path_of([], {"MOTET_CONFIG": ""}) is None


def test_a_part_reads_its_own_table_and_the_common_one(tmp_path: Path) -> None:
    path = written(tmp_path, '[common]\nmodel = "m"\n[worker]\nnum-things = 7\n[control-plane]\nnum-things = 8\n')
    assert [parsed(path, part=part).num_things for part in ("worker", "control-plane")] == [7, 8]
    assert parsed(path, part="gateway").num_things == 3, "of another table it reads nothing"


def test_the_gateway_takes_of_the_common_table_what_it_has(tmp_path: Path) -> None:
    path = written(tmp_path, '[common]\nmodel = "m"\nnum-things = 6\nthreads = 2\n[gateway]\ndepth = 2.5\n')
    gateway = parsed(path, part="gateway")
    assert (gateway.num_things, gateway.inner.depth) == (6, 2.5)
    for part in ("control-plane", "worker"):
        with pytest.raises(ConfigFileError, match=r"\[common\] threads: is not a flag"):
            parsed(path, part=part)
    path = written(tmp_path, '[common]\nmodel = "m"\nnum-things = "many"\n')
    with pytest.raises(ConfigFileError, match=r"\[common\] num-things: "):
        parsed(path, part="gateway")
    path = written(tmp_path, '[common]\nmodel = "m"\n[gateway]\nthreads = 2\n')
    with pytest.raises(ConfigFileError, match=r"\[gateway\] threads: is not a flag"):
        parsed(path, part="gateway")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[worker]\nnum-thing = 1", r"\[worker\] num-thing: is not a flag of the worker; did you mean num-things\?"),
        ("[worker]\nnum_things = 1", r"\[worker\] num_things: is not a flag of the worker; write num-things"),
        ("[common]\nzebra = 1", r"\[common\] zebra: is not a flag of the worker; docs/operations.md lists the flags"),
        ("[workers]\nnum-things = 1", r"workers: is not a table of this file; use common, control-plane, worker, "),
        ("num-things = 1", r"num-things: is not a table of this file"),
        ("worker = 1", r"worker: is a number; write \[worker\] and its settings below"),
        ("[worker]\nnum-things = 'x'", r"\[worker\] num-things: 'x' is not a whole number"),
        ("[worker]\nnum-things = 1.5", r"\[worker\] num-things: '1.5' is not a whole number"),
        ("[worker]\nnum-things = true", r"\[worker\] num-things: is true or false; give a string or a number"),
        ("[worker]\nnum-things = [1]", r"\[worker\] num-things: is an array; give a string or a number"),
        ("[worker]\nis-loud = 'yes'", r"\[worker\] is-loud: is a string; give true or false"),
        ("[worker]\nroot = 'a=/x'", r"\[worker\] root: is a string; give an array of strings"),
        ("[worker]\nroot = ['a=/x,b=/y']", r"\[worker\] root: 'a=/x,b=/y' holds a comma"),
        ("[worker]\nredis-url = 'redis://:pw@h'", r"in the environment as MOTET_REDIS_URL, or in a file by --redis-pa"),
        ("[worker\n", r"motet\.toml: is not valid TOML: "),
        ("[up]\nhttps = 'x'", r"\[up\] https: is not a setting of `motet up`; use http"),
        ("[up]\nhttp = 8000", r"\[up\] http: is a number; give HOST:PORT as a string"),
        ("[worker]\ndepth = {a = 1}", r"\[worker\] depth: is a table; give a string or a number"),
    ],
)
def test_what_cannot_be_used_is_refused_by_name(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(ConfigFileError) as caught:
        parsed(written(tmp_path, text), "--model", "m")
    assert re.search(says, str(caught.value)) and "pw@" not in str(caught.value), caught.value


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigFileError, match=r"--config: .*none\.toml cannot be read: No such file"):
        read(tmp_path / "none.toml")


def test_a_variable_for_a_flag_without_a_value_is_true_or_false(tmp_path: Path) -> None:
    for text, is_loud in (("1", True), ("True", True), ("on", True), ("", False), ("0", False), ("No", False)):
        assert parsed(written(tmp_path, WHOLE), environ={"MOTET_IS_LOUD": text}).is_loud is is_loud
    with pytest.raises(ValueError, match="MOTET_IS_LOUD: 'maybe' is not valid: use 1 or 0"):
        parsed(written(tmp_path, WHOLE), environ={"MOTET_IS_LOUD": "maybe"})
