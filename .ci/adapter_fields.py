"""Writes the list of fields and kinds in docs/adapters.md from the tables in control_plane/registry/peft.

    python .ci/adapter_fields.py

tests/test_docs.py compares them.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from control_plane.registry.peft.config_fields import FIELDS  # noqa: E402
from control_plane.registry.peft.peft_types import OTHER_TYPES  # noqa: E402

DOCUMENT = ROOT / "docs" / "adapters.md"


def fields() -> list[str]:
    """A row for each field."""
    rows = []
    for field in FIELDS:
        writers = f"PEFT from {field.writers}" if field.writers[0].isdigit() else field.writers
        rows.append(f"| `{field.name}` | {writers} | {field.use.value} | {field.meaning} |")
    return ["| field | written by | value | meaning, or what to do |", "|---|---|---|---|", *rows]


def kinds() -> list[str]:
    """A row for each advice, with the kinds that it is for."""
    by_advice: dict[str, list[str]] = {}
    for name, advice in OTHER_TYPES.values():
        by_advice.setdefault(advice, []).append(name)
    rows = [f"| {', '.join(sorted(names, key=str.lower))} | {advice} |" for advice, names in by_advice.items()]
    return ["| kind | what to do |", "|---|---|", *rows]


def with_section(text: str, name: str, lines: list[str]) -> str:
    """`text` with the lines between the section's two marks."""
    begin, end = f"<!-- {name} -->\n", f"<!-- /{name} -->"
    head, _, rest = text.partition(begin)
    return head + begin + "\n".join(lines) + "\n" + rest[rest.index(end) :]


def written(text: str) -> str:
    """The document with both lists as the tables have them."""
    return with_section(with_section(text, "fields", fields()), "kinds", kinds())


if __name__ == "__main__":
    DOCUMENT.write_text(written(DOCUMENT.read_text("utf-8")), "utf-8")
