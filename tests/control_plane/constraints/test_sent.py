"""What a session is sent of constraints: each thing once, in an order that the worker's end accepts."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest

from contract.sampling import MAX_GRAMMARS, MAX_VOCABULARIES
from contract.v1 import plan_pb2
from control_plane.constraints.sent import SentConstraints
from control_plane.scheduler.types import Constraint, Vocabulary
from data_plane.errors import PlanRefused
from data_plane.stream.constraints import SessionConstraints


def constraint(number: int, vocabulary: int = 0) -> Constraint:
    name = f"v{vocabulary}"
    return Constraint(f"{name} g{number}", f"grammar {number}", Vocabulary(name, "{}", 10, (0, 7)))


def rows(*constraints: Constraint | None) -> Any:
    return [SimpleNamespace(constraint=each) for each in constraints]


def take(session: SessionConstraints, messages: list[plan_pb2.AttachResponse]) -> list[str]:
    """As the worker's session does; the kinds of the messages."""
    kinds = []
    for message in messages:
        kind = message.WhichOneof("message") if "message" in message.DESCRIPTOR.oneofs_by_name else None
        kind = kind or message.WhichOneof(message.DESCRIPTOR.oneofs[0].name)
        kinds.append(kind)
        if kind == "put_vocabulary":
            session.put_vocabulary(message.put_vocabulary)
        elif kind == "put_grammar":
            session.put_grammar(message.put_grammar)
        else:
            session.forget(list(message.forget_constraints.digests))
    return kinds


def test_a_vocabulary_comes_first_and_everything_once() -> None:
    sent, session = SentConstraints(), SessionConstraints()
    assert sent.messages_for(rows(None)) == []
    assert take(session, sent.messages_for(rows(constraint(1), constraint(1), constraint(2)))) == [
        "put_vocabulary",
        "put_grammar",
        "put_grammar",
    ]
    assert sent.messages_for(rows(constraint(2), None, constraint(1))) == []
    found = session.of("v0 g1")
    assert found is not None and found.grammar == "grammar 1" and found.vocabulary.end_token_ids == (0, 7)


def test_the_worker_always_has_what_a_plan_names_and_never_much_more() -> None:
    """A walk over more grammars and vocabularies than are kept, plans of up to 300 rows."""
    chance = random.Random(5)
    sent, session = SentConstraints(), SessionConstraints()
    known: set[str] = set()
    for _ in range(150):
        size = chance.choice([1, 3, 40, 300])
        plan = [constraint(chance.randrange(600), chance.randrange(12)) for _ in range(size)]
        messages = sent.messages_for(rows(*plan))
        take(session, messages)
        for message in messages:
            known |= {message.put_grammar.digest} - {""}
            known -= set(message.forget_constraints.digests)
        for each in plan:
            found = session.of(each.digest)
            assert found is not None and found.vocabulary.digest == each.vocabulary.digest
        assert len(known) <= max(MAX_GRAMMARS, len({each.digest for each in plan})) + 1
    assert MAX_VOCABULARIES < 12, "the walk never forgets a vocabulary"


def test_the_worker_refuses_what_was_not_sent_and_what_is_torn() -> None:
    session = SessionConstraints()
    assert session.of("") is None
    with pytest.raises(PlanRefused, match="not sent"):
        session.of("g")
    with pytest.raises(PlanRefused, match="names the vocabulary v: not sent"):
        session.put_grammar(plan_pb2.PutGrammar(digest="g", grammar="x", vocabulary="v"))
    for torn in (b"", b"\x01\x02\x03"):
        with pytest.raises(PlanRefused, match=f"{len(torn)} bytes of end tokens"):
            session.put_vocabulary(plan_pb2.PutVocabulary(digest="v", end_token_ids=torn))
    session.put_vocabulary(plan_pb2.PutVocabulary(digest="v", num_tokens=2, end_token_ids=bytes(4)))
    session.put_grammar(plan_pb2.PutGrammar(digest="g", grammar="x", vocabulary="v"))
    assert session.of("g") is not None
    session.forget(["g", "never sent"])
    with pytest.raises(PlanRefused, match="not sent"):
        session.of("g")
