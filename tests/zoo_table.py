"""Write docs/zoo.md: every model of the zoo against every behaviour.  ``python tests/zoo_table.py [part of a name]``

With a part of a name, only those rows are run, and shown instead of written.
"""

from __future__ import annotations

import os
import sys
import warnings
from importlib.metadata import version
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from zoo import EXPECTED, ZOO
from zoo_behaviours import COLUMNS, Entry, NotApplicable, as_it_is

import t5fx

PAGE = Path(__file__).parents[1] / "docs" / "zoo.md"
#: Cells that do not pass yet, and why: they are run all the same, and an entry here that passes is an error.
NOT_SUPPORTED: dict[tuple[str, str], str] = {}
_DESCRIBED = {
    "float-mask": "a float bias or mask is added to the scores; `drop_bias=True` converts without it (next row)",
    "channel": "attention over channels: linear already",
    "pooling": "one query, or a few learned ones: linear already",
    "cross": "queries and keys are different tokens: linear in the image tokens already",
    "shape": "the operands are not [batch, heads, tokens, head_dim]",
    "layout": "the order of the tokens is not known; `layout=` says it",
    "query-mask": "a mask that differs between queries (causal text)",
    "map": "the attention map is asked for (`need_weights=True`)",
}


class Table:
    def __init__(self) -> None:
        self.notes: list[str] = []
        self.failures: list[str] = []

    def note(self, text: str) -> str:
        """``[1]``, for a footnote."""
        if text not in self.notes:
            self.notes.append(text)
        return f"[{self.notes.index(text) + 1}]"

    def cell(self, entry: Entry, column: str) -> str:
        count, refused, _ = EXPECTED[entry.name]
        kept = [code for code in refused if not (entry.config.drop_bias and code == "float-mask")]
        codes = ", ".join(f"{kept.count(code)} {code}" for code in dict.fromkeys(kept))
        if len(kept) == count and column not in ("sites", "refusals"):
            return f"refused: {', '.join(dict.fromkeys(kept))}"
        if column not in ("sites", "refusals"):
            try:
                COLUMNS[column](entry, as_it_is)
            except NotApplicable as reason:
                return f"n/a {self.note(str(reason))}"
            except Exception as error:
                return f"n/a {self.note(f'the unconverted model does not do this either: {_short(error)}')}"
        known = NOT_SUPPORTED.get((entry.name, column))
        try:
            COLUMNS[column](entry, entry.linearize)
        except Exception as error:
            if known is not None:
                return f"not supported {self.note(known)}"
            self.failures.append(f"{_label(entry)} / {column}: {type(error).__name__}: {error}")
            return "FAIL"
        if known is not None:
            self.failures.append(f"{_label(entry)} / {column}: passes, but is listed as not supported")
        if column == "sites":
            return f"pass ({count - len(kept)} of {count})"
        return f"pass ({codes})" if column == "refusals" and codes else "pass"


def _short(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {(lines or [''])[0][:110]}"


def _label(entry: Entry) -> str:
    return entry.name + (" drop_bias=True" if entry.config.drop_bias else "")


def entries() -> list[Entry]:
    found = []
    for name in ZOO:
        found.append(Entry(name))
        if "float-mask" in EXPECTED[name][1]:
            found.append(Entry(name, t5fx.T5.replace(drop_bias=True)))
    return found


def page(rows: list[tuple[str, list[str]]], table: Table) -> str:
    names = ("torch", "timm", "diffusers", "transformers", "torchvision")
    versions = ", ".join(f"{name} {version(name)}" for name in names)
    cells = [cell for _, row in rows for cell in row]
    counts = {kind: sum(c.startswith(kind) for c in cells) for kind in ("pass", "refused", "n/a", "not supported")}
    lines = [
        "# The zoo",
        "",
        f"{len(ZOO)} small, randomly initialised models of real architectures (`tests/zoo.py`), every site linearized,",
        "against what a model must go on doing (`tests/zoo_behaviours.py`: one function a column, each run on the",
        "unconverted model too). Written by `make zoo`, which is `python tests/zoo_table.py`, with",
        f"{versions}.",
        "",
        f"Of {len(cells)} cells: " + ", ".join(f"{count} {kind}" for kind, count in counts.items()) + ".",
        "",
        "| model | " + " | ".join(COLUMNS) + " |",
        "|---" * (len(COLUMNS) + 1) + "|",
        *(f"| {name} | " + " | ".join(row) + " |" for name, row in rows),
        "",
        "A model all of whose sites are refused can't be linearized, and stays as it is. The refusals:",
        "",
        *(f"- {code}: {text}" for code, text in _DESCRIBED.items()),
        "",
        *(f"[{i}] {note.replace('|', '/').replace('<', '&lt;')}\n" for i, note in enumerate(table.notes, 1)),
    ]
    return "\n".join(lines).rstrip() + "\n"


def main(only: list[str]) -> int:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    console, table = Console(), Table()
    chosen = [e for e in entries() if not only or any(part in _label(e) for part in only)]
    rows = []
    shown = (TextColumn("{task.description:40}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*shown, console=Console(stderr=True)) as bar:
        task = bar.add_task("", total=len(chosen) * len(COLUMNS))
        for entry in chosen:
            row = []
            for column in COLUMNS:
                bar.update(task, description=f"{_label(entry)}: {column}")
                row.append(table.cell(entry, column))
                bar.advance(task)
            rows.append((_label(entry), row))
    text = page(rows, table)
    for failure in table.failures:
        console.print(failure, markup=False, soft_wrap=True)
    if only:
        console.print(text, markup=False, soft_wrap=True)
    elif not table.failures:
        PAGE.write_text(text)
        console.print(f"{PAGE} written")
    return 1 if table.failures else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
