"""Writes the typed classes of sampling parameters from types.proto: for servers, and for callers of the SDK.

Called by generate.py, with the fresh stubs on the import path. Type, default, bounds and help of a parameter are in its
field's option `parameter`; whoever only needs those reads the option itself.
"""

from __future__ import annotations

from typing import Any

_HEAD = '"""{title}\n\nWritten by protos/generate.py from protos/motet/v1/types.proto: change that file instead.\n"""\n'
_SERVER_HEAD = (
    _HEAD.format(title="How tokens are chosen, as the servers carry it; contract/sampling.py converts it.")
    + """
from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SamplingValues:
    \"\"\"The numbers of SamplingParams with every value in effect.\"\"\"

"""
)
_OPTIONS_HEAD = (
    _HEAD.format(title="Sampling parameters as callers give them, and as the server reports them.")
    + """
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypedDict


class SamplingOptions(TypedDict, total=False):
    \"\"\"Left out or None: the server's default.\"\"\"

"""
)
_REPORTED_HEAD = """

@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingInEffect:
    \"\"\"Sampling parameters with the values that the server used.\"\"\"

"""
_TEXTS_HEAD = """

# By name: what a parameter does, its bounds and its default.
DESCRIPTIONS = {
"""


def sources() -> dict[str, str]:
    """By path in the repository, what the generated modules contain."""
    from google.protobuf.descriptor import FieldDescriptor
    from motet.v1 import types_pb2

    server, options, reported, texts = _SERVER_HEAD, _OPTIONS_HEAD, _REPORTED_HEAD, _TEXTS_HEAD
    fields: Any = types_pb2.SamplingParams.DESCRIPTOR.fields
    for field in fields:
        option: Any = field.GetOptions().Extensions[types_pb2.parameter]
        described = _described(option, {} if field.enum_type is None else enum_names(field))
        comment = f"  # {described}\n"
        texts += f'    "{field.name}": "{described}",\n'
        name = option.attribute or field.name
        if field.message_type is not None:
            options += f"    {field.name}: Mapping[int, float]{comment}"
            continue
        kind = "float" if field.type == FieldDescriptor.TYPE_FLOAT else "int"
        default = repr(option.default_value if kind == "float" else int(option.default_value))
        server_kind, server_default = kind, default
        if field.enum_type is not None:  # callers give and get the name of a value
            kind, default = "str", f'"{enum_names(field)[int(option.default_value)]}"'
        if option.HasField("default_value"):
            server += f"    {name}: {server_kind} = {server_default}{comment}"
        else:
            server += f"    {name}: {server_kind} | None = None{comment}"
        options += f"    {field.name}: {kind} | None{comment}"
        if option.is_reported:
            # A default that no caller may give stands for "not set".
            is_value = not (option.HasField("lowest") and option.default_value < option.lowest)
            reported += f"    {field.name}: {f'{kind} = {default}' if is_value else f'{kind} | None = None'}{comment}"
    return {"contract/v1/sampling.py": server, "client/motet/v1/sampling.py": options + reported + texts + "}\n"}


def enum_names(field: Any) -> dict[int, str]:
    """Of a field that is an enum: by number what callers write, as "raw" for LOGPROBS_MODE_RAW; zero is left out."""
    prefix = field.enum_type.values_by_number[0].name.removesuffix("UNSPECIFIED")
    return {value.number: value.name.removeprefix(prefix).lower() for value in field.enum_type.values if value.number}


def _described(option: Any, names: dict[int, str]) -> str:
    """What a parameter does, its bounds and its default; `names` are those of an enum's values."""
    default = option.unset or names.get(int(option.default_value)) or f"{option.default_value:g}"
    bounds = ""
    if names:
        bounds = f", {' or '.join(names.values())}"
    elif option.HasField("lowest") and option.HasField("highest"):
        bounds = f", in {'(' if option.is_above_lowest else '['}{option.lowest:g}, {option.highest:g}]"
    elif option.HasField("highest"):
        bounds = f", at most {option.highest:g}"
    note = f"; {option.note}" if option.note else ""
    return f"{option.help}{bounds}{note} (default: {default})"
