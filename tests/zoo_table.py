"""Write docs/zoo.md: every model of the zoo against every behaviour.  ``python tests/zoo_table.py [part of a name]``

With a part of a name, only those rows are run, and shown instead of written.
"""

from __future__ import annotations

import os
import sys
import warnings
from dataclasses import dataclass
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
_WINDOWS = "set_input_size changes Swin's windows, and the converted sites keep theirs: call it first, then linearize"
NOT_SUPPORTED = {
    ("timm/swin_tiny", "new resolution"): _WINDOWS,
    ("timm/swin_tiny", "non-square"): _WINDOWS,
}
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


@dataclass
class Cell:
    """``kind`` is pass, refused, n/a, not supported or FAIL; ``text`` what is shown behind it, ``note`` below it."""

    kind: str
    text: str = ""
    note: str = ""


def cell(entry: Entry, column: str) -> Cell:
    count, refused, _ = EXPECTED[entry.name]
    kept = [code for code in refused if not (entry.config.drop_bias and code == "float-mask")]
    if len(kept) == count and column not in ("sites", "refusals"):
        return Cell("refused", f": {', '.join(dict.fromkeys(kept))}")
    known = NOT_SUPPORTED.get((entry.name, column))
    try:
        COLUMNS[column](entry, entry.linearize)
    except NotApplicable as reason:
        return Cell("n/a", note=str(reason))
    except Exception as error:
        if column not in ("sites", "refusals"):
            try:
                COLUMNS[column](entry, as_it_is)
            except Exception as its:
                return Cell("n/a", note=f"the unconverted model does not do this either: {_short(its)}")
        if known is not None:
            return Cell("not supported", note=known)
        return Cell("FAIL", note=f"{_label(entry)} / {column}: {type(error).__name__}: {error}")
    if known is not None:
        return Cell("FAIL", note=f"{_label(entry)} / {column}: passes, but is listed as not supported")
    if column == "sites":
        return Cell("pass", f" ({count - len(kept)} of {count})")
    codes = ", ".join(f"{kept.count(code)} {code}" for code in dict.fromkeys(kept))
    return Cell("pass", f" ({codes})" if column == "refusals" and codes else "")


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


def page(rows: dict[str, list[Cell]]) -> str:
    names = ("torch", "timm", "diffusers", "transformers", "torchvision")
    versions = ", ".join(f"{name} {version(name)}" for name in names)
    cells = [cell for row in rows.values() for cell in row]
    counts = {kind: sum(c.kind == kind for c in cells) for kind in ("pass", "refused", "n/a", "not supported")}
    notes = list(dict.fromkeys(c.note for c in cells if c.note))

    def shown(cell: Cell) -> str:
        return cell.kind + cell.text + (f" [{notes.index(cell.note) + 1}]" if cell.note else "")

    lines = [
        "# The zoo",
        "",
        f"{len(ZOO)} small, randomly initialised models of real architectures (`tests/zoo.py`), every site converted",
        "that can be, against what a model must go on doing (`tests/zoo_behaviours.py`: one function a column). A cell",
        "that does not pass is run on the unconverted model too: what that can't do either is n/a. Written by `make",
        f"zoo`, which is `python tests/zoo_table.py`, with {versions}.",
        "",
        f"Of {len(cells)} cells: " + ", ".join(f"{count} {kind}" for kind, count in counts.items()) + ".",
        "",
        "| model | " + " | ".join(COLUMNS) + " |",
        "|---" * (len(COLUMNS) + 1) + "|",
        *(f"| {name} | " + " | ".join(map(shown, row)) + " |" for name, row in rows.items()),
        "",
        "A model all of whose sites are refused can't be linearized, and stays as it is. The refusals:",
        "",
        *(f"- {code}: {text}" for code, text in _DESCRIBED.items()),
        "",
        *(f"[{i}] {note.replace('|', '/').replace('<', '&lt;')}\n" for i, note in enumerate(notes, 1)),
    ]
    return "\n".join(lines).rstrip() + "\n"


def main(only: list[str]) -> int:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    console = Console()
    chosen = [e for e in entries() if not only or any(part in _label(e) for part in only)]
    rows: dict[str, list[Cell]] = {}
    shown = (TextColumn("{task.description:40}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*shown, console=Console(stderr=True)) as bar:
        task = bar.add_task("", total=len(chosen) * len(COLUMNS))
        for entry in chosen:
            row = rows[_label(entry)] = []
            for column in COLUMNS:
                bar.update(task, description=f"{_label(entry)}: {column}")
                row.append(cell(entry, column))
                bar.advance(task)
    failures = [c.note for row in rows.values() for c in row if c.kind == "FAIL"]
    for failure in failures:
        console.print(failure, markup=False, soft_wrap=True)
    if only:
        console.print(page(rows), markup=False, soft_wrap=True)
    elif not failures:
        PAGE.write_text(page(rows))
        console.print(f"{PAGE} written")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
