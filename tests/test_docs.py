"""The documents are true where a test can tell: files that they name, the SDK reference, the table of errors."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from motet.errors import MotetError as SdkError

import control_plane.errors as errors
from tests.test_structure import load

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = [
    *ROOT.glob("*.md"),
    *(ROOT / "docs").rglob("*.md"),
    ROOT / "benchmarks" / "README.md",
    ROOT / "examples" / "README.md",
]
WRITTEN = {"kernels/native/prebuilt", "kernels/tuning/tables/"}  # by commands, where they run
FOLDERS = "control_plane|data_plane|kernels|client|protos|tests|benchmarks|docs|examples|contract|\\.ci|\\.github"


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_file_that_a_document_names_exists(document: Path) -> None:
    """A path is code that begins with a folder of the repository; <op> and * stand for anything."""
    text = document.read_text("utf-8")
    paths = re.findall(rf"`((?:{FOLDERS})/[\w./*<>-]*[\w*>/])(?:::?\w+)?`", text)
    missing = [path for path in paths if not list(ROOT.glob(re.sub(r"<\w+>", "*", path.rstrip("/"))))]
    assert set(missing) <= WRITTEN


def test_the_fields_and_kinds_of_adapters_are_those_of_the_tables() -> None:
    text = (ROOT / "docs" / "adapters.md").read_text("utf-8")
    assert load("adapter_fields").written(text) == text, "run `make adapter-fields`"


def test_sdk_reference_is_up_to_date() -> None:
    reference = load("sdk_reference")
    assert (ROOT / "docs" / "sdk.md").read_text("utf-8") == reference.reference(), "run `make sdk-reference`"


def tree(base: type[Exception]) -> set[type[Exception]]:
    return {base}.union(*(tree(cls) for cls in base.__subclasses__()))


def test_every_reason_of_the_server_is_in_the_table_of_errors() -> None:
    text = (ROOT / "docs" / "errors.md").read_text("utf-8")
    documented = dict(re.findall(r"^\| `([A-Z_]+)` \| ([A-Z_]+) \|", text, re.M))
    own = [cls for cls in tree(errors.MotetError) if cls.__module__ == errors.__name__]
    actual = {cls.reason: errors.status_of(cls.__new__(cls)).name for cls in own}  # type: ignore[attr-defined, arg-type]
    assert documented == actual


def test_every_class_of_the_sdk_table_exists() -> None:
    text = (ROOT / "docs" / "errors.md").read_text("utf-8")
    names = re.findall(r"^\| `[A-Z_]+` \| `(\w+)` \|", text, re.M)
    assert len(names) == 4 and set(names) <= {cls.__name__ for cls in tree(SdkError)}
