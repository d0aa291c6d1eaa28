"""The table of sampling parameters, from the options of motet.v1.SamplingParams, and both conversions of their values.

The API checks requests by the table, the plan stream carries values as the message, and the worker checks what arrives.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from motet.v1 import types_pb2

from contract.v1.sampling import SamplingValues

MAX_PRIORITY = 100  # of a request, either sign


@dataclass(frozen=True, slots=True)
class Parameter:
    """One number of SamplingParams."""

    name: str  # of the message's field, as clients know it
    attribute: str  # of SamplingValues
    is_float: bool  # else a count, or the seed
    default: float | int | None  # in effect where it is unset
    note: str  # a value with a meaning of its own, for people; empty: none
    unset: str  # what an unset parameter means, for people; empty: the default says it
    lowest: float | None  # bounds as float32, None for none
    highest: float | None
    is_above_lowest: bool  # the lowest value itself is not allowed
    is_at_most_vocabulary: bool
    choices: tuple[str, ...] = ()  # of an enum: names of the values from 1 on, as callers write them

    def is_valid(self, value: float) -> bool:
        """Whether the value is within the bounds; NaN never is."""
        if self.lowest is not None and not (value > self.lowest if self.is_above_lowest else value >= self.lowest):
            return False
        return self.highest is None or value <= self.highest


def _names(field: Any) -> tuple[str, ...]:
    prefix = field.enum_type.values_by_number[0].name.removesuffix("UNSPECIFIED")
    return tuple(value.name.removeprefix(prefix).lower() for value in field.enum_type.values if value.number)


def _option(field: Any) -> Any:
    return field.GetOptions().Extensions[types_pb2.parameter]


def _parameter(field: Any) -> Parameter:
    option = _option(field)
    is_float = field.type == FieldDescriptor.TYPE_FLOAT
    default = option.default_value if is_float else int(option.default_value)
    return Parameter(
        name=field.name,
        attribute=option.attribute or field.name,
        is_float=is_float,
        default=default if option.HasField("default_value") else None,
        note=option.note,
        unset=option.unset,
        lowest=option.lowest if option.HasField("lowest") else None,
        highest=option.highest if option.HasField("highest") else None,
        is_above_lowest=option.is_above_lowest,
        is_at_most_vocabulary=option.is_at_most_vocabulary,
        choices=_names(field) if field.enum_type is not None else (),
    )


_FIELDS = types_pb2.SamplingParams.DESCRIPTOR.fields_by_name
PARAMETERS = tuple(_parameter(field) for field in _FIELDS.values() if field.message_type is None)
_BIAS: Any = _option(_FIELDS["logit_bias"])  # the one parameter that is not a number
MIN_BIAS, MAX_BIAS = _BIAS.lowest, _BIAS.highest

_NAMES = tuple((item.name, item.attribute, item.default) for item in PARAMETERS)
_ATTRIBUTES = {item.name: item.attribute for item in PARAMETERS}


def to_message(values: SamplingValues) -> types_pb2.SamplingParams:
    """The message with every number that is not the default."""
    given = {name: value for name, attribute, default in _NAMES if (value := getattr(values, attribute)) != default}
    return types_pb2.SamplingParams(**given)


def from_message(message: types_pb2.SamplingParams) -> dict[str, Any]:
    """The numbers that are set, by the attributes of SamplingValues."""
    return {_ATTRIBUTES[field.name]: value for field, value in message.ListFields() if field.name in _ATTRIBUTES}


# What a grammar may take, the same where it is checked and where it is followed.
# Arguments of llguidance's LLParserLimits, counts without unit: fuel is work of the lexer, items are of the parser.
GRAMMAR_LIMITS: dict[str, Any] = {
    "max_items_in_row": 2_000,
    "initial_lexer_fuel": 1_000_000,
    "step_lexer_fuel": 200_000,
    "step_max_items": 200_000,
    "max_lexer_states": 50_000,
    "max_grammar_size": 500_000,
}
# Those used last, which a worker keeps and the control plane does not send again. Rows that begin in one plan may need
# more.
MAX_GRAMMARS = 256
MAX_VOCABULARIES = 8  # about 50 MB each for 128,000 tokens
MAX_GRAMMAR_BYTES = 256 << 10  # of a grammar as it is sent
MAX_TOKENIZER_BYTES = 48 << 20  # of a tokenizer as it is sent
