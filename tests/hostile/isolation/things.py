"""What one tenant has, as the values that a field of a request can carry; and equal-looking values that nobody has."""

from __future__ import annotations

import re
from dataclasses import dataclass, fields, replace

# What no other tenant can have in its own data: the texts of B begin with this word, its digests are found as they are.
WORD, NOWHERE_WORD = "zebra", "yebra"
# Digits give digits, letters give letters, 0 and e stay: where text is read as JSON, 12e5 stays one number.
_TURNED = str.maketrans("123456789abcdf", "234567891bcdfa")
_HEX_TEXT = re.compile(r"[0-9a-f]{12,}")


@dataclass(frozen=True, kw_only=True)
class Things:
    """Of one tenant. Every value is the only one of its text on the server."""

    tenant: str
    key_id: str
    adapter_id: str  # private, with two versions, pinned
    digest: str  # its active version
    former_digest: str  # its other version
    uid: str
    etag: str
    operation_id: str  # of the deletion of a third version
    running_request_id: str  # of a generation that runs
    upload_request_id: str  # of the upload of `adapter_id`
    upload_id: str  # of an upload that broke and can be continued
    display_name: str
    label_key: str
    label_value: str
    cache_salt: str
    prompt_sha256: str
    shared_id: str  # adapter that is shared with a third tenant
    reserved_id: str  # adapter whose name has a reserved prefix
    prefix: str  # that prefix
    friend: str  # the third tenant
    text: str  # of a prompt

    def values(self) -> dict[str, str]:
        """By kind: every value in every form in which a field takes it."""
        found = {field.name: str(getattr(self, field.name)) for field in fields(self)}
        found["adapter name"] = f"adapters/{self.adapter_id}"
        found["operation name"] = f"operations/{self.operation_id}"
        return found

    @property
    def secrets(self) -> tuple[str, ...]:
        """What no response to another tenant may hold, the longest first; digests also as messages shorten them."""
        texts = set(self.values().values())
        texts |= {text[:12] for text in texts if _HEX_TEXT.fullmatch(text)}
        return tuple(sorted(texts, key=len, reverse=True))


def nowhere(things: Things) -> Things:
    """Values of the same form and length that are nobody's."""
    return replace(things, **{field.name: nowhere_text(getattr(things, field.name)) for field in fields(things)})


def nowhere_text(text: str) -> str:
    """Worked examples: "zebra-one" gives "yebra-one", "0f120f..." gives "0f120a...", "0f120f...-3" "0f120a...-3".

    The first digits stay: as a page token, both lie between the same names.
    """
    if WORD in text:
        return text.replace(WORD, NOWHERE_WORD)
    assert _HEX_TEXT.match(text), f"{text} is neither a word of its tenant nor hexadecimal"
    return _HEX_TEXT.sub(lambda match: match[0][:4] + match[0][4:].translate(_TURNED), text)
