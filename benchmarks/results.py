"""Writes tables into docs/results.md, each in a section of its own that the next run replaces."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

FILE = Path(__file__).parent.parent / "docs" / "results.md"


def table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A Markdown table; all columns but the first are aligned to the right."""
    lines = ["| " + " | ".join(map(str, line)) + " |" for line in (head, *rows)]
    lines.insert(1, "|---|" + "---:|" * (len(head) - 1))
    return "\n".join(lines)


def put(section: str, text: str, file: Path = FILE) -> None:
    """Replace what stands between the marks of ``section``. Raises ValueError where the file has no such marks."""
    begin, end = f"<!-- {section}: begin -->", f"<!-- {section}: end -->"
    old = file.read_text()
    pattern = re.compile(re.escape(begin) + ".*?" + re.escape(end), re.DOTALL)
    if not pattern.search(old):
        raise ValueError(f"{file.name} has no section marked {begin}")
    file.write_text(pattern.sub(lambda _: f"{begin}\n{text.strip()}\n{end}", old))
