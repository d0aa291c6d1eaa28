"""Which tools a completion may call, and which it has to: `tool_choice`, and functions with `strict`."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from motet.inputs.constraints import Constraint
from motet.responses import GrammarError, ResponseForm, call_grammar, content_grammar

from gateway.openai.errors import FieldRefusal, refused

_SCHEMA_IN_LINE = re.compile(r"the JSON schema in line (\d+): (.*)", re.DOTALL)
_ARGUMENTS_RULE = re.compile(r"args_(\d+)(?:_(\d+)_value)?: %json")  # as motet.responses names them
_OWN_LINES = " 1 | start: "  # begins the grammar in a message about it
_PLACES = re.compile(r"(at )?(?:\d+\(\d+\): )*(\d+)\((\d+)\): ")
_FORMS = "'none', 'auto', 'required', a function by name, or allowed_tools"


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """What a request says. Without tools nothing is called."""

    is_offered: bool = False  # the tools are in the prompt, and calls are read
    is_required: bool = False
    names: tuple[str, ...] | None = None  # of the functions that may be called; None: all of them
    is_named: bool = False  # one function, by its name: then one call is made


def tool_choice_of(given: object, tools: Sequence[Mapping[str, Any]] | None) -> ToolChoice:
    """Of a body, in the form of chats or of responses. Raises Refusal."""
    if given in (None, "auto", "none"):
        return ToolChoice(is_offered=bool(tools) and given != "none")
    choice = None
    if given == "required":
        choice = ToolChoice(is_offered=True, is_required=True)
    elif isinstance(given, Mapping) and given.get("type") == "function":
        choice = ToolChoice(is_offered=True, is_required=True, names=(_name(given),), is_named=True)
    elif isinstance(given, Mapping) and given.get("type") == "allowed_tools":
        allowed = given.get("allowed_tools", given)
        mode = allowed.get("mode") if isinstance(allowed, Mapping) else None
        listed = allowed.get("tools") if isinstance(allowed, Mapping) else None
        if mode in ("auto", "required") and isinstance(listed, list) and listed:
            names = tuple(_name(each) for each in listed)
            choice = ToolChoice(is_offered=True, is_required=mode == "required", names=names)
    if choice is None:
        raise refused("tool_choice", f"is not one of {_FORMS}")
    if not tools:
        raise refused("tool_choice", "has no tools to choose from; give tools")
    return choice


def grammar_of(
    choice: ToolChoice, tools: Sequence[Mapping[str, Any]], form: ResponseForm | None, *, is_parallel: bool
) -> str | None:
    """The grammar that the completion follows, if it has to follow one. Raises Refusal."""
    is_strict = any(_is_strict(tool) for tool in tools)
    if not choice.is_offered or not (choice.is_required or choice.names is not None or is_strict):
        return None
    if form is None:
        raise refused(
            "tool_choice" if choice.is_required or choice.names is not None else "tools",
            "cannot be kept: nothing says how this model writes tool calls; give its tokenizer_config.json a "
            "response_template, or leave out tool_choice and strict",
        )
    try:
        return call_grammar(
            form,
            tools,
            is_required=choice.is_required,
            names=choice.names,
            is_parallel=is_parallel and not choice.is_named,
        )
    except GrammarError as error:
        raise FieldRefusal(str(error), param=error.field) from error


def grammar_of_content(
    constraint: Constraint,
    field: str,
    choice: ToolChoice,
    tools: Sequence[Mapping[str, Any]],
    form: ResponseForm | None,
    *,
    is_parallel: bool,
) -> str | None:
    """The grammar of a completion that follows `constraint`, of the body's field `field`, or calls tools in its place.

    None: `constraint` by itself says all. Raises Refusal.
    """
    if form is None:
        if choice.is_offered:
            raise refused(
                field, "cannot be kept beside tools: nothing says how this model writes tool calls; leave out tools"
            )
        return None
    offered = tools if choice.is_offered else ()
    try:
        return content_grammar(form, constraint, offered, names=choice.names, is_parallel=is_parallel, place=field)
    except GrammarError as error:
        raise FieldRefusal(str(error), param=error.field) from error


def refusal_of_grammar(
    message: str, grammar: str, choice: ToolChoice, tools: Sequence[Mapping[str, Any]], field: str
) -> FieldRefusal:
    """Motet's refusal of a grammar that was written here: the caller wrote schemas, and reads which one is wrong.

    `field`: what is wrong if no schema of a tool is.
    """
    found = _SCHEMA_IN_LINE.search(message)
    rule = _ARGUMENTS_RULE.match(grammar.splitlines()[int(found[1]) - 1]) if found else None
    if found is None or rule is None:
        return refused(field, found[2] if found else _without_own_lines(message))
    callable_tools = [
        (place, tool) for place, tool in enumerate(tools) if choice.names is None or _name(tool) in choice.names
    ]
    place, tool = callable_tools[int(rule[1])]
    param = f"tools[{place}].function.parameters"
    if rule[2]:  # keyword arguments have a schema each
        param += f".properties.{list(tool['function']['parameters']['properties'])[int(rule[2])]}"
    return refused(param, found[2])


def _without_own_lines(message: str) -> str:
    """What is said about a constraint, without the lines around it, which the caller did not write.

    "4(2): 3(7): Expected ... 1 | start: ..." is about the caller's line 1: the second line begins the rule around it.
    """
    reason, has_lines, _ = message.removeprefix("constraint.lark: ").partition(_OWN_LINES)
    places = _PLACES.match(reason)
    if not has_lines or places is None:
        return reason
    line, column = int(places[2]) - 2, places[3]
    return (f"{line}({column}): " if line > 0 else "") + reason[places.end() :]


def _name(given: object) -> str:
    function = given.get("function", given) if isinstance(given, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str):
        raise refused("tool_choice", "has a function without a name")
    return name


def _is_strict(tool: object) -> bool:
    function = tool.get("function") if isinstance(tool, Mapping) else None
    return isinstance(function, Mapping) and function.get("strict") not in (None, False)
