"""The counts of `.ci/structure.py` stay within the table of docs/architecture.md; the script finds what it counts."""

from __future__ import annotations

import ast
import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[1]


def load(name: str) -> ModuleType:
    """A program of .ci/, which is not a package."""
    spec = importlib.util.spec_from_file_location(name, ROOT / ".ci" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # its dataclasses look themselves up there
    spec.loader.exec_module(module)
    return module


structure = load("structure")


@pytest.mark.parametrize("measure", structure.MEASURES, ids=lambda measure: measure.title)
def test_count_is_within_its_limit(measure: object) -> None:
    """A count that fell: `python .ci/structure.py --write` lowers the limit."""
    places = measure.find()  # type: ignore[attr-defined]
    at_most = structure.allowed_counts()[measure.title]  # type: ignore[attr-defined]
    assert len(places) <= at_most, "\n".join(places[:200])


def test_private_uses_are_attributes_of_others_imports_and_patches() -> None:
    tree = ast.parse(
        "from a import _b\nself._own\nthing._c\nthing.__dict__\nmonkeypatch.setattr('m.K._d', 1)\nsetattr(x, '_e', 1)\n"
        "getattr(x, '_f')\n"
    )
    assert [name for _, name in structure._private_uses(tree)] == ["_b", "_c", "_d", "_e", "_f"]


def test_a_private_name_may_be_used_in_its_own_file_only() -> None:
    owner = ast.parse("class Owner:\n    def __init__(self):\n        self._part = 1\nOwner()._part\n")
    other = ast.parse("def look(owner):\n    return owner._part, owner._unknown\n")
    names = set(structure._private_definitions(owner))
    assert names == {"_part"}
    assert list(structure._foreign_uses(owner, names)) == []
    assert list(structure._foreign_uses(other, names)) == [(2, "_part")]


def test_words_are_parted_in_names_of_every_form() -> None:
    assert structure._words("AnswerBook.told_tokens, re-asked") == "answer book told tokens re asked"


def test_retired_words_have_patterns_that_match_them() -> None:
    patterns = structure._retired_patterns()
    for words in ("answer book", "told", "asked", "roster", "stepwise", "outer modules", "sites", "second opinion"):
        assert any(pattern.search(words) for pattern in patterns), words
    for words in ("in flight", "step result", "target module", "completion", "websites"):
        assert not any(pattern.search(words) for pattern in patterns), words


def test_no_symbolic_link_is_in_the_repository() -> None:
    """A checkout of one replaces an ignored directory of its name: a link to an environment removed the environment."""
    if not (ROOT / ".git").exists():  # a source archive has no index, and its files are what they are
        return
    listed = subprocess.run(["git", "ls-files", "--stage"], cwd=ROOT, capture_output=True, text=True, check=True)
    assert [line for line in listed.stdout.splitlines() if line.startswith("120000")] == []
