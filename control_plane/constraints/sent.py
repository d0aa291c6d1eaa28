"""What one session's worker was sent of constraints: each grammar and each vocabulary once, before the first row."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

import numpy as np

from contract.sampling import MAX_GRAMMARS, MAX_VOCABULARIES
from contract.v1 import plan_pb2
from control_plane.scheduler.types import NewRow, Vocabulary


class SentConstraints:
    """The grammars and vocabularies that the worker of one session has. It forgets those that are taken back."""

    def __init__(self) -> None:
        self._grammars: OrderedDict[str, None] = OrderedDict()  # last used last
        self._vocabularies: OrderedDict[str, None] = OrderedDict()

    def messages_for_vocabulary(self, vocabulary: Vocabulary) -> list[plan_pb2.AttachResponse]:
        """What to send before anything names this vocabulary; nothing where the worker has it."""
        is_new = vocabulary.digest not in self._vocabularies
        self._vocabularies[vocabulary.digest] = None
        self._vocabularies.move_to_end(vocabulary.digest)
        if not is_new:
            return []
        message = plan_pb2.PutVocabulary(
            digest=vocabulary.digest,
            tokenizer=vocabulary.tokenizer,
            num_tokens=vocabulary.num_tokens,
            end_token_ids=np.array(vocabulary.end_token_ids, dtype="<i4").tobytes(),
        )
        return [plan_pb2.AttachResponse(put_vocabulary=message)]

    def messages_for(self, new_rows: Iterable[NewRow]) -> list[plan_pb2.AttachResponse]:
        """What to send before the plan in which these rows begin."""
        constraints = [row.constraint for row in new_rows if row.constraint is not None]
        if not constraints:
            return []
        messages: list[plan_pb2.AttachResponse] = []
        for constraint in constraints:
            vocabulary = constraint.vocabulary
            messages += self.messages_for_vocabulary(vocabulary)
            if constraint.digest not in self._grammars:
                messages.append(
                    plan_pb2.AttachResponse(
                        put_grammar=plan_pb2.PutGrammar(
                            digest=constraint.digest, grammar=constraint.grammar, vocabulary=vocabulary.digest
                        )
                    )
                )
            self._grammars[constraint.digest] = None
            self._grammars.move_to_end(constraint.digest)
        forgotten = _cut(self._grammars, MAX_GRAMMARS, {each.digest for each in constraints})
        forgotten += _cut(self._vocabularies, MAX_VOCABULARIES, {each.vocabulary.digest for each in constraints})
        if forgotten:
            message = plan_pb2.ForgetConstraints(digests=forgotten)
            messages.append(plan_pb2.AttachResponse(forget_constraints=message))
        return messages


def _cut(kept: OrderedDict[str, None], most: int, needed: set[str]) -> list[str]:
    """Take the oldest ones out that are more than `most` and not needed now."""
    cut = [digest for digest in list(kept)[: max(len(kept) - most, 0)] if digest not in needed]
    for digest in cut:
        del kept[digest]
    return cut
