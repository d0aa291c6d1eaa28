"""A registry that is killed at random moments loses nothing that it acknowledged, and leaves nothing over."""

from __future__ import annotations

import random
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.hostile.kills.rounds import Truth

ROOT = Path(__file__).resolve().parents[2]
NUM_ROUNDS = 50


@pytest.mark.slow
def test_what_was_acknowledged_survives_fifty_kills() -> None:
    """Outside of this test process, which has threads: the rounds fork."""
    command = [sys.executable, "-m", "tests.hostile.kills", "--rounds", str(NUM_ROUNDS)]
    seed = str(random.randrange(1 << 32))
    done = subprocess.run([*command, "--seed", seed], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    counts = re.search(r"(\d+) kills, .*; (\d+) changes done; 0 failures", done.stdout)
    assert counts is not None and int(counts[1]) == NUM_ROUNDS and int(counts[2]) > 0, done.stdout


def found(**names: tuple[str, str]) -> dict[str, object]:
    entries = {
        name: {"active": active, "versions": list(versions), "state": "active"}
        for name, (active, versions) in names.items()
    }
    return {"names": entries, "damaged": [], "leftovers": []}


def test_a_lost_an_old_and_a_revived_version_are_noticed() -> None:
    truth = Truth()
    register = {"name": "a", "action": "register"}
    for digest in "xy":
        truth.begin("0", register)
        truth.done("0", register | {"digest": digest})
    assert truth.problems(found()) and not truth.problems(found())
    for digest in "xy":
        truth.begin("0", register)
        truth.done("0", register | {"digest": digest})
    assert truth.problems(found(a=("x", "xy")))
    truth.begin("0", register)
    assert not truth.problems(found(a=("z", "xyz")))  # had begun
    truth.begin("0", {"name": "a", "action": "delete"})
    truth.done("0", {"name": "a", "action": "delete"})
    assert truth.problems(found(a=("z", "xyz")))


def test_damage_and_leftovers_are_noticed() -> None:
    whole = found()
    assert Truth().problems(whole | {"damaged": ["d"]}) and Truth().problems(whole | {"leftovers": ["b"]})
