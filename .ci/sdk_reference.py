"""Writes docs/sdk.md, the reference of the SDK, from its signatures, docstrings and the comments beside its fields.

    python .ci/sdk_reference.py            write it
    python .ci/sdk_reference.py --check    fail if it is out of date

Only what `motet` exports is described. The sources are read, not imported.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "client" / "motet"
REFERENCE = ROOT / "docs" / "sdk.md"
SECTIONS = {  # heading: the exported names below it; a name that is in none goes under its module's section
    "Clients": ("Client", "AsyncClient", "RetryPolicy"),
    "Adapters": ("Adapters", "AsyncAdapters"),
    "Generation": (
        "GenerateOptions",
        "ChatMessage",
        "ToolCall",
        "BeamSearch",
        "LoraTask",
        "GenerationStream",
        "AsyncGenerationStream",
    ),
    "Workers": ("Workers", "AsyncWorkers"),
    "Model and tokens": ("Model", "AsyncModel", "ModelFacts", "TokenizeOptions", "Tokenized"),
    "Embeddings and classes": (
        "PoolingOptions",
        "Pooling",
        "ProblemType",
        "Embeddings",
        "Embedding",
        "Classifications",
        "Classification",
    ),
    "Offline": (
        "LLM",
        "SamplingParams",
        "TextPrompt",
        "TokensPrompt",
        "RequestOutput",
        "PoolingRequestOutput",
        "EmbeddingOutput",
        "ClassificationOutput",
    ),
    "Results": (),
    "Errors": (),
}
HEAD = """# SDK reference

Generated from the docstrings of `client/motet` by `.ci/sdk_reference.py`; `make sdk-reference` writes it anew.
Everything here is imported from `motet`. [examples](../examples/README.md) shows it at work.
"""


def exported_names() -> dict[str, str]:
    """Every name that `motet` exports, and the module that defines it."""
    tree = ast.parse((PACKAGE / "__init__.py").read_text("utf-8"))
    return {
        alias.name: node.module.removeprefix("motet.")
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("motet.")
        for alias in node.names
        if alias.asname == alias.name
    }


def reference() -> str:
    """The whole document."""
    modules = exported_names()
    # Those that define an exported name, and v1, whose classes some of them inherit from.
    folders = sorted({PACKAGE / "v1", *((PACKAGE / module.replace(".", "/")).parent for module in modules.values())})
    classes = {
        node.name: (node, source.splitlines())
        for folder in folders
        for path in sorted(folder.glob("*.py"))
        if not path.name.endswith(("_pb2.py", "_pb2_grpc.py"))
        for source in [path.read_text("utf-8")]
        for node in ast.parse(source).body
        if isinstance(node, ast.ClassDef)
    }
    assert modules.keys() <= classes.keys(), "every exported name is a class"
    placed = {name for names in SECTIONS.values() for name in names}
    lines = [HEAD]
    for heading, names in SECTIONS.items():
        if not names:
            rest = [name for name in classes if name in modules and name not in placed]
            names = tuple(name for name in rest if (modules[name] == "errors") == (heading == "Errors"))
        lines.append(f"## {heading}\n")
        if heading == "Errors":
            lines.append("[errors.md](errors.md) lists the reasons.\n")
        for name in names:
            lines += _describe(name, classes)
    return "\n".join(lines).rstrip() + "\n"


Classes = dict[str, tuple[ast.ClassDef, list[str]]]  # by name; the lines of the file that each is from


def _describe(name: str, classes: Classes) -> Iterator[str]:
    node = classes[name][0]
    bases = ", ".join(ast.unparse(base) for base in node.bases)
    yield f"### {node.name}\n"
    if bases in ("MotetError", "enum.StrEnum"):
        yield f"`{node.name}({bases})`\n"
    yield f"{_text(node)}\n"
    fields = list(_fields(name, classes))
    if fields:
        yield "\n".join(["| name | type | meaning |", "|---|---|---|", *fields]) + "\n"
    for part in node.body:
        if isinstance(part, (ast.FunctionDef, ast.AsyncFunctionDef)) and _is_described(part):
            yield f"```text\n{_signature(node.name, part)}\n```\n"
            if text := _text(part):
                yield f"{text}\n"


def _fields(name: str, classes: Classes) -> Iterator[str]:
    """Rows for the fields of the class and, before them, of those that it extends."""
    node, source = classes[name]
    for base in node.bases:
        if ast.unparse(base) in classes and ast.unparse(base) != "MotetError":
            yield from _fields(ast.unparse(base), classes)
    for part in node.body:
        yield from _field(part, source)


def _is_described(part: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    return not part.name.startswith("_") or (part.name == "__init__" and bool(ast.get_docstring(part)))


def _field(part: ast.stmt, source: list[str]) -> Iterator[str]:
    """A table row for a field or the value of an enumeration; its meaning is the comment beside it."""
    if isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name):
        name, kind = part.target.id, ast.unparse(part.annotation)
        if part.value is not None:
            kind += f" = {ast.unparse(part.value)}"
    elif isinstance(part, ast.Assign) and isinstance(part.targets[0], ast.Name):
        name, kind = part.targets[0].id, ast.unparse(part.value)
    else:
        return
    if name.startswith("_") or name == "code":
        return
    comment = re.search(r"  # (?!type: )(.*)$", source[(part.end_lineno or part.lineno) - 1])
    meaning = (comment[1] if comment else "").replace("|", "\\|")
    kind = kind.replace(" | ", " \\| ")
    yield f"| `{name}` | `{kind}` | {meaning} |"


def _signature(owner: str, function: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    arguments = ast.unparse(function.args)
    arguments = re.sub(r"^self(, )?", "", arguments)
    name = owner if function.name == "__init__" else f"{owner}.{function.name}"
    if any(ast.unparse(decorator) == "property" for decorator in function.decorator_list):
        return f"{name}: {ast.unparse(function.returns) if function.returns else ''}"
    prefix = "async " if isinstance(function, ast.AsyncFunctionDef) else ""
    result = f" -> {ast.unparse(function.returns)}" if function.returns and function.name != "__init__" else ""
    line = f"{prefix}{name}({arguments}){result}"
    if len(line) <= 110:
        return line
    parts = [_argument(a, d) for a, d in _arguments(function.args)]
    return f"{prefix}{name}(\n" + "".join(f"    {part},\n" for part in parts) + f"){result}"


def _arguments(arguments: ast.arguments) -> Iterator[tuple[ast.arg | str, ast.expr | None]]:
    positional = [*arguments.posonlyargs, *arguments.args]
    defaults = [None] * (len(positional) - len(arguments.defaults)) + list(arguments.defaults)
    yield from [pair for pair in zip(positional, defaults, strict=True) if pair[0].arg != "self"]
    if arguments.kwonlyargs:
        yield "*", None
        yield from zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    if arguments.kwarg:
        annotation = arguments.kwarg.annotation
        yield f"**{arguments.kwarg.arg}: {ast.unparse(annotation) if annotation else ''}", None


def _argument(argument: ast.arg | str, default: ast.expr | None) -> str:
    text = argument if isinstance(argument, str) else ast.unparse(argument)
    return f"{text} = {ast.unparse(default)}" if default is not None else text


def _text(node: ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    return ast.get_docstring(node) or ""


def main(arguments: list[str]) -> int:
    """The exit status: with --check 1 if the document is out of date."""
    text = reference()
    if "--check" not in arguments:
        REFERENCE.write_text(text, "utf-8")
        return 0
    if REFERENCE.exists() and REFERENCE.read_text("utf-8") == text:
        print("docs/sdk.md is up to date")
        return 0
    print("docs/sdk.md is out of date: run `make sdk-reference`", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
