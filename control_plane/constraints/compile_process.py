"""Checks constraints for the server: `python -m control_plane.constraints.compile_process`, run by `compiler.py`.

A process of its own, so that a grammar that takes too long, or all memory, ends alone. Standard input is a socket: one
frame with the vocabulary comes in, then one for each constraint, and each is answered by one frame. The kernel kills
the process by SIGPROF when a constraint takes more CPU time than it may.
"""

from __future__ import annotations

import json
import re
import signal
import socket
import sys
from typing import Any

import llguidance

from contract.sampling import GRAMMAR_LIMITS, MAX_GRAMMAR_BYTES
from control_plane.constraints.schema_refusals import NO_TEXT, explained, explained_in_grammar, explained_in_tags
from control_plane.framed_child.frames import limit_memory, read_frame, write_frame

# Whitespace between two parts of JSON is optional and bounded: a model cannot go on with it for ever.
_JSON_OPTIONS: Any = {"whitespace_flexible": True, "whitespace_pattern": r"[ \n\r\t]{0,20}"}

_ATTRIBUTES = re.compile(r"^[ \t]*[?!]*(\w+)[ \t]*\[([^\]\n]*)\][ \t]*:", re.MULTILINE)
_TEMPERATURE = re.compile(r"(?:^|,)\s*temperature\s*=")


def main() -> int:
    """Check constraints until the server closes the socket."""
    with socket.socket(fileno=sys.stdin.fileno()) as sock, sock.makefile("rwb") as stream:
        setup = json.loads(read_frame(stream) or "{}")
        try:
            vocabulary = llguidance.LLTokenizer(
                setup["tokenizer"], n_vocab=setup["num_tokens"], eos_token=setup["end_token_ids"]
            )
        except ValueError as error:
            write_frame(stream, str(error), is_result=False)
            return 1
        limit_memory(int(setup["memory_limit_bytes"]))
        write_frame(stream, "", is_result=True)
        while (request := read_frame(stream)) is not None:
            signal.setitimer(signal.ITIMER_PROF, float(setup["cpu_limit_s"]))
            try:
                text, is_grammar = compiled(json.loads(request), vocabulary), True
            except ValueError as error:
                text, is_grammar = str(error), False
            except MemoryError:
                text, is_grammar = f"takes more than {setup['memory_limit_bytes'] >> 20} MiB to be compiled", False
            signal.setitimer(signal.ITIMER_PROF, 0.0)
            write_frame(stream, text, is_result=is_grammar)
    return 0


def compiled(constraint: dict[str, Any], vocabulary: llguidance.LLTokenizer) -> str:
    """The grammar of a constraint as llguidance reads it. Raises ValueError with its reason."""
    try:
        return _compiled(constraint, vocabulary)
    except ValueError as error:
        raise ValueError(_explained(str(error), constraint)) from error


def _explained(reason: str, constraint: dict[str, Any]) -> str:
    """llguidance's reason for whoever wrote the schema that it is about."""
    kind = constraint["kind"]
    if kind == "lark":
        return explained_in_grammar(reason, constraint["value"])
    try:
        if kind == "structural_tags":
            return explained_in_tags(reason, grammar_of(constraint))
        return explained(reason, json.loads(constraint["value"])) if kind == "json_schema" else reason
    except (ValueError, RecursionError):  # no schema at all
        return reason


def _compiled(constraint: dict[str, Any], vocabulary: llguidance.LLTokenizer) -> str:
    grammar = grammar_of(constraint)
    if len(grammar.encode()) > MAX_GRAMMAR_BYTES:
        raise ValueError(f"the grammar has {len(grammar.encode())} bytes; at most {MAX_GRAMMAR_BYTES} are allowed")
    limits = llguidance.LLParserLimits(**GRAMMAR_LIMITS)
    is_error, messages = llguidance.LLMatcher.validate_grammar_with_warnings(grammar, vocabulary, limits=limits)
    if is_error or messages:
        raise ValueError("; ".join(messages))
    matcher = llguidance.LLMatcher(vocabulary, grammar, log_level=0, limits=limits)
    mask = matcher.compute_bitmask() if not matcher.is_error() else b""
    if matcher.is_error():
        # This one comes without a sentence: no token begins a text, and none ends it.
        error = matcher.get_error()
        raise ValueError(NO_TEXT if error.startswith("NoExtensionBias") else error)
    if not any(mask):
        raise ValueError("it allows no token of this model's vocabulary to begin with")
    return grammar


def grammar_of(constraint: dict[str, Any]) -> str:
    """The grammar of one form of constraint. Raises ValueError."""
    kind, value = constraint["kind"], constraint["value"]
    matcher = llguidance.LLMatcher
    if kind == "json_object":
        return matcher.grammar_from_json_schema({"type": "object"}, overrides=_JSON_OPTIONS)
    if kind == "json_schema":
        return matcher.grammar_from_json_schema(_schema_of(value), overrides=_JSON_OPTIONS)
    if kind == "regex":
        return matcher.grammar_from_regex(value)
    if kind == "choices":
        return matcher.grammar_from_lark("start: " + " | ".join(_quoted(text) for text in value))
    if kind == "lark":
        return matcher.grammar_from_lark(_checked_lark(value))
    tags = [
        llguidance.StructTag(
            trigger=tag["trigger"],
            begin=tag["begin"],
            grammar=_checked_lark(tag["lark"]) if "lark" in tag else json.dumps(_schema_of(tag["json_schema"])),
            end=tag["end"],
        )
        for tag in value
    ]
    return llguidance.StructTag.to_grammar(tags, assume_special=False)


def _checked_lark(text: str) -> str:
    """A grammar without the attribute that llguidance reads and nobody follows. Raises ValueError."""
    for rule in _ATTRIBUTES.finditer(text):
        if _TEMPERATURE.search(rule[2]):
            raise ValueError(f"the rule {rule[1]!r} has a temperature, which is not followed; give that of the request")
    return text


def _schema_of(text: str) -> dict[str, Any]:
    """A JSON schema without the member by which clients would change how llguidance reads it. Raises ValueError."""
    try:
        schema = json.loads(text)
    except RecursionError as error:
        raise ValueError("the schema is nested too deeply") from error
    except json.JSONDecodeError as error:
        raise ValueError(f"the schema is not JSON at character {error.pos + 1}: {error.msg}") from error
    if schema is True:
        return {}
    if not isinstance(schema, dict):
        raise ValueError(f"the schema is {json.dumps(schema)[:40]}; it must be an object")
    if "x-guidance" in schema:
        raise ValueError('the schema has the member "x-guidance", which is not supported')
    return schema


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


if __name__ == "__main__":
    sys.exit(main())
