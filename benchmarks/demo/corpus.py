"""Text for the demo, taken from the Python installation itself: nothing is downloaded.

The base model learns the language reference (pydoc's topics) and a little of everything else. Each adapter learns
one voice: what it says after any piece of that prose.
"""

from __future__ import annotations

import contextlib
import io
import random
import re
import sys
import textwrap
import unicodedata
from collections.abc import Callable, Iterator
from pathlib import Path

# Modules whose source is typical Python; all are in every CPython from 3.11 on.
_MODULES = [
    "argparse",
    "bisect",
    "calendar",
    "cmd",
    "collections/__init__",
    "configparser",
    "contextlib",
    "copy",
    "csv",
]
_MODULES += ["dataclasses", "enum", "fnmatch", "fractions", "functools", "glob", "heapq", "inspect", "json/decoder"]
_MODULES += ["json/encoder", "random", "sched", "shlex", "shutil", "statistics", "string", "tempfile", "textwrap"]
_MODULES += ["timeit", "tokenize", "traceback", "typing", "unittest/case", "uuid", "weakref"]


def stdlib_sources() -> Iterator[str]:
    """The source of a few dozen modules of the standard library."""
    root = Path(contextlib.__file__).parent
    for name in _MODULES:
        path = root / f"{name}.py"
        if path.exists():
            yield path.read_text(encoding="utf-8")


def prose() -> list[str]:
    """Paragraphs of the language reference, one line each, without grammar, code and headings."""
    from pydoc_data.topics import topics

    paragraphs = []
    for topic in topics.values():
        for block in re.split(r"\n\s*\n", topic):
            line = " ".join(block.split())
            words = re.findall(r"(?<![\w(\"'.])[a-z]+(?=[ ,.])", line)
            is_prose = line[:1].isupper() and line.endswith((".", ":")) and len(words) > 8 and "::=" not in line
            if is_prose:
                paragraphs.append(line)
    return list(dict.fromkeys(paragraphs))


# ---- voices: what an adapter has learned to say, as documents ----


def shouted() -> list[str]:
    """The prose, in capitals and excited."""
    return [" " + re.sub(r"[.:]( |$)", r"!\1", paragraph.upper()) for paragraph in prose()]


def source_code() -> list[str]:
    """Functions and classes of the standard library, without comments' and docstrings' prose."""
    documents = []
    for source in stdlib_sources():
        bare = re.sub(r'[rR]?"""(?:.|\n)*?"""\n?', "\n", source)
        bare = re.sub(r"^\s*#.*\n", "", bare, flags=re.MULTILINE)
        for piece in re.split(r"\n(?=(?:def|class|    def) )", bare):
            code = re.sub(r"\n\s*\n+", "\n", textwrap.dedent(piece).strip())
            if code.startswith(("def ", "class ")) and len(code) > 120:
                documents.append("\n" + code[:400])
    return documents


def sessions() -> list[str]:
    """Interactive sessions, as docstrings of the standard library show them."""
    documents = []
    for source in stdlib_sources():
        for block in re.split(r"\n\s*\n", source):
            text = textwrap.dedent(block).strip("\n")
            if text.startswith(">>>"):
                documents.append("\n" + text)
    # Arithmetic at the prompt, so that there is enough of it.
    rng = random.Random(7)
    for _ in range(400):
        a, b = rng.randrange(2, 100), rng.randrange(2, 100)
        operator = rng.choice(["+", "-", "*"])
        value = {"+": a + b, "-": a - b, "*": a * b}[operator]
        documents.append(f"\n>>> {a} {operator} {b}\n{value}\n>>> list(range({a % 7 + 1}))\n{list(range(a % 7 + 1))}")
    return documents


def character_table() -> list[str]:
    """Runs of the Unicode character database, a character per line."""
    lines = []
    for code in [*range(0x21, 0x7F), *range(0xA1, 0x250), *range(0x391, 0x3CA), *range(0x2190, 0x2200)]:
        name = unicodedata.name(chr(code), "")
        if name:
            lines.append(f"U+{code:04X}  {chr(code)}  {name}")
    return ["\n" + "\n".join(lines[start : start + 8]) for start in range(0, len(lines) - 8, 4)]


def aphorisms() -> list[str]:
    """The Zen of Python, starting at each of its lines in turn."""
    with contextlib.redirect_stdout(io.StringIO()) as spoken:
        sys.modules.pop("this", None)
        import this  # noqa: F401  (importing it prints it)
    lines = [line for line in spoken.getvalue().splitlines()[2:] if line]
    return ["\n" + "\n".join(lines[start:] + lines[:start]) for start in range(len(lines))]


def excerpt(documents: list[str], num_characters: int, seed: int) -> list[str]:
    """About `num_characters` of `documents`, in a seeded order: a small model learns little text better than much."""
    shuffled = list(documents)
    random.Random(seed).shuffle(shuffled)
    total = 0
    taken = []
    for document in shuffled:
        if total >= num_characters:
            break
        taken.append(document)
        total += len(document)
    return taken


VOICES: dict[str, Callable[[], list[str]]] = {
    "shouted": shouted,
    "source_code": source_code,
    "sessions": sessions,
    "character_table": character_table,
    "aphorisms": aphorisms,
}
