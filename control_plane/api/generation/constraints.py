"""The constraint of a request: its form here, its grammar in a process of its own."""

from __future__ import annotations

import asyncio
import hashlib
import weakref
from collections.abc import Sequence
from typing import Any

from motet.v1 import constraints_pb2, generation_pb2

from contract.sampling import MAX_TOKENIZER_BYTES
from control_plane.api.text.codec import TextCodec
from control_plane.checks import Violations, refuse
from control_plane.constraints.compiler import ConstraintCompiler, ConstraintRefused
from control_plane.constraints.known_tokens import find_known_tokens
from control_plane.errors import InvalidRequest, Unavailable
from control_plane.scheduler.types import Constraint, Vocabulary

MAX_CONSTRAINT_BYTES = 64 << 10
MAX_CHOICES = 1024
MAX_TAGS = 64


def check_constraint(request: generation_pb2.GenerateRequest, violations: Violations) -> None:
    """Adds what is wrong with the form of the constraint, and with what it is combined with."""
    if not request.HasField("constraint"):
        return
    constraint = request.constraint
    if request.decoding.HasField("beam_search"):
        violations.add("constraint", "is set with decoding.beam_search, which follows no constraint; leave one unset")
    if request.stopping.ignore_eos:
        violations.add(
            "constraint", "is set with stopping.ignore_eos: its end is the end-of-sequence token; leave one unset"
        )
    if constraint.ByteSize() > MAX_CONSTRAINT_BYTES:
        violations.add("constraint", f"has {constraint.ByteSize()} bytes; use at most {MAX_CONSTRAINT_BYTES}")
    kind = constraint.WhichOneof("kind")
    if kind is None:
        violations.add("constraint", "is empty; set one of json_schema, json_object, regex, choices, lark and so on")
    elif kind == "json_object" and not constraint.json_object:
        violations.add("constraint.json_object", "is false; set it to true, or leave the constraint out")
    elif kind == "choices":
        _check_choices(constraint.choices, violations)
    elif kind == "structural_tags":
        _check_tags(constraint.structural_tags, violations)
    elif kind in ("json_schema", "regex", "lark") and not getattr(constraint, kind):
        violations.add(f"constraint.{kind}", "is empty")


class Constraints:
    """Checks the constraints of requests. Used from one event loop."""

    def __init__(self, compiler: ConstraintCompiler) -> None:
        self._compiler = compiler
        self._vocabularies: weakref.WeakKeyDictionary[TextCodec, dict[Any, Vocabulary]] = weakref.WeakKeyDictionary()

    async def of(
        self,
        message: generation_pb2.GenerateRequest,
        codec: TextCodec,
        end_token_ids: Sequence[int],
        num_tokens: int,
        tenant: str,
    ) -> Constraint | None:
        """The request's constraint over the tokens of its model; None where it has none.

        Raises InvalidRequest, TokenizerUnavailable, QueueFull or Unavailable.
        """
        if not message.HasField("constraint"):
            return None
        ends = _ends_of(end_token_ids, num_tokens)
        if not ends:
            raise refuse("constraint", "is set, and this model has no end-of-sequence token that could end it")
        kind = message.constraint.WhichOneof("kind")
        assert kind is not None, "an empty constraint was not refused"
        vocabulary = await self._vocabulary(codec, ends, num_tokens)
        try:
            return await self._compiler.compile(kind, _plain(message.constraint), vocabulary, tenant)
        except ConstraintRefused as error:
            # llguidance draws the place below the text, in several lines.
            raise refuse(f"constraint.{kind}", " ".join(str(error).split())) from error

    async def vocabulary_of(self, codec: TextCodec, end_token_ids: Sequence[int], num_tokens: int) -> Vocabulary | None:
        """What constraints of the codec's requests are over; None where `of` refuses every constraint."""
        ends = _ends_of(end_token_ids, num_tokens)
        if not ends or not codec.has_tokenizer:
            return None
        try:
            return await self._vocabulary(codec, ends, num_tokens)
        except (InvalidRequest, Unavailable):  # too large, so that each constrained request is refused; or not read now
            return None

    async def _vocabulary(self, codec: TextCodec, ends: tuple[int, ...], num_tokens: int) -> Vocabulary:
        own = self._vocabularies.setdefault(codec, {})
        found = own.get((ends, num_tokens))
        if found is None:
            text = await codec.tokenizer_json()
            if codec.has_tokens_from(num_tokens):
                text = await asyncio.to_thread(find_known_tokens, text, num_tokens)
            found = await asyncio.to_thread(_vocabulary, text, ends, num_tokens)
            own[ends, num_tokens] = found
        return found


def _ends_of(end_token_ids: Sequence[int], num_tokens: int) -> tuple[int, ...]:
    return tuple(sorted({token_id for token_id in end_token_ids if token_id < num_tokens}))


def _vocabulary(text: str, ends: tuple[int, ...], num_tokens: int) -> Vocabulary:
    encoded = text.encode()
    if len(encoded) > MAX_TOKENIZER_BYTES:
        raise refuse(
            "constraint", f"needs a tokenizer of at most {MAX_TOKENIZER_BYTES} bytes; this one has {len(encoded)}"
        )
    digest = hashlib.sha256(f"{num_tokens} {ends} ".encode() + encoded).hexdigest()
    return Vocabulary(digest, text, num_tokens, ends)


def _plain(constraint: constraints_pb2.Constraint) -> Any:
    """The value of the constraint's form as JSON has it."""
    kind = constraint.WhichOneof("kind")
    if kind == "choices":
        return list(constraint.choices.texts)
    if kind == "structural_tags":
        return [_plain_tag(tag) for tag in constraint.structural_tags.tags]
    return getattr(constraint, kind or "")


def _plain_tag(tag: constraints_pb2.StructuralTag) -> dict[str, str]:
    content = tag.WhichOneof("content") or ""
    return {"trigger": tag.trigger, "begin": tag.begin, "end": tag.end, content: getattr(tag, content)}


def _check_choices(choices: constraints_pb2.Choices, violations: Violations) -> None:
    if not 1 <= len(choices.texts) <= MAX_CHOICES:
        violations.add("constraint.choices", f"has {len(choices.texts)} texts; give 1 to {MAX_CHOICES}")
    elif not all(choices.texts):
        index = list(choices.texts).index("")
        violations.add(f"constraint.choices.texts[{index}]", "is empty; give at least one character")


def _check_tags(tags: constraints_pb2.StructuralTags, violations: Violations) -> None:
    field = "constraint.structural_tags"
    if not 1 <= len(tags.tags) <= MAX_TAGS:
        violations.add(field, f"has {len(tags.tags)} tags; give 1 to {MAX_TAGS}")
        return
    for index, tag in enumerate(tags.tags):
        if not tag.trigger or not tag.begin.startswith(tag.trigger):
            violations.add(f"{field}.tags[{index}].begin", "does not begin with the trigger, which may not be empty")
        if tag.WhichOneof("content") is None:
            violations.add(f"{field}.tags[{index}].content", "is not set; send one of json_schema and lark")
