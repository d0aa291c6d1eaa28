"""Flags of a server process, each defined once: as a field of its configuration, a dataclass, made by `setting`.

The command line, --help, the MOTET_* variables of the environment and the checks of bounds and choices follow from the
fields; tests/contract/test_flags.py compares docs/operations.md with them.
"""

from __future__ import annotations

import argparse
import os
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import Any, get_args, get_type_hints

from contract.redaction import has_password

_BINARY_UNITS = (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10))


@dataclass(frozen=True, slots=True, kw_only=True)
class Flag:
    """What a field of a configuration says beside its name, type and default."""

    help: str  # what it sets
    unit: str = ""  # of its value, in words
    shown_default: str = ""  # in words, where the default does not say it
    flag_default: str = ""  # of the flag alone: whoever makes a configuration otherwise has to say
    name: str = ""  # where it is not the field's
    metavar: str | None = None
    parse: Callable[[str], Any] | None = None  # a value from text; None: the field's type
    lowest: float | None = None
    highest: float | None = None
    choices: Sequence[str] = ()
    is_repeatable: bool = False  # a tuple of values, in the environment separated by commas
    # A URL that may hold a password: refused with one on the command line, which every user of the machine can read.
    is_secret_url: bool = False
    password_flag: str = ""  # of such a URL: the flag that names a file with the password


def setting(
    help: str,
    default: Any = MISSING,
    *,
    factory: Callable[[], Any] | None = None,
    **more: Any,
) -> Any:
    """A field of a configuration that a flag sets; `more` are fields of Flag. Without a default it is required."""
    flag = Flag(help=help, **more)
    given: dict[str, Any] = {"metadata": {"flag": flag}, "repr": not flag.is_secret_url}
    if factory is not None:
        return field(default_factory=factory, **given)
    return field(**given) if default is MISSING else field(default=default, **given)


def group(config_class: type[Any]) -> Any:
    """A field that is a configuration of its own: its flags are flags of the outer configuration, too."""
    return field(default_factory=config_class, metadata={"group": config_class})


def groups_of(config_class: type[Any]) -> dict[str, type[Any]]:
    """The configurations that are part of this one, by field."""
    return {item.name: item.metadata["group"] for item in fields(config_class) if "group" in item.metadata}


def flags_of(config_class: type[Any]) -> dict[str, Flag]:
    """The flags of a configuration by field, without those of its groups."""
    return {item.name: item.metadata["flag"] for item in fields(config_class) if "flag" in item.metadata}


def flag_of(config_class: type[Any], name: str) -> str:
    """The flag that sets a field."""
    flag = flags_of(config_class).get(name)
    return flag.name if flag is not None and flag.name else "--" + name.replace("_", "-")


def variable_of(flag: str) -> str:
    """The environment variable that stands for a flag."""
    return "MOTET_" + flag.strip("-").upper().replace("-", "_")


def shown_default(config_class: type[Any], name: str) -> str:
    """A flag's default for people; empty: the flag is required."""
    flag = flags_of(config_class)[name]
    value = _default(config_class, name)
    if flag.shown_default or value is MISSING:
        return flag.shown_default
    if isinstance(value, bool) or value is None:
        return "off"
    if flag.unit == "bytes":
        return next(
            (f"{value // size}{unit}" for unit, size in _BINARY_UNITS if value and value % size == 0), f"{value}"
        )
    return f"{value:g}" if isinstance(value, float) else str(value)


def optional_path(text: str) -> Path | None:
    """The type of a flag that names a file or folder; an empty variable of the environment names none."""
    return Path(text) if text else None


def add_arguments(
    parser: argparse.ArgumentParser, config_class: type[Any], environ: Mapping[str, str] = os.environ
) -> None:
    """Add the flag of every field. MOTET_<FLAG> in `environ` is a flag's default."""
    for name, flag in flags_of(config_class).items():
        _add_argument(parser, config_class, name, flag, environ)
    for inner in groups_of(config_class).values():
        add_arguments(parser, inner, environ)


def from_args(namespace: argparse.Namespace, config_class: type[Any]) -> Any:
    """The configuration that the command line and the environment describe."""
    values = {name: getattr(namespace, name) for name in flags_of(config_class)}
    for name, flag in flags_of(config_class).items():
        if flag.is_repeatable and flag.parse is not None:
            values[name] = tuple(map(flag.parse, values[name]))
    values |= {name: from_args(namespace, inner) for name, inner in groups_of(config_class).items()}
    return config_class(**values)


def find_mistake(config: Any) -> str | None:
    """The first value out of its bounds or choices: flag, value and limit. None if there is none."""
    for name, flag in flags_of(type(config)).items():
        value, called = getattr(config, name), flag_of(type(config), name)
        if value is None:
            continue
        if flag.lowest is not None and not value >= flag.lowest:  # NaN fails this too
            return f"{called}: {value} is below {flag.lowest:g}"
        if flag.highest is not None and value > flag.highest:
            return f"{called}: {value} is above {flag.highest:.0f}"
        if flag.choices and value not in flag.choices:
            return f"{called}: {value!r} is not valid: use one of {', '.join(flag.choices)}"
    return None


def _default(config_class: type[Any], name: str) -> Any:
    """What an absent flag sets; MISSING if the flag is required."""
    (item,) = (item for item in fields(config_class) if item.name == name)
    if item.default_factory is not MISSING:
        return item.default_factory()
    return item.metadata["flag"].flag_default or item.default


def _add_argument(
    parser: argparse.ArgumentParser, config_class: type[Any], name: str, flag: Flag, environ: Mapping[str, str]
) -> None:
    called, default = flag_of(config_class, name), _default(config_class, name)
    text = environ.get(variable_of(called))
    kind = type_of(config_class, name)
    about, unit = flag.help, f", {flag.unit}{' with KiB/MiB/GiB' if flag.unit == 'bytes' else ''}" if flag.unit else ""
    head, semicolon, rest = about.partition(";")
    about = f"{head}{unit}{semicolon}{rest}"
    about += " (required)" if default is MISSING else f" (default: {shown_default(config_class, name)})"
    if kind is bool:
        is_set = _truth(called, text or "")
        parser.add_argument(called, dest=name, action="store_true", default=is_set, help=about)
    elif flag.is_repeatable:
        items = [item for item in (text or "").split(",") if item]
        about = about.replace(" (default", "; repeatable, in the environment separated by commas (default")
        parser.add_argument(called, dest=name, action="append", metavar=flag.metavar, default=items, help=about)
    else:
        given = text if text is not None else (None if default is MISSING else default)
        parser.add_argument(
            called,
            dest=name,
            action=_storing_url(flag.password_flag) if flag.is_secret_url else "store",
            type=flag.parse or kind,
            default=given,
            required=default is MISSING and text is None,
            metavar=flag.metavar,
            help=about,
        )


def _truth(called: str, text: str) -> bool:
    """What a variable says of a flag without a value. Raises ValueError."""
    if text.lower() in ("1", "true", "yes", "on"):
        return True
    if text.lower() in ("", "0", "false", "no", "off"):
        return False
    raise ValueError(f"{variable_of(called)}: {text!r} is not valid: use 1 or 0")


def _storing_url(password_flag: str) -> type[argparse.Action]:
    """What takes a URL without a password. Called for what stands on the command line, not for the environment."""

    class StoreUrl(argparse.Action):
        def __call__(self, _parser: Any, namespace: argparse.Namespace, values: Any, _option: Any = None) -> None:
            if has_password(values):
                instead = f"give the URL in the environment variable {variable_of(self.option_strings[0])}"
                if password_flag:
                    instead += f", or the password in a file by {password_flag}"
                raise argparse.ArgumentError(
                    self, f"its password would be shown to every user of this machine, as arguments are; {instead}"
                )
            setattr(namespace, self.dest, values)

    return StoreUrl


def type_of(config_class: type[Any], name: str) -> Any:
    """The type of a field's value where the value is not None."""
    hint = get_type_hints(config_class)[name]
    if isinstance(hint, types.UnionType):
        (hint,) = (part for part in get_args(hint) if part is not type(None))
    return hint
