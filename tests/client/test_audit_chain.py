"""The chain of an audit log: whatever is done to its lines is found, and the first wrong line is named."""

from __future__ import annotations

import json
from collections.abc import Sequence

import pytest
from hypothesis import given, settings, strategies as st
from motet.audit.chain import GENESIS, TORN_ACTION, TORN_AFTER, Line, Verdict, check, digest_of


def chain(num_lines: int, *, prev: str = GENESIS, first: int = 1, start: str = "s") -> list[bytes]:
    lines = []
    for number in range(first, first + num_lines):
        data = {"action": "adapter.pin", "resource": f"adapters/a{number}"}
        event = {"id": f"{start}-{number}", "time": f"2026-01-01T00:00:{number:02}Z", "data": data, "prev": prev}
        lines.append(json.dumps(event).encode())
        prev = digest_of(lines[-1])
    return lines


def verdict_of(raws: Sequence[bytes], *, anchor: str | None = None) -> Verdict:
    return check([Line("log", number, raw) for number, raw in enumerate(raws, 1)], anchor=anchor)


def parsed(content: bytes) -> Verdict:
    pieces = content.split(b"\n")
    lines = [Line("log", number, raw) for number, raw in enumerate(pieces[:-1], 1)]
    return check([*lines, *([Line("log", len(pieces), pieces[-1], is_ended=False)] if pieces[-1] else [])])


def test_whole_log_is_in_order_and_its_last_hash_is_that_of_its_last_line() -> None:
    lines = chain(5)
    verdict = verdict_of(lines)
    assert verdict.finding is None
    assert (verdict.num_lines, verdict.begins_after, verdict.last_hash) == (5, GENESIS, digest_of(lines[-1]))
    assert (verdict.first_time, verdict.last_time) == ("2026-01-01T00:00:01Z", "2026-01-01T00:00:05Z")


def test_log_whose_oldest_files_are_gone_says_what_it_begins_after() -> None:
    lines = chain(6)
    verdict = verdict_of(lines[2:])
    assert verdict.finding is None and verdict.begins_after == digest_of(lines[1])


LINES = chain(8)
CONTENT = b"".join(line + b"\n" for line in LINES)
LAST_BEGINS = len(CONTENT) - len(LINES[-1]) - 1


@settings(max_examples=300, deadline=None)
@given(position=st.integers(0, LAST_BEGINS - 1), byte=st.integers(0, 255))
def test_every_single_byte_changed_is_found_at_its_line(position: int, byte: int) -> None:
    if CONTENT[position] == byte:
        return
    changed = CONTENT[:position] + bytes([byte]) + CONTENT[position + 1 :]
    finding = parsed(changed).finding
    assert finding is not None
    line = CONTENT[:position].count(b"\n") + 1
    # Where a line's own `prev` or its end was changed, or a number that shows gaps, the line beside it may be named.
    assert abs(finding.line - line) <= 1


@pytest.mark.parametrize("position", range(8))
def test_a_changed_word_is_found_at_exactly_its_line_unless_it_is_the_last(position: int) -> None:
    lines = list(LINES)
    lines[position] = lines[position].replace(b"adapters/a", b"adapters/b")
    verdict = verdict_of(lines)
    if position == 7:
        # Nothing follows the last line: only its hash, noted elsewhere, shows the change.
        assert verdict.finding is None and verdict.last_hash != digest_of(LINES[7])
        return
    assert verdict.finding is not None and verdict.finding.line == position + 1
    assert "was changed" in verdict.finding.what and verdict.num_lines == position + 1


@pytest.mark.parametrize("position", range(1, 7))
def test_removed_lines_are_found_where_they_are_missing(position: int) -> None:
    for num_lines in (1, 7 - position):
        left = [*LINES[:position], *LINES[position + num_lines :]]
        finding = verdict_of(left).finding
        assert finding is not None and finding.line == position + 1
        assert f"{num_lines} line" in finding.what and "missing" in finding.what


@pytest.mark.parametrize("position", range(1, 7))
def test_a_line_that_was_put_in_is_found(position: int) -> None:
    forged = chain(1, prev=digest_of(LINES[position - 1]), first=position + 1)[0].replace(b"pin", b"unpin")
    finding = verdict_of([*LINES[:position], forged, *LINES[position:]]).finding
    assert finding is not None and (finding.line, "put in" in finding.what) == (position + 1, True)
    elsewhere = forged.replace(digest_of(LINES[position - 1]).encode(), b"f" * 64)
    finding = verdict_of([*LINES[:position], elsewhere, *LINES[position:]]).finding
    assert finding is not None and (finding.line, "put in" in finding.what) == (position + 1, True)


@settings(max_examples=100, deadline=None)
@given(order=st.permutations(range(8)))
def test_every_other_order_of_lines_is_found(order: list[int]) -> None:
    verdict = verdict_of([LINES[position] for position in order])
    if order == list(range(8)):
        assert verdict.finding is None
    elif order[0] == 0:
        wrong = next(place for place, position in enumerate(order) if place != position)
        assert verdict.finding is not None and verdict.finding.line == wrong + 1
    else:
        assert verdict.finding is not None


def test_two_lines_that_changed_places_are_out_of_order() -> None:
    finding = verdict_of([*LINES[:3], LINES[4], LINES[3], *LINES[5:]]).finding
    assert finding is not None and (finding.line, "out of order" in finding.what) == (4, True)


def test_a_log_that_was_cut_off_is_found_within_a_line_and_by_an_anchor_between_lines() -> None:
    cut = parsed(CONTENT[: LAST_BEGINS + 20])
    assert cut.finding is not None and (cut.finding.line, "cut off" in cut.finding.what) == (8, True)
    assert cut.num_lines == 7
    without_end = parsed(CONTENT[:-1])
    assert without_end.finding is not None and without_end.finding.line == 8
    anchor = digest_of(LINES[7])
    assert verdict_of(LINES[:5]).finding is None
    assert not verdict_of(LINES[:5], anchor=anchor).has_anchor
    assert verdict_of(LINES, anchor=anchor).has_anchor
    assert verdict_of([*LINES, *chain(2, prev=anchor, first=9)], anchor=anchor).has_anchor


def closing(torn: bytes, before: str) -> bytes:
    data = {"action": TORN_ACTION, TORN_AFTER: before}
    return json.dumps({"id": "t-1", "time": "", "data": data, "prev": digest_of(torn)}).encode()


@pytest.mark.parametrize("num_bytes", [1, 30, len(LINES[4])])
def test_a_line_that_a_crash_cut_off_is_in_order_if_the_next_one_says_so(num_bytes: int) -> None:
    torn = LINES[4][:num_bytes]
    close = closing(torn, digest_of(LINES[3]))
    after = chain(2, prev=digest_of(close), first=2, start="t")
    verdict = verdict_of([*LINES[:4], torn, close, *after])
    assert verdict.finding is None and (verdict.num_lines, verdict.num_torn) == (8, 1)
    # Not if lines in front of it are gone, if it was changed, or if nothing closes it.
    if num_bytes < len(LINES[4]):
        for lines in ([*LINES[:3], torn, close], [*LINES[:4], torn + b"x", close], [*LINES[:4], torn, LINES[5]]):
            finding = verdict_of(lines).finding
            assert finding is not None and finding.line == len(lines) - 1


def test_a_log_that_begins_with_a_torn_line_says_what_it_begins_after() -> None:
    verdict = verdict_of([b"{torn", closing(b"{torn", GENESIS)])
    assert verdict.finding is None and (verdict.begins_after, verdict.num_lines) == (GENESIS, 2)


def test_no_lines_are_no_mistake() -> None:
    verdict = verdict_of([])
    assert verdict.finding is None and (verdict.num_lines, verdict.last_hash) == (0, GENESIS)
