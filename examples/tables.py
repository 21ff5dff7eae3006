"""Turn the CSV files that the examples leave into the Markdown tables of docs/results.md.

    python examples/tables.py timm runs/base runs/control runs/all runs/half ...     # a row a run of finetune_timm.py
    python examples/tables.py presets runs/presets                                   # its stage presets
    python examples/tables.py ablations runs/ablations                               # ablations.py
    python examples/tables.py probe runs/real-all runs/real-half                     # real_weights.py
    python examples/tables.py dit runs/dit                                           # finetune_dit.py

A run is called by the name of its folder.  Times are seconds of one CPU core, without evaluation.
"""

from __future__ import annotations

import argparse
import csv
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

Rows = list[dict[str, str]]


def read(path: Path) -> Rows:
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """The first column to the left, numbers to the right."""
    lines = ["| " + " | ".join(head) + " |", "|---|" + "---:|" * (len(head) - 1)]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows])


def number(text: str | None, digits: int = 2) -> str:
    return f"{float(text):.{digits}f}" if text not in ("", "nan", None) else ""


def last(rows: Rows, stage: str, field: str) -> str | None:
    """The last value of a field in the rows of a stage, or None."""
    values = [row[field] for row in rows if row["stage"] == stage and row[field] not in ("", "nan")]
    return values[-1] if values else None


def timm(folders: Sequence[Path]) -> str:
    """Accuracy after each stage, and what the stages took."""
    stages = {"softmax": "softmax", "softmax, trained on": "control", "converted": "convert",
              "calibrated": "calibrated", "fine-tuned": "finetune"}  # fmt: skip
    table = []
    for folder in folders:
        rows = read(folder / "log.csv")
        cells = [number(last(rows, stage, "accuracy")) for stage in stages.values()]
        seconds = [number(last(rows, stage, "cpu_seconds"), 0) for stage in ("calibrated", "finetune", "control")]
        trained = number(last(rows, "softmax", "cpu_seconds"), 0) or seconds[2]
        table.append([folder.name, *cells, seconds[0], seconds[1] or trained])
    return markdown(["run", *(f"{name}, %" for name in stages), "calibration, s", "training, s"], table)


def presets(folders: Sequence[Path]) -> str:
    """Mean over seeds, and the largest and smallest."""
    (folder,) = folders
    groups: dict[str, Rows] = {}
    for row in read(folder / "presets.csv"):
        groups.setdefault(row["config"], []).append(row)
    table = []
    for name, rows in groups.items():
        errors = [float(row["error"]) for row in rows if row["error"]]
        accuracies = [float(row["accuracy"]) for row in rows if row["accuracy"]]
        spread = f"{min(errors):.3f} to {max(errors):.3f}" if errors else "stopped: not finite"
        mean = f"{statistics.mean(errors):.3f}" if errors else ""
        worst = f"{max(float(row['worst']) for row in rows if row['worst']):.3f}" if errors else ""
        table.append([name, str(len(rows)), mean, spread, worst,
                      f"{statistics.mean(accuracies):.1f}" if accuracies else ""])  # fmt: skip
    head = ["configuration", "seeds", "relative error", "from .. to", "worst site", "accuracy, %"]
    return markdown(head, sorted(table, key=lambda row: row[2] or "9"))


def ablations(folders: Sequence[Path]) -> str:
    (folder,) = folders
    rows = [
        [row["variant"], row["seed"], row["steps"], number(row["at_once"]), number(row["accuracy"]),
         number(row["cpu_seconds"], 0), row["stopped"] or "no"]
        for row in read(folder / "ablations.csv")
    ]  # fmt: skip
    return markdown(["variant", "seed", "steps", "at once, %", "after, %", "s", "stopped by the guard"], rows)


def probe(folders: Sequence[Path]) -> str:
    rows = [
        [f"{folder.name}: {row['model']}", number(row["accuracy"]), number(row["cosine"], 3), number(row["error"], 3),
         number(row["cpu_seconds"], 0)]
        for folder in folders
        for row in read(folder / "probe.csv")
    ]  # fmt: skip
    return markdown(["model", "linear probe, %", "cosine", "relative error", "s so far"], rows)


def dit(folders: Sequence[Path]) -> str:
    (folder,) = folders
    rows = [
        [row["model"], number(row["distance"]), number(row["right"], 1), number(row["flow_loss"], 4)]
        for row in read(folder / "distances.csv")
    ]
    return markdown(["pictures of", "distance to real images", "class seen, %", "loss on test images"], rows)


KINDS: dict[str, Callable[[Sequence[Path]], str]] = {
    "timm": timm, "presets": presets, "ablations": ablations, "probe": probe, "dit": dit,
}  # fmt: skip


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("folders", nargs="+", type=Path)
    args = parser.parse_args(arguments)
    try:
        print(KINDS[args.kind](args.folders))
    except FileNotFoundError as error:
        raise SystemExit(f"{error.filename} is missing: run the example first") from None


if __name__ == "__main__":
    sys.exit(main())
