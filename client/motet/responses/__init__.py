"""Reads reasoning, content and tool calls out of the text of a completion, by the response template of its model.

`find_form` finds out from a server how a model writes them, and `ResponseForm.parser` reads one completion. All but
`finding.py` is pure: no I/O, nothing beyond the standard library.
"""

from motet.responses.arguments import GrammarError
from motet.responses.choice import choose_template
from motet.responses.events import CallArguments, CallEnd, CallStart, Content, Event, Reasoning
from motet.responses.finding import ResponseForm, find_form, find_form_async
from motet.responses.grammars import call_grammar, content_grammar
from motet.responses.parser import ResponseParser
from motet.responses.templates import ResponseTemplate, TemplateError, load_template

__all__ = [
    "CallArguments",
    "CallEnd",
    "CallStart",
    "Content",
    "Event",
    "GrammarError",
    "Reasoning",
    "ResponseForm",
    "ResponseParser",
    "ResponseTemplate",
    "TemplateError",
    "call_grammar",
    "choose_template",
    "content_grammar",
    "find_form",
    "find_form_async",
    "load_template",
]
