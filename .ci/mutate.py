"""Puts small faults into modules, one at a time, and reports those that no test notices.

`make mutate MODULES="control_plane/scheduler/memory/block_pool.py" MUTANTS=20 SEED=0`. Every mutant lives in a copy of
the checkout. The module's mirrored test runs first, then all tests of its folder; a mutant that passes both survives.
Outside CI: a mutant costs a run of tests. CONTRIBUTING.md has the last result.
"""

from __future__ import annotations

import argparse
import ast
import copy
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

ROOT = Path(__file__).resolve().parents[1]
NOT_COPIED = (".git", ".venv*", ".motet", "*_cache", "__pycache__", ".hypothesis")
COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
OPERATORS: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.FloorDiv,
    ast.FloorDiv: ast.Mult,
    ast.Div: ast.Mult,
    ast.Mod: ast.Mult,
}
CALLS = {"min": "max", "max": "min", "any": "all", "all": "any"}
# Statements that say what must hold or what happened, and change nothing.
_QUIET_CALLS = ("logger", "logging", "warnings")
Change = Callable[[ast.AST], None]  # applied to the node of a copy of the tree


@dataclass(frozen=True)
class Mutant:
    """One fault in one module."""

    line: int
    what: str  # "a < b -> a <= b"
    source: str  # of the whole module


@dataclass(frozen=True)
class Outcome:
    """What the tests made of a mutant."""

    module: Path
    mutant: Mutant
    survived: bool
    duration_s: float


def mutants_of(source: str) -> list[Mutant]:
    """Every fault that can be put into a module, in the order of its lines."""
    tree = ast.parse(source)
    nodes = list(_reachable(tree))
    found = []
    for index, node in enumerate(nodes):
        for change in _changes(node):
            changed_tree = copy.deepcopy(tree)
            target = list(_reachable(changed_tree))[index]
            change(target)
            changed = ast.unparse(ast.fix_missing_locations(changed_tree)) + "\n"
            assert isinstance(node, ast.stmt | ast.expr), "only those are reached"
            what = f"{_short(ast.unparse(node))} -> {_short(ast.unparse(target))}"
            found.append(Mutant(node.lineno, what, changed))
    return sorted(found, key=lambda mutant: mutant.line)


def _reachable(node: ast.AST) -> Iterator[ast.AST]:
    """Nodes whose change changes what the module does: no annotations, docstrings, assertions, logs, reprs."""
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list", "type_params"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST) and not _is_quiet(child):
                if isinstance(child, ast.stmt | ast.expr):
                    yield child
                yield from _reachable(child)


def _is_quiet(node: ast.AST) -> bool:
    if isinstance(node, ast.Assert | ast.Import | ast.ImportFrom | ast.JoinedStr):
        return True
    if isinstance(node, ast.FunctionDef) and node.name == "__repr__":
        return True
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
        return True  # a docstring
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        function = node.value.func
        return isinstance(function, ast.Attribute) and ast.unparse(function.value).split(".")[0] in _QUIET_CALLS
    return False


def _changes(node: ast.AST) -> Iterator[Change]:
    """Faults of one node."""
    if isinstance(node, ast.Compare):
        for place, operator in enumerate(node.ops):
            if type(operator) in COMPARISONS:
                yield _set_comparison(place, COMPARISONS[type(operator)])
    elif isinstance(node, ast.BinOp | ast.AugAssign) and type(node.op) in OPERATORS:
        yield _setter("op", OPERATORS[type(node.op)]())
    elif isinstance(node, ast.BoolOp):
        yield _setter("op", ast.Or() if isinstance(node.op, ast.And) else ast.And())
    elif isinstance(node, ast.If | ast.While | ast.IfExp):
        yield _setter("test", ast.UnaryOp(ast.Not(), node.test))
    elif isinstance(node, ast.Constant):
        if isinstance(node.value, bool):
            yield _setter("value", not node.value)
        elif isinstance(node.value, int):
            yield _setter("value", node.value + 1)
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in CALLS:
        yield _setter("func", ast.Name(CALLS[node.func.id]))
    elif _can_be_dropped(node):
        yield _setter("value", ast.Constant(None))
    elif isinstance(node, ast.Break | ast.Continue):
        yield _become_other_jump


def _set_comparison(place: int, operator: type[ast.cmpop]) -> Change:
    def change(node: ast.AST) -> None:
        assert isinstance(node, ast.Compare)
        node.ops[place] = operator()

    return change


def _setter(name: str, value: object) -> Change:
    return lambda node: setattr(node, name, copy.deepcopy(value))


def _become_other_jump(node: ast.AST) -> None:
    node.__class__ = ast.Continue if isinstance(node, ast.Break) else ast.Break


def _can_be_dropped(node: ast.AST) -> bool:
    """A returned value, or a call for its effect."""
    if isinstance(node, ast.Return):
        return node.value is not None and not (isinstance(node.value, ast.Constant) and node.value.value is None)
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)


def _short(text: str) -> str:
    first = text.splitlines()[0]
    return first if len(first) <= 90 else f"{first[:87]}..."


def tests_of(module: Path) -> list[list[str]]:
    """What is run for a module, relative to the checkout: its mirrored test where there is one, then its folder's."""
    parts = module.parts[1:] if module.parts[0] == "client" else module.parts  # client/motet is tested in tests/client
    folder = Path("tests", *("client" if part == "motet" else part for part in parts[:-1]))
    mirrored = folder / f"test_{module.name}"
    steps = [[str(mirrored)]] if (ROOT / mirrored).exists() else []
    return [*steps, [str(folder)]]


class Copies:
    """Copies of the checkout that mutants are tested in, one for each job."""

    def __init__(self, directory: Path, count: int) -> None:
        self._free: SimpleQueue[Path] = SimpleQueue()
        for index in range(count):
            target = directory / f"copy-{index}"
            shutil.copytree(ROOT, target, ignore=shutil.ignore_patterns(*NOT_COPIED))
            self._free.put(target)

    def test(self, module: Path, source: str, limits_s: Sequence[float]) -> bool:
        """Whether every step of the module's tests passes with this source, each within its limit."""
        checkout = self._free.get()
        file = checkout / module
        original = file.read_text(encoding="utf-8")
        try:
            file.write_text(source, encoding="utf-8")
            return all(
                not failure_of(checkout, step, limit_s)
                for step, limit_s in zip(tests_of(module), limits_s, strict=True)
            )
        finally:
            file.write_text(original, encoding="utf-8")
            self._free.put(checkout)


def failure_of(checkout: Path, tests: Sequence[str], limit_s: float) -> str:
    """What pytest says of tests that do not pass in time; empty if they do."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-n", "0", "-m", "not gpu", "-p", "no:cacheprovider", *tests]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(checkout), str(checkout / "client")]),
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    try:
        done = subprocess.run(command, cwd=checkout, env=environment, capture_output=True, timeout=limit_s, text=True)
    except subprocess.TimeoutExpired:
        return f"not within {limit_s:.0f} s"
    return "" if done.returncode == 0 else f"{done.stdout[-2000:]}\nstatus {done.returncode}"


def run(module: Path, copies: Copies, *, count: int, seed: int, num_jobs: int) -> list[Outcome]:
    """Test `count` mutants of one module, drawn by the seed, all of them if there are fewer."""
    source = (ROOT / module).read_text(encoding="utf-8")
    limits_s = []
    for step in tests_of(module):
        begin_s = time.monotonic()
        if told := failure_of(ROOT, step, 1800.0):
            raise SystemExit(f"{told}\n{' '.join(step)} does not pass without any fault")
        limits_s.append(30.0 + 5 * (time.monotonic() - begin_s))
    mutants = mutants_of(source)
    drawn = random.Random(f"{seed}/{module}").sample(mutants, min(count, len(mutants)))

    def test(mutant: Mutant) -> Outcome:
        begin_s = time.monotonic()
        survived = copies.test(module, mutant.source, limits_s)
        outcome = Outcome(module, mutant, survived, time.monotonic() - begin_s)
        if survived:
            print(f"  survived: {module}:{mutant.line}: {mutant.what}", flush=True)
        return outcome

    with ThreadPoolExecutor(num_jobs) as pool:
        outcomes = list(pool.map(test, drawn))
    num_survived = sum(outcome.survived for outcome in outcomes)
    print(f"{module}: {len(outcomes)} of {len(mutants)} mutants, {num_survived} survived", flush=True)
    return outcomes


def main(argv: Sequence[str] | None = None) -> int:
    """Run as asked for; 1 if a mutant survived."""
    parser = argparse.ArgumentParser(prog="mutate", description=__doc__)
    parser.add_argument("modules", nargs="+", type=Path, help="files of the checkout, relative to its root")
    parser.add_argument("--mutants", type=int, default=20, help="of each module, a count (default 20)")
    parser.add_argument("--seed", type=int, default=0, help="of the choice (default 0)")
    parser.add_argument("--jobs", type=int, default=2, help="mutants tested at once, a count (default 2)")
    args = parser.parse_args(argv)
    missing = [str(module) for module in args.modules if not (ROOT / module).is_file()]
    if missing:
        parser.error(f"no such modules: {', '.join(missing)}")
    with tempfile.TemporaryDirectory(prefix="motet-mutants-") as directory:
        copies = Copies(Path(directory), args.jobs)
        outcomes = [
            outcome
            for module in args.modules
            for outcome in run(module, copies, count=args.mutants, seed=args.seed, num_jobs=args.jobs)
        ]
    num_survived = sum(outcome.survived for outcome in outcomes)
    print(f"{len(outcomes)} mutants, {len(outcomes) - num_survived} killed, {num_survived} survived")
    return 1 if num_survived else 0


if __name__ == "__main__":
    sys.exit(main())
