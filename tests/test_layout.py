"""Habits of the repository that no linter knows: what files may not contain, and that the README's map is true."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = (
    *("benchmarks", "client", "contract", "control_plane", "data_plane", "examples", "gateway", "kernels", "protos"),
    ".ci",
)
GENERATED = {ROOT / "client" / "motet" / "v1", ROOT / "contract" / "v1", ROOT / "control_plane" / "scaler" / "v1"}
TEXT_SUFFIXES = {".py", ".pyi", ".md", ".toml", ".txt", ".proto", ".yaml", ".yml", ".cfg", ".ini", ""}
NOT_OURS = {".git", ".motet", "__pycache__", "build", "dist", "motet-data", "node_modules"}


def is_ours(path: Path) -> bool:
    parts = path.relative_to(ROOT).parts
    if parts[:2] == ("protos", "google"):  # copies of Google's files
        return False
    return not any(
        part in NOT_OURS or part.startswith((".venv", ".env")) or part.endswith(("_cache", ".egg-info"))
        for part in parts
    ) and not any(part == ".hypothesis" for part in parts)


def files(*, under: tuple[str, ...] = (".",), suffixes: set[str] = TEXT_SUFFIXES) -> list[Path]:
    found = [path for folder in under for path in sorted((ROOT / folder).rglob("*"))]
    return [path for path in found if path.suffix in suffixes and is_ours(path) and path.is_file()]


def modules() -> list[Path]:
    return [path for path in files(under=PACKAGES, suffixes={".py"}) if path.parent not in GENERATED]


def relative(path: Path) -> str:
    return str(path.relative_to(ROOT))


def test_every_module_says_what_it_owns() -> None:
    without = [relative(path) for path in modules() if not ast.get_docstring(ast.parse(path.read_text("utf-8")))]
    assert not without


def test_modules_stay_short_enough_to_read() -> None:
    """About 400 lines is the aim; from 600 on it is two files."""
    long = {relative(path): n for path in modules() if (n := len(path.read_text("utf-8").splitlines())) > 600}
    assert not long


FORBIDDEN = {
    "a path of someone's machine": r"(?<![\w.])/(work|root|home/\w+|Users/\w+|opt/(wheels|pypi))/",
    "a host of a package registry": r"\b(pypi|pythonhosted|npmjs|download\.pytorch|deb\.debian|dl-cdn)\.(org|com|io)\b",
    "work left over": r"\b(TODO|FIXME|XXX)\b",
}


@pytest.mark.parametrize("what", FORBIDDEN)
def test_no_file_contains(what: str) -> None:
    pattern = re.compile(FORBIDDEN[what])
    hits = []
    for path in files():
        if ROOT / "tests" in path.parents:  # tests make up paths in order to look for them in responses
            continue
        for number, line in enumerate(path.read_text("utf-8", errors="replace").splitlines(), start=1):
            if pattern.search(line):
                hits.append(f"{relative(path)}:{number}: {line.strip()[:100]}")
    assert not hits


def test_no_test_is_skipped_or_expected_to_fail() -> None:
    """What needs a GPU carries the `gpu` marker and is deselected; everything else runs."""
    pattern = re.compile(r"pytest\.(skip|importorskip|xfail|mark\.(skip|skipif|xfail))\b|unittest\.skip")
    hits = [
        relative(path)
        for path in files(under=("tests",), suffixes={".py"})
        if path != Path(__file__).resolve() and pattern.search(path.read_text("utf-8"))
    ]
    assert not hits


def test_only_the_tools_of_tests_look_into_a_scheduler() -> None:
    users = {relative(path) for path in modules() if re.search(r"\bscheduler_parts\b", path.read_text("utf-8"))}
    folder = "control_plane/scheduler"
    assert users == {f"{folder}/scheduler.py", f"{folder}/probe.py", f"{folder}/invariants.py"}


def test_every_kernel_has_its_definition() -> None:
    """A kernel's folder holds reference.py, the plain definition that everything else is compared with."""
    no_kernel = ("native", "tuning")
    folders = [path for path in (ROOT / "kernels").glob("*/") if path.name not in no_kernel and any(path.glob("*.py"))]
    assert folders
    assert [relative(path) for path in folders if not (path / "reference.py").exists()] == []


def test_the_readme_names_every_folder() -> None:
    readme = (ROOT / "README.md").read_text("utf-8")
    folders = [path.name for path in ROOT.iterdir() if path.is_dir() and is_ours(path) and any(path.iterdir())]
    assert [name for name in folders if f"{name}/" not in readme] == []


def test_every_pin_is_exact_and_given_once() -> None:
    lines = (ROOT / "constraints.txt").read_text("utf-8").splitlines()
    pins = [line for line in lines if line and not line.startswith("#")]
    assert [line for line in pins if not re.fullmatch(r"[A-Za-z0-9_.-]+==[0-9][\w.]*", line)] == []
    names = [re.sub(r"[-_.]+", "-", pin.split("==")[0]).lower() for pin in pins]
    assert len(names) == len(set(names))


def test_markdown_links_lead_somewhere() -> None:
    broken = []
    for path in files(suffixes={".md"}):
        for target in re.findall(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)", path.read_text("utf-8")):
            if not (path.parent / target).exists():
                broken.append(f"{relative(path)}: {target}")
    assert not broken


def test_every_test_has_a_time_limit(pytestconfig: pytest.Config) -> None:
    """Without pytest-timeout a test that hangs would hold the whole run, and show no stack."""
    assert pytestconfig.pluginmanager.hasplugin("timeout")
    assert 0 < float(pytestconfig.getini("timeout")) <= 300
