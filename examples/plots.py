"""The pictures that the examples leave: losses beside a bar chart of results, and strips of generated images."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib
import numpy as np
from PIL import Image
from torch import Tensor

matplotlib.use("Agg")
from matplotlib import pyplot as plt

COLOURS = ("#475569", "#d97706", "#0d9488", "#7c3aed", "#be123c")
Points = Sequence[tuple[float, float]]


def losses_and_results(
    path: Path,
    losses: Mapping[str, Points],
    results: Mapping[str, float],
    *,
    across: str,
    loss: str,
    result: str,
    form: str = "%.1f",
    log: bool = False,
) -> None:
    """``losses``: (x, loss) of each stage, drawn on the left; ``results``: a bar each, on the right.

    across, loss, result: what the x axis, the left and the right side show.  form: of the numbers at the bars.
    log: bars on a logarithmic axis.
    """
    figure, (left, right) = plt.subplots(1, 2, figsize=(9.6, 3.4), layout="constrained")
    _lines(left, losses, across, loss)
    bars = right.barh(list(results), list(results.values()), color=COLOURS[0], height=0.65, log=log)
    right.bar_label(bars, fmt=form, padding=3)
    right.set_title(result, loc="left", fontsize=10)
    right.margins(x=0.2)
    right.invert_yaxis()
    right.spines[["top", "right"]].set_visible(False)
    _save(figure, path)


def losses(path: Path, losses: Mapping[str, Points], *, across: str, loss: str) -> None:
    """The left side alone."""
    figure, axes = plt.subplots(figsize=(6, 3.4), layout="constrained")
    _lines(axes, losses, across, loss)
    _save(figure, path)


def _lines(axes: plt.Axes, losses: Mapping[str, Points], across: str, loss: str) -> None:
    for (name, points), colour in zip(losses.items(), COLOURS, strict=False):
        if points:
            axes.plot(*zip(*points, strict=True), color=colour, label=name, linewidth=1.6)
    axes.set(xlabel=across, yscale="log")
    axes.set_title(loss, loc="left", fontsize=10)
    if any(losses.values()):
        axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)


def strips(path: Path, sheets: Mapping[str, Tensor], columns: int = 20) -> None:
    """For each name its images [N, 1, height, width] in [-1, 1], in rows of ``columns``, dark on light."""
    figure, rows = plt.subplots(len(sheets), 1, figsize=(8, 0.4 + 1.03 * len(sheets)), dpi=100, layout="constrained")
    for axes, (title, images) in zip(rows, sheets.items(), strict=True):
        lines = images[:, 0].unflatten(0, (-1, columns)).transpose(1, 2).flatten(2).flatten(0, 1).numpy()
        axes.imshow(1 - (lines + 1) / 2, cmap="gray", vmin=0, vmax=1, interpolation="nearest")
        axes.set_title(title, loc="left", fontsize=9)
        axes.axis("off")
    _save(figure, path, grey=True)


def _save(figure: plt.Figure, path: Path, grey: bool = False) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if grey:  # four channels of grey take three times the room
        figure.canvas.draw()
        drawn = np.asarray(figure.canvas.buffer_rgba())
        Image.fromarray(drawn).convert("L").save(path, optimize=True)
    else:
        figure.savefig(path, dpi=100)
    plt.close(figure)
