"""`make mutate`: which faults are put into a module, and that those which no test notices are reported."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def mutate() -> ModuleType:
    """The program, which is not a package."""
    spec = importlib.util.spec_from_file_location("mutate", ROOT / ".ci" / "mutate.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look there
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("source", "faults"),
    [
        ("x = a < b", ["a < b -> a <= b"]),
        (
            "x = a is None or b in c",
            ["a is None or b in c -> a is None and b in c", "a is None -> a is not None", "b in c -> b not in c"],
        ),
        ("x = a + b", ["a + b -> a - b"]),
        ("x += y", ["x += y -> x -= y"]),
        ("x = 3", ["3 -> 4"]),
        ("x = True", ["True -> False"]),
        ("x = min(a, b)", ["min(a, b) -> max(a, b)"]),
        ("f(x)", ["f(x) -> None"]),
        ("if a: f = g", ["if a: -> if not a:"]),
        ("for a in b: break", ["break -> continue"]),
        ("def f() -> int:\n    return a", ["return a -> return None"]),
    ],
)
def test_every_kind_of_fault_is_put_in(mutate: ModuleType, source: str, faults: list[str]) -> None:
    mutants = mutate.mutants_of(source)
    assert [mutant.what for mutant in mutants] == faults
    assert len({mutant.source for mutant in mutants} | {source}) == len(faults) + 1


@pytest.mark.parametrize(
    "source",
    [
        '"""One < two."""',
        "assert a < b, 'never'",
        "def f(a: 3 = None) -> None: ...",
        "import a",
        "logger.info('a %d', b + 1)",
        "x = f'{a + b}'",
        "class A:\n    def __repr__(self): return a + b",
        "def f(): return None",
    ],
)
def test_what_says_something_and_does_nothing_is_left_alone(mutate: ModuleType, source: str) -> None:
    assert [mutant.what for mutant in mutate.mutants_of(source)] == []


def test_the_mirrored_test_comes_before_those_of_its_folder(mutate: ModuleType) -> None:
    assert mutate.tests_of(Path("control_plane/scheduler/memory/block_pool.py")) == [
        ["tests/control_plane/scheduler/memory/test_block_pool.py"],
        ["tests/control_plane/scheduler/memory"],
    ]
    assert mutate.tests_of(Path("client/motet/retries.py")) == [
        ["tests/client/test_retries.py"],
        ["tests/client"],
    ]


def test_faults_that_no_test_notices_are_reported(
    mutate: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    files = {
        "control_plane/same.py": "def same(x):\n    return x\n\n\ndef untested(x):\n    return x\n",
        "tests/control_plane/test_same.py": "from control_plane.same import same\n\ndef test(): assert same(9) == 9\n",
        "pyproject.toml": '[tool.pytest.ini_options]\npythonpath = ["."]\naddopts = "--import-mode=importlib"\n',
    }
    for name, text in files.items():
        (tmp_path / "project" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "project" / name).write_text(text, encoding="utf-8")
    monkeypatch.setattr(mutate, "ROOT", tmp_path / "project")
    assert mutate.main(["control_plane/same.py", "--mutants", "99", "--jobs", "1"]) == 1
    printed = capsys.readouterr().out.splitlines()
    assert printed[-1] == "2 mutants, 1 killed, 1 survived"
    assert "  survived: control_plane/same.py:6: return x -> return None" in printed
    assert (tmp_path / "project" / "control_plane" / "same.py").read_text("utf-8") == files["control_plane/same.py"]
