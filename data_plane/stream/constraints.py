"""The grammars and vocabularies that a session sent: new rows name them by digest."""

from __future__ import annotations

import numpy as np

from contract.v1 import plan_pb2
from data_plane.errors import PlanRefused
from data_plane.plan import RowConstraint, Vocabulary


class SessionConstraints:
    """What one session sent and did not take back."""

    def __init__(self) -> None:
        self._vocabularies: dict[str, Vocabulary] = {}
        self._grammars: dict[str, RowConstraint] = {}

    def put_vocabulary(self, message: plan_pb2.PutVocabulary) -> Vocabulary:
        """Take a vocabulary, and return it. Raises PlanRefused for a torn one."""
        if len(message.end_token_ids) % 4 or not message.end_token_ids:
            raise PlanRefused(f"vocabulary {message.digest[:12]} has {len(message.end_token_ids)} bytes of end tokens")
        end_token_ids = tuple(np.frombuffer(message.end_token_ids, dtype="<i4").tolist())
        vocabulary = Vocabulary(message.digest, message.tokenizer, message.num_tokens, end_token_ids)
        self._vocabularies[message.digest] = vocabulary
        return vocabulary

    def put_grammar(self, message: plan_pb2.PutGrammar) -> None:
        """Take a grammar. Raises PlanRefused where its vocabulary did not come before."""
        vocabulary = self._vocabularies.get(message.vocabulary)
        if vocabulary is None:
            raise PlanRefused(f"grammar {message.digest[:12]} names the vocabulary {message.vocabulary[:12]}: not sent")
        self._grammars[message.digest] = RowConstraint(message.digest, message.grammar, vocabulary)

    def forget(self, digests: list[str]) -> None:
        """Drop grammars and vocabularies."""
        for digest in digests:
            self._grammars.pop(digest, None)
            self._vocabularies.pop(digest, None)

    def of(self, digest: str) -> RowConstraint | None:
        """The constraint that a new row names; None for an empty digest. Raises PlanRefused for one that is unknown."""
        if not digest:
            return None
        if digest not in self._grammars:
            raise PlanRefused(f"a new row names the grammar {digest[:12]}: not sent")
        return self._grammars[digest]
