"""`--config FILE`: settings of every part in one TOML file. A flag wins over the environment, and that over the file.

    [common]                # flags that control plane and worker both have; the gateway takes those that it has, too
    model = "/models/base"

    [control-plane]         # also [worker] and [gateway]; [up] has `http`
    listen = "0.0.0.0:50051"
    adapter-root = ["models=/srv/adapters"]

A key is a flag without its dashes. Every key and every value is checked; a table or key that nothing reads is refused.
"""

from __future__ import annotations

import argparse
import difflib
import os
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from contract.redaction import has_password
from contract.settings.flags import Flag, flag_of, flags_of, groups_of, type_of, variable_of

FLAG = "--config"
COMMON, CONTROL_PLANE, WORKER, GATEWAY, UP = "common", "control-plane", "worker", "gateway", "up"
UP_KEYS = ("http",)

Tables = Mapping[str, Mapping[str, Any]]


class ConfigFileError(ValueError):
    """The file cannot be used; names the file, the table, the key, the value and what to write."""


def add_argument(parser: argparse.ArgumentParser, environ: Mapping[str, str]) -> None:
    """Declare --config, so that --help has it; `environment` has read the file by then."""
    parser.add_argument(
        FLAG,
        metavar="FILE",
        default=environ.get(variable_of(FLAG)) or None,
        help="TOML file with settings; flags and the environment win over it (default: none)",
    )


def environment(
    argv: Sequence[str], part: str, config_class: type[Any], environ: Mapping[str, str] = os.environ
) -> Mapping[str, str]:
    """`environ`, and what the file of --config in `argv` says for one part where it says nothing.

    Raises ConfigFileError.
    """
    path = path_of(argv, environ)
    return environ if path is None else {**variables(path, part, config_class), **environ}


def path_of(argv: Sequence[str], environ: Mapping[str, str] = os.environ) -> Path | None:
    """The file that a command line, or MOTET_CONFIG, names."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument(FLAG)
    given: str | None = parser.parse_known_args(list(argv))[0].config
    named = given if given is not None else environ.get(variable_of(FLAG))
    return Path(named) if named else None


def variables(path: Path, part: str, config_class: type[Any]) -> dict[str, str]:
    """What the file says for one part, as variables of the environment. Raises ConfigFileError."""
    tables = read(path)
    known = _flags(config_class)
    found: dict[str, str] = {}
    for table in (COMMON, part):
        for key, value in tables.get(table, {}).items():
            place = f"{path}: [{table}] {key}"
            if (flag := known.get(key)) is None:
                if table == COMMON and part == GATEWAY:  # the two others check it
                    continue
                raise ConfigFileError(f"{place}: is not a flag of the {part.replace('-', ' ')}; {_advice(key, known)}")
            found[variable_of(f"--{key}")] = _text(value, *flag, place)
    return found


def read(path: Path) -> Tables:
    """The tables of a file, by name. Raises ConfigFileError if it is not TOML of this form."""
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigFileError(f"{FLAG}: {path} cannot be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigFileError(f"{path}: is not valid TOML: {error}") from error
    tables = (COMMON, CONTROL_PLANE, WORKER, GATEWAY, UP)
    for name, table in content.items():
        if name not in tables:
            raise ConfigFileError(f"{path}: {name}: is not a table of this file; use {', '.join(tables)}")
        if not isinstance(table, dict):
            raise ConfigFileError(f"{path}: {name}: is {_kind(table)}; write [{name}] and its settings below")
    for key, value in content.get(UP, {}).items():
        if key not in UP_KEYS:
            raise ConfigFileError(
                f"{path}: [{UP}] {key}: is not a setting of `motet up`; use {', '.join(UP_KEYS)}; settings of "
                f"its gateway, such as processes, are in [{GATEWAY}]"
            )
        if not isinstance(value, str):
            raise ConfigFileError(f"{path}: [{UP}] {key}: is {_kind(value)}; give HOST:PORT as a string")
    return content


def _flags(config_class: type[Any]) -> dict[str, tuple[Flag, Any]]:
    """Each flag and the type of its value, by the key in the file."""
    known = {
        flag_of(config_class, name).lstrip("-"): (flag, type_of(config_class, name))
        for name, flag in flags_of(config_class).items()
    }
    for inner in groups_of(config_class).values():
        known |= _flags(inner)
    return known


def _text(value: Any, flag: Flag, kind: Any, place: str) -> str:
    """A value as the variable of the environment would have it."""
    if kind is bool:
        if not isinstance(value, bool):
            raise ConfigFileError(f"{place}: is {_kind(value)}; give true or false")
        return "true" if value else "false"
    if flag.is_repeatable:
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise ConfigFileError(f"{place}: is {_kind(value)}; give an array of strings")
        if bad := next((item for item in value if not item or "," in item), None):
            raise ConfigFileError(f"{place}: {bad!r} holds a comma, which separates values; leave it out")
        return ",".join(value)
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise ConfigFileError(f"{place}: is {_kind(value)}; give a string or a number")
    text = str(value)
    if flag.is_secret_url and has_password(text):
        instead = f", or in a file by {flag.password_flag}" if flag.password_flag else ""
        variable = variable_of("--" + place.rpartition(" ")[2])
        raise ConfigFileError(f"{place}: holds a password; give the URL in the environment as {variable}{instead}")
    try:
        (flag.parse or kind)(text)
    except (ValueError, TypeError, argparse.ArgumentTypeError) as error:
        said = str(error) if isinstance(error, argparse.ArgumentTypeError) else f"{text!r} is not {_article(kind)}"
        raise ConfigFileError(f"{place}: {said}") from error
    return text


def _advice(key: str, known: Mapping[str, object]) -> str:
    if key.replace("_", "-") in known:
        return f"write {key.replace('_', '-')}"
    near = difflib.get_close_matches(key, known, n=1)
    return f"did you mean {near[0]}?" if near else "docs/operations.md lists the flags"


def _article(kind: Any) -> str:
    return {int: "a whole number", float: "a number"}.get(kind, f"a valid {getattr(kind, '__name__', 'value')}")


def _kind(value: Any) -> str:
    names = {dict: "a table", list: "an array", bool: "true or false", str: "a string", int: "a number"}
    return names.get(type(value), f"a {type(value).__name__}")
