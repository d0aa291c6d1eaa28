"""The documents that a pushed version has from another version of its name, since a push brings weights alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from control_plane.checks import quoted, refuse
from control_plane.registry.companions.documents import CHAT
from control_plane.registry.peft.safetensors_header import refuse as refuse_adapter
from control_plane.signatures.verdict import SignatureVerdict

FIELD, CLEARING_FIELD = "header.files_from", "header.without_files"
WAY_ON = f"name another version there, or set {CLEARING_FIELD} (without_files=True in the SDK)"


@dataclass(frozen=True, slots=True)
class Inherited:
    """Documents of another version, and what has to fit for a new version to have them."""

    digest: str = ""  # of the version that they come from; empty: there are none
    documents: Mapping[str, bytes] = field(default_factory=dict)
    vocab_size: int = 0  # of that version
    signature: SignatureVerdict | None = None  # of that version

    def check_signature(self, signature: SignatureVerdict | None) -> None:
        """A signed version has files of its own signer only. Raises InvalidRequest."""
        if signature is None or not self.digest:
            return
        if self.signature is None or self.signature.signer != signature.signer:
            theirs = "has no signature" if self.signature is None else f"is signed by {quoted(self.signature.signer)}"
            raise refuse(
                FIELD,
                f"is version {self.digest}, which {theirs}, and the push is signed by {quoted(signature.signer)}, "
                f"whose signature would not cover the files of that version; {WAY_ON}, or upload the version with "
                "all its files",
            )

    def fitting(self, vocab_size: int) -> Mapping[str, bytes]:
        """The documents, for weights with such a vocabulary. Raises InvalidAdapter where their ids may not exist."""
        if vocab_size < self.vocab_size and set(self.documents) - {CHAT}:
            raise refuse_adapter(
                FIELD,
                f"is version {self.digest}, whose {', '.join(sorted(set(self.documents) - {CHAT}))} may name any of "
                f"its {self.vocab_size} tokens, and the pushed weights have {vocab_size}; push the rows of all tokens, "
                f"or {WAY_ON}",
            )
        return self.documents


NOT_INHERITED = Inherited()
