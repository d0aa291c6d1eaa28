"""Grammars of completions that call tools, or reason before they follow a constraint, in the form of their model.

The text of such a completion is read as calls of the tools given, with arguments that are valid under their schemas, or
as content that follows the constraint. One case is not excluded: a text among the arguments that has the mark of the
call's end in it, where the parser, like transformers', ends the call. Pure, as the parser is; give the result to
generate() as `constraint=Lark(...)`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from motet.inputs.constraints import Constraint, StructuralTags
from motet.responses.arguments import GrammarError, Rules, keyword_arguments, object_arguments
from motet.responses.calls import MAX_NAME_CHARS
from motet.responses.contents import content_rule
from motet.responses.events import CallEnd, CallStart, Content
from motet.responses.finding import ResponseForm
from motet.responses.patterns import Pattern
from motet.responses.templates import CallForm, Field, Kind
from motet.responses.written import closing, opening, parts_of, quoted

_ANYTHING = "(?s:.*)"
_NO_ARGUMENTS: Mapping[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
_ANY_ARGUMENTS: Mapping[str, Any] = {"type": "object"}


@dataclass(frozen=True, slots=True)
class _Function:
    name: str
    schema: object  # of its arguments
    place: str  # of the schema, in tools


def call_grammar(
    form: ResponseForm,
    tools: Sequence[Mapping[str, Any]],
    *,
    is_required: bool,
    names: Collection[str] | None = None,
    is_parallel: bool = True,
) -> str | None:
    """Text of a Lark grammar; None if nothing has to be constrained.

    `is_required`: the completion is a call or, with `is_parallel` in a form that has several, some; reasoning may come
    before. Else calls may come within free text, and only functions with `strict` have their arguments constrained.
    `names`: the functions that may be called. Raises GrammarError, which names what cannot be expressed.
    """
    functions, is_any_strict = _functions(tools, names, is_required=is_required)
    if not is_required and not is_any_strict and names is None:
        return None
    return _Writer(form, _field_of_calls(form), functions, is_parallel=is_parallel).grammar(is_required=is_required)


def content_grammar(
    form: ResponseForm,
    constraint: Constraint,
    tools: Sequence[Mapping[str, Any]] = (),
    *,
    names: Collection[str] | None = None,
    is_parallel: bool = True,
    place: str = "constraint",
) -> str | None:
    """Text of a Lark grammar of completions whose content follows a constraint; None if `constraint` by itself says so.

    Reasoning may come before the content, and has to where the chat template begins it. With `tools`, calls may come in
    place of the content; `names` and `is_parallel` are as for call_grammar(). Raises GrammarError; `place` is what it
    calls `constraint`.
    """
    if isinstance(constraint, StructuralTags):
        if tools:
            raise GrammarError(place, "has tags in free text, which cannot stand beside tools")
        return None
    rules = Rules()
    rule = content_rule(rules, constraint, place)
    if rule is None:
        return None
    if not tools:
        thought = _Thoughts(form, rules).rule(lambda text: _is_content(form, text), space="W?")
        return rules.text(f"{thought} {rule}") if thought else None
    functions, _ = _functions(tools, names, is_required=False)
    writer = _Writer(form, _field_of_calls(form), functions, is_parallel=is_parallel, rules=rules)
    if writer.is_at_beginning:
        raise GrammarError(place, "cannot stand beside tools: this model writes calls without a mark")
    return writer.grammar(is_required=True, content=rule)


def _field_of_calls(form: ResponseForm) -> Field:
    field = next((field for field in form.template.fields.values() if field.kind is Kind.CALLS), None)
    if field is None:
        raise GrammarError("tools", "cannot be constrained: the response template of this model has no tool calls")
    return field


def _functions(
    tools: Sequence[Mapping[str, Any]], names: Collection[str] | None, *, is_required: bool
) -> tuple[list[_Function], bool]:
    """The functions that may be called, and whether one of them has `strict`."""
    found: dict[str, _Function] = {}
    all_names, is_any_strict = set(), False
    for position, tool in enumerate(tools):
        place = f"tools[{position}].function"
        function = tool.get("function") if isinstance(tool, Mapping) else None
        name = function.get("name") if isinstance(function, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(name, str) or not 0 < len(name) <= MAX_NAME_CHARS:
            raise GrammarError(place, f"is not an object with a name of 1 to {MAX_NAME_CHARS} characters")
        if name in all_names:
            raise GrammarError(
                f"{place}.name", f"is {name[:64]!r}, as that of another one; give each a name of its own"
            )
        all_names.add(name)
        strict, schema = function.get("strict"), function.get("parameters")
        if strict is not None and not isinstance(strict, bool):
            raise GrammarError(f"{place}.strict", "is neither true nor false")
        if names is not None and name not in names:
            continue
        is_any_strict = is_any_strict or bool(strict)
        is_constrained = strict or (is_required and strict is None)
        schema = _NO_ARGUMENTS if schema is None else schema
        found[name] = _Function(name, schema if is_constrained else _ANY_ARGUMENTS, f"{place}.parameters")
    if missing := [name for name in names or () if name not in found]:
        raise GrammarError("tool_choice", f"names the function {missing[0][:64]!r}, which tools does not have")
    if not found:
        raise GrammarError("tools", "has no function to call; give one")
    return list(found.values()), is_any_strict


class _Writer:
    """Writes one grammar."""

    def __init__(
        self,
        form: ResponseForm,
        field: Field,
        functions: Sequence[_Function],
        *,
        is_parallel: bool,
        rules: Rules | None = None,
    ) -> None:
        open_mark, close_mark = opening(field), closing(field)
        if field.open is None or field.call is None or open_mark is None or close_mark is None:
            raise GrammarError("tools", "cannot be constrained: a mark of this model's response template has no text")
        self._form = form
        self._pattern, self._open, self._close = field.open, open_mark, close_mark.text + close_mark.rest
        self._call: CallForm = field.call
        self._functions = functions
        self._rules = Rules() if rules is None else rules
        self._thoughts = _Thoughts(form, self._rules)
        # A form that has all calls in one field, or each in its own.
        self._has_list = self._call.is_list or self._call.syntax == "pythonic"
        before = self._thoughts.close if self._thoughts.has_begun else ""
        for function in functions:
            if not self._is_read(before, [function.name]):
                raise GrammarError(
                    function.place.rpartition(".")[0],
                    f"{function.name[:64]!r} cannot be called in the form of this model's response template",
                )
        self._has_several = is_parallel and self._is_read(before, [functions[0].name] * 2)

    @property
    def is_at_beginning(self) -> bool:
        """Whether a call is recognised at the beginning of a completion alone, and by no mark."""
        return self._open.is_at_beginning

    def grammar(self, *, is_required: bool, content: str = "") -> str:
        """The whole grammar. `content`: the rule of content that may be there in place of calls that are required."""
        for position, function in enumerate(self._functions):
            self._rules.rule(f"call_{position}", self._value(f"args_{position}", function))
        thought = self._thoughts.rule(lambda text: self._is_read(text, [self._functions[0].name]))
        if is_required:
            repeated = "calls (W? calls)*" if self._has_several and not self._has_list else "calls"
            self._rules.rule("calls", self._fields(has_begun=False))
            return self._rules.text(f"{thought} W? ({repeated} | {content})" if content else f"{thought} W? {repeated}")
        if self._open.is_at_beginning:
            # A text that begins as a call does is one.
            first = r"\[\s*[A-Za-z_][A-Za-z_0-9.]*\s*\(" if self._call.syntax == "pythonic" else r"[\{\[]"
            self._rules.rule("calls", self._fields(has_begun=False))
            self._rules.rule("TEXT", f"/{_ANYTHING}/ & ~/(?:{_bare(self._pattern)})\\s*{first}{_ANYTHING}/")
            return self._rules.text(f"{thought} (W? calls | TEXT)")
        self._rules.rule("calls", self._fields(has_begun=True))
        self._rules.rule("TEXT", _without(self._pattern))
        begun = _until(self._rules, "begun", "TEXT", parts_of(self._open.text, self._form.mark_tokens))
        return self._rules.text(f"{thought} ({begun} calls){'*' if self._has_several else '?'} TEXT")

    def _fields(self, *, has_begun: bool) -> str:
        """A field with a call, or with all of them. `has_begun`: after the text that its opening mark begins with."""
        tokens = self._form.mark_tokens
        begin = [] if has_begun else parts_of(self._open.text, tokens)
        values = [(quoted(function.name), f"call_{position}") for position, function in enumerate(self._functions)]
        if self._has_list:
            item = self._rules.rule("item", " | ".join(value for _, value in values))
            more = f'(W? "," W? {item})*' if self._has_several else ""
            values = [("", f'"[" W? {item} {more} W? "]"')]
        alternatives = []
        for name, value in values:
            named = [name] if self._call.name_group is not None else []
            mark = [*begin, *named, *parts_of(self._open.rest, tokens)]
            close = ["W?", *parts_of(self._close, tokens)] if self._close else []
            alternatives.append(" ".join([*mark, *(["W?"] if mark else []), value, *close]))
        return " | ".join(alternatives)

    def _value(self, name: str, function: _Function) -> str:
        """One call, without marks."""
        if self._call.syntax == "pythonic":
            arguments = keyword_arguments(self._rules, name, function.schema, function.place)
            return (
                f'{quoted(function.name)} "(" W? {arguments} W? ")"' if arguments else f'{quoted(function.name)} "()"'
            )
        arguments = object_arguments(self._rules, name, function.schema, function.place)
        if self._call.name_key is None or self._call.arguments_key is None:
            return arguments
        parts = ["{", _text(self._call.name_key), ":", _text(function.name), ",", _text(self._call.arguments_key), ":"]
        return f'{" W? ".join(map(quoted, parts))} W? {arguments} W? "}}"'

    def _is_read(self, before: str, names: Sequence[str]) -> bool:
        """Whether calls without arguments are read as what they are."""
        call = self._call
        if call.syntax == "pythonic":
            values = [f"{name}()" for name in names]
        elif call.name_key is None or call.arguments_key is None:
            values = ["{}"] * len(names)
        else:
            values = [json.dumps({call.name_key: name, call.arguments_key: {}}) for name in names]
        has_name = call.name_group is not None
        if self._has_list:
            names_of, values = [""], [f"[{', '.join(values)}]"]
        else:
            names_of = list(names)
        marks = [self._open.around(name, has_name=has_name) for name in names_of]
        text = "".join(f"{mark}{value}{self._close}" for mark, value in zip(marks, values, strict=True))
        parser = self._form.parser()
        events = parser.push(before + text) + parser.finish()
        started = [event.name for event in events if isinstance(event, CallStart)]
        ended = [event.is_complete for event in events if isinstance(event, CallEnd)]
        return started == list(names) and all(ended) and not any(isinstance(event, Content) for event in events)


class _Thoughts:
    """The reasoning before calls or content, as a form has it."""

    def __init__(self, form: ResponseForm, rules: Rules) -> None:
        self.has_begun = form.parser().is_reasoning  # in the prompt
        self.close = ""  # the closing mark; empty: there is no reasoning, or its mark cannot be written
        self._rules = rules
        self._tokens = form.mark_tokens
        self._field = next((each for each in form.template.fields.values() if each.kind is Kind.REASONING), None)
        if self._field is not None and self._field.close is not None:
            mark = closing(self._field)
            self.close = "" if mark is None else mark.text

    def rule(self, is_read: Callable[[str], bool], *, space: str = "") -> str:
        """What the prompt began, or what begins with a token of its own; empty: there is nothing of the kind.

        `is_read`: whether what follows is read as what it is after this text. `space` is written after reasoning.
        """
        field = self._field
        if field is None or field.close is None or not self.close:
            return ""
        begin = [] if self.has_begun else parts_of(_written_open(field), self._tokens)
        is_token = len(begin) == 1 and begin[0].startswith("<[")
        if not self.has_begun and not (is_token and is_read(_written_open(field) + self.close)):
            return ""
        self._rules.rule("THOUGHT", _without(field.close))
        ended = f"{_until(self._rules, 'thought', 'THOUGHT', parts_of(self.close, self._tokens))} {space}".rstrip()
        return ended if self.has_begun else f"({begin[0]} {ended})?"


def _until(rules: Rules, name: str, text: str, mark: list[str]) -> str:
    """Text that ends with a mark. A mark that begins with a token of its own cannot begin within the text."""
    if mark[0].startswith("<["):
        return " ".join([f"{text}?", *mark])
    return " ".join([rules.lazy(name, f"/{_ANYTHING}/ {mark[0]}"), *mark[1:]])


def _is_content(form: ResponseForm, before: str) -> bool:
    """Whether a text after `before` is read as content."""
    parser = form.parser()
    events = parser.push(f"{before}a") + parser.finish()
    return "".join(event.text for event in events if isinstance(event, Content)) == "a"


def _text(value: str) -> str:
    return json.dumps(value, ensure_ascii=False)


def _written_open(field: Field) -> str:
    mark = opening(field)
    return "" if mark is None else mark.text + mark.rest


def _without(pattern: Pattern) -> str:
    """Any text that the pattern does not occur in."""
    return f"/{_ANYTHING}/ & ~/{_ANYTHING}(?:{_bare(pattern)}){_ANYTHING}/"


def _bare(pattern: Pattern) -> str:
    """The pattern as an expression of a grammar."""
    source = pattern.source.removeprefix("\\A")
    for name in pattern.names:
        source = source.replace(f"(?P<{name}>", "(?:")
    source = source.replace("\\\n", "\\n").replace("\n", "\\n")
    return source.replace("\\/", "/").replace("/", "\\/")
