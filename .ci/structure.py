"""Measures the structure of the code and the documents: sizes, private reaches, retired words, long paragraphs.

    python .ci/structure.py            a table, and what exceeds each limit
    python .ci/structure.py --write    the same, and lowers the counts in docs/architecture.md that have fallen

The goals and the counts that are allowed at present are in the table of docs/architecture.md; tests/test_structure.py
compares. The retired words are in docs/glossary.md.
"""

from __future__ import annotations

import ast
import functools
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PRODUCT = ("control_plane", "data_plane", "gateway", "kernels", "client", "benchmarks", "contract")
ARCHITECTURE = ROOT / "docs" / "architecture.md"
GLOSSARY = ROOT / "docs" / "glossary.md"
GENERATED = ("_pb2.py", "_pb2_grpc.py", "_pb2.pyi")
MARKS = ("<!-- structure -->\n", "<!-- /structure -->")

MAX_PUBLIC_METHODS = 20
DEVICE_CODE = ("triton.jit", "kernel")  # decorators
MAX_FUNCTION_LINES = 80
MAX_FILES_IN_FOLDER = 15
MAX_FILE_LINES = 450
MAX_PARAGRAPH_WORDS = 120


@dataclass(frozen=True)
class Measure:
    """One row of the table. `find` lists what exceeds the limit, one line each; the goal is that it lists nothing."""

    title: str
    find: Callable[[], list[str]]


# ---- files ----


def _skipped(path: Path) -> bool:
    parts = path.relative_to(ROOT).parts
    return path.name.endswith(GENERATED) or any(
        part in ("node_modules", "build", "dist", "__pycache__", ".motet", "google") or part.startswith(".venv")
        for part in parts
    )


@functools.cache
def python_files(*folders: str) -> tuple[Path, ...]:
    """The Python files below these folders that are written by hand."""
    found = [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]
    return tuple(path for path in found if not _skipped(path))


@functools.cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text("utf-8"))


def _name(path: Path) -> str:
    return str(path.relative_to(ROOT))


# ---- sizes ----


def large_classes() -> list[str]:
    """Classes of the product with too many public methods, properties included."""
    found = []
    for path in python_files(*PRODUCT):
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.ClassDef):
                methods = {
                    part.name
                    for part in node.body
                    if isinstance(part, (ast.FunctionDef, ast.AsyncFunctionDef)) and not part.name.startswith("_")
                }
                if len(methods) > MAX_PUBLIC_METHODS:
                    found.append(f"{_name(path)}: {node.name} has {len(methods)} public methods")
    return found


def long_functions() -> list[str]:
    """Functions of the product that are too long. Device code is not counted: a kernel is one function."""
    found = []
    for path in python_files(*PRODUCT):
        for node in ast.walk(tree_of(path)):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and not _is_device_code(node):
                num_lines = (node.end_lineno or node.lineno) - node.lineno + 1
                if num_lines > MAX_FUNCTION_LINES:
                    found.append(f"{_name(path)}: {node.name} has {num_lines} lines")
    return found


def _is_device_code(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    return any(ast.unparse(decorator).partition("(")[0] in DEVICE_CODE for decorator in node.decorator_list)


def full_folders() -> list[str]:
    """Folders of the product with too many Python files; `__init__.py` is not counted."""
    count: dict[Path, int] = {}
    for path in python_files(*PRODUCT):
        if path.name != "__init__.py":
            count[path.parent] = count.get(path.parent, 0) + 1
    return [f"{_name(folder)}: {n} files" for folder, n in sorted(count.items()) if n > MAX_FILES_IN_FOLDER]


def long_files() -> list[str]:
    """Files of the product and of tests that are too long."""
    lines = {path: len(path.read_text("utf-8").splitlines()) for path in python_files(*PRODUCT, "tests")}
    return [f"{_name(path)}: {n} lines" for path, n in lines.items() if n > MAX_FILE_LINES]


# ---- reaches into private parts ----


def product_reaches() -> list[str]:
    """Places in the product that use a private name which another file of the product defines."""
    return _reaches(python_files(*PRODUCT))


def test_reaches() -> list[str]:
    """Places in tests that use a private name of the product, by attribute, import or monkeypatch."""
    return _reaches(python_files("tests"))


def _reaches(paths: Iterable[Path]) -> list[str]:
    names = _private_names()
    return [f"{_name(path)}:{line}: {name}" for path in paths for line, name in _foreign_uses(tree_of(path), names)]


def _foreign_uses(tree: ast.Module, names: set[str]) -> Iterator[tuple[int, str]]:
    """Line and name of every use of these private names, except of those that the module itself defines."""
    own = set(_private_definitions(tree))
    return ((line, name) for line, name in _private_uses(tree) if name in names and name not in own)


@functools.cache
def _private_names() -> set[str]:
    """Private names that files of the product define."""
    return {name for path in python_files(*PRODUCT) for name in _private_definitions(tree_of(path))}


NAMED_TUPLE_METHODS = ("_asdict", "_fields", "_make", "_replace")  # public in spite of their names


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and len(name) > 1 and name not in NAMED_TUPLE_METHODS


def _private_definitions(tree: ast.Module) -> Iterator[str]:
    """Private functions, classes, fields, module variables and attributes of self that a module defines."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)) and _is_private(node.name):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and _is_private(node.id):
            yield node.id
        elif isinstance(node, ast.Attribute) and _is_own(node) and isinstance(node.ctx, ast.Store):
            yield from [node.attr] if _is_private(node.attr) else []


def _is_own(node: ast.Attribute) -> bool:
    return isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")


def _private_uses(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Line and name of every private attribute of something other than self, private import, and name in a setattr."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and _is_private(node.attr) and not _is_own(node):
            yield node.lineno, node.attr
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                if _is_private(alias.name):
                    yield node.lineno, alias.name
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("getattr", "setattr")):
            for argument in node.args[:2]:
                if isinstance(argument, ast.Constant) and isinstance(argument.value, str):
                    last = argument.value.rsplit(".", 1)[-1]
                    if _is_private(last):
                        yield node.lineno, last


# ---- words ----


def retired_words() -> list[str]:
    """Places in code, tests, protos and documents where a word occurs that docs/glossary.md retires."""
    patterns = _retired_patterns()
    # The list itself, its test, history, and what is generated from docstrings.
    not_searched = {GLOSSARY, ROOT / "benchmarks/LOG.md", ROOT / "CHANGELOG.md", ROOT / "docs/sdk.md"}
    not_searched.add(ROOT / "tests" / "test_structure.py")
    texts = [path for suffix in ("*.md", "*.proto", "*.c", "*.h") for path in sorted(ROOT.rglob(suffix))]
    found = []
    for path in [*python_files(*PRODUCT, "tests", "examples"), *(path for path in texts if not _skipped(path))]:
        if path in not_searched:
            continue
        for number, line in enumerate(path.read_text("utf-8").splitlines(), 1):
            words = _words(line)
            found += [f"{_name(path)}:{number}: {match[0]}" for p in patterns for match in p.finditer(words)]
    return found


def _retired_patterns() -> list[re.Pattern[str]]:
    """The patterns of the glossary's second table, its last column."""
    section = GLOSSARY.read_text("utf-8").split("## Retired words", 1)[1]
    rows = [row for row in section.splitlines() if row.startswith("| ")][2:]
    cells = [re.fullmatch(r"\| .* \| (`(.+)`|by reading) \|", row) for row in rows]
    assert all(cells), "a row of the retired words ends with a `pattern`, or with: by reading"
    return [re.compile(rf"\b(?:{cell[2]})\b") for cell in cells if cell and cell[2]]


def _words(line: str) -> str:
    """The line in lower case, names in CamelCase and snake_case parted into words."""
    parted = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", " ", line)
    return re.sub(r"[_\W]+", " ", parted).lower()


def long_paragraphs() -> list[str]:
    """Paragraphs and list items of the documents that are too long. Tables and code are not counted."""
    documents = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").glob("*.md")]
    documents += [ROOT / "benchmarks" / "README.md", ROOT / "client" / "README.md"]
    found = []
    for path in documents:
        text = re.sub(r"^```.*?^```", "", path.read_text("utf-8"), flags=re.DOTALL | re.MULTILINE)
        text = "\n".join("" if line.startswith(("|", "#")) else line for line in text.splitlines())
        for paragraph in re.split(r"\n\s*\n|\n(?=\s*(?:[-*]|\d+\.) )", text):
            if (num_words := len(paragraph.split())) > MAX_PARAGRAPH_WORDS:
                found.append(f"{_name(path)}: {num_words} words: {' '.join(paragraph.split()[:6])} ...")
    return found


# ---- the table ----

MEASURES = (
    Measure(f"classes with more than {MAX_PUBLIC_METHODS} public methods", large_classes),
    Measure(f"functions above {MAX_FUNCTION_LINES} lines, device code excepted", long_functions),
    Measure(f"folders with more than {MAX_FILES_IN_FOLDER} files", full_folders),
    Measure(f"files above {MAX_FILE_LINES} lines", long_files),
    Measure("reaches into another file's private parts, product", product_reaches),
    Measure("reaches into private parts, tests", test_reaches),
    Measure("retired words", retired_words),
    Measure(f"paragraphs above {MAX_PARAGRAPH_WORDS} words in documents", long_paragraphs),
)


def allowed_counts() -> dict[str, int]:
    """The column "at most" of the table in docs/architecture.md."""
    table = ARCHITECTURE.read_text("utf-8").split(MARKS[0], 1)[1].split(MARKS[1], 1)[0]
    rows = [row.strip("| \n").split(" | ") for row in table.splitlines()[2:]]
    return {title: int(at_most) for title, _, at_most in rows}


def write_table(counts: dict[str, int]) -> None:
    """Put the counts into the table, each no higher than it was."""
    before, rest = ARCHITECTURE.read_text("utf-8").split(MARKS[0], 1)
    table, after = rest.split(MARKS[1], 1)
    allowed = allowed_counts() if table.strip() else {}
    rows = [f"| {title} | 0 | {min(count, allowed.get(title, count))} |\n" for title, count in counts.items()]
    head = "| what is counted | goal | at most |\n|---|--:|--:|\n"
    ARCHITECTURE.write_text("".join([before, MARKS[0], head, *rows, MARKS[1], after]), "utf-8")


def main(arguments: list[str]) -> int:
    """Print the table; the exit status is 0."""
    found = {measure.title: measure.find() for measure in MEASURES}
    for title, places in found.items():
        print(f"{len(places):6}  {title}")
        for place in places if "--all" in arguments else places[:8]:
            print(f"          {place}")
    if "--write" in arguments:
        write_table({title: len(places) for title, places in found.items()})
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
