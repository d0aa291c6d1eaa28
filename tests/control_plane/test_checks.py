"""Every refusal of a check names the field and says what to send instead."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from control_plane import checks
from control_plane.errors import InvalidRequest

REFUSED: dict[str, tuple[Callable[..., None], Any, str]] = {
    "empty adapter id": (checks.check_adapter_id, "", "f: '' is not a valid adapter id: use 1 to 63 characters of"),
    "a version's name": (
        checks.check_adapter_id,
        "legal@1",
        "f: 'legal@1' names a version, and the name of an adapter is expected: give 'legal', and the version in a "
        "field of its own (of commands: --version @1, or VERSION after NAME)",
    ),
    "a name without a version": (
        checks.check_adapter_id,
        "legal@",
        "f: 'legal@' is not a valid adapter id: use 1 to 63",
    ),
    "long adapter id": (checks.check_adapter_id, "x" * 100, f"f: '{'x' * 61}...' is not a valid adapter id: use 1 "),
    "digest": (checks.check_digest, "A" * 64, "A' is not a valid digest: use 64 lower-case hexadecimal digits"),
    "request id": (checks.check_request_id, "é", "is not a valid request id: use printable ASCII characters only"),
    "long request id": (checks.check_request_id, "x" * 129, "f: has 129 bytes; use at most 128"),
    "display name": (checks.check_display_name, "é" * 129, "f: has 258 bytes; use at most 256"),
    "surrogate": (checks.check_display_name, "\ud800" * 86, "f: has 258 bytes; use at most 256"),
    "many labels": (checks.check_labels, {f"k{i}": "" for i in range(65)}, "f: has 65 labels; use at most 64"),
    "label key": (checks.check_labels, {"Team": ""}, "f: the key 'Team' is not a valid label key: use 1 to 63 "),
    "label value": (checks.check_labels, {"a": "x" * 257}, "f['a']: the value has 257 bytes; use at most 256"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_a_refusal_has_the_value_and_what_to_use_instead(what: str) -> None:
    check, value, expected = REFUSED[what]
    with pytest.raises(InvalidRequest) as caught:
        checks.require(check, value, "f")
    assert expected in str(caught.value)


def test_what_passes_gives_no_violation() -> None:
    violations = checks.Violations()
    checks.check_adapter_id("a.b-c_9", "f", violations)
    checks.check_digest("0" * 64, "f", violations)
    checks.check_request_id("~ any printable !", "f", violations)
    checks.check_display_name("é" * 128, "f", violations)
    checks.check_labels({"a-b_c": "x" * 256}, "f", violations)
    assert not violations


def test_every_violation_is_in_the_refusal() -> None:
    violations = checks.Violations()
    checks.check_adapter_id("A", "adapter_id", violations)
    checks.check_digest("", "digest", violations)
    with pytest.raises(InvalidRequest) as caught:
        violations.raise_if_any()
    assert [violation.field for violation in caught.value.violations] == ["adapter_id", "digest"]


@pytest.mark.parametrize(("page_size", "expected"), [(0, 100), (1, 1), (1000, 1000)])
def test_page_size_has_a_default(page_size: int, expected: int) -> None:
    assert checks.page_size_of(page_size, "") == expected


@pytest.mark.parametrize(
    ("page_size", "page_token", "field"), [(-1, "", "page_size"), (1001, "", "page_size"), (1, "x" * 513, "page_token")]
)
def test_bad_page_is_refused(page_size: int, page_token: str, field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        checks.page_size_of(page_size, page_token)
    assert [violation.field for violation in caught.value.violations] == [field]


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ("https://user:planted@hub.example/x?token=planted", "'https://***@hub.example/x?token=***'"),
        ("motet_abcdefghij_" + "Z" * 43, "'motet_abcdefghij_***'"),
        ("x" * 30 + " motet_abcdefghij_" + "Z" * 43, f"'{'x' * 30} motet_abcdefghij_***'"),
        ("legal", "'legal'"),
    ],
)
def test_a_quoted_value_shows_no_secret(value: str, shown: str) -> None:
    """A user who names a source as a URL with a password finds no password in the log of the client."""
    assert checks.quoted(value) == shown
