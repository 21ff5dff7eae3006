"""Pictures for the report, each as a ``data:`` address, so that the page needs no other file."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import matplotlib
import numpy as np
from PIL import Image

if TYPE_CHECKING:
    from .costs import Cost
    from .training import Stage

matplotlib.use("Agg")

from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

#: One colour a model, in every chart and table.
COLOURS = {"softmax": "#475569", "half converted": "#d97706", "all converted": "#0d9488"}
_STYLE: dict[Any, Any] = {
    "font.family": "sans-serif",
    "font.size": 10.5,
    "axes.edgecolor": "#94a3b8",
    "axes.labelcolor": "#334155",
    "axes.titlecolor": "#0f172a",
    "axes.titlelocation": "left",
    "axes.titlesize": 11.5,
    "axes.titleweight": "bold",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#e2e8f0",
    "xtick.color": "#64748b",
    "ytick.color": "#64748b",
    "figure.facecolor": "white",
}


def picture(pixels: np.ndarray, *, width: int | None = None) -> str:
    """A PNG of [H, W, 3] or [H, W] uint8; made ``width`` wide where given."""
    image = Image.fromarray(np.ascontiguousarray(pixels))
    if width is not None:
        image = image.resize((width, round(image.height * width / image.width)), Image.Resampling.LANCZOS)
    buffer = io.BytesIO()
    image.save(buffer, "PNG", optimize=True)
    return _address(buffer.getvalue())


def digit(image: np.ndarray) -> str:
    """An 8x8 digit, any range, dark on light."""
    low, high = image.min(), image.max()
    return picture((255 - 255 * (image - low) / max(high - low, 1e-9)).astype(np.uint8))


def curves(training: Sequence[tuple[int, float]], stages: Sequence[Stage]) -> str:
    """Test error by epoch, logarithmic: softmax training on the left, fine-tuning of the three models on the right."""
    with plt.rc_context(_STYLE):
        figure, (left, right) = plt.subplots(1, 2, figsize=(10.6, 3.8), sharey=True, width_ratios=[1.25, 1])
        _error(left, training, color=COLOURS["softmax"], linewidth=1.5)
        for stage in stages:
            marks: dict[str, Any] = {"marker": "o", "markersize": 3.2, "linewidth": 1.6}
            _error(right, stage.curve, color=COLOURS[stage.name], label=stage.name, **marks)
        left.set_title("Training with softmax")
        left.set_ylabel("test error, %")
        left.set_yscale("log")
        ticks = (0.5, 1, 2, 5, 10, 20, 50, 100)
        left.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
        right.set_title("Fine-tuning: the same epochs for all three")
        right.legend(frameon=False, loc="upper right")
        right.xaxis.get_major_locator().set_params(integer=True)
        for axes in (left, right):
            axes.set_xlabel("epoch")
            axes.minorticks_off()
        return _chart(figure)


def _error(axes: Axes, curve: Sequence[tuple[int, float]], **look: Any) -> None:
    """A log axis has no 0: no error at all is drawn at 0.1 %."""
    epochs, accuracies = zip(*curve, strict=True)
    axes.plot(epochs, [max(100 - accuracy, 0.1) for accuracy in accuracies], **look)


def flops(costs: Sequence[Cost]) -> str:
    """FLOPs against image size, logarithmic: the attention sites alone, and the whole network."""
    with plt.rc_context(_STYLE):
        figure, (left, right) = plt.subplots(1, 2, figsize=(10.6, 4.0), sharey=True)
        sizes = [cost.size for cost in costs]
        for axes, title, names in (
            (left, "Attention sites", ("softmax", "half", "all")),
            (right, "Whole network", ("network", "network_half", "network_all")),
        ):
            lines = zip(COLOURS.items(), names, strict=True)
            for (label, colour), name in lines:
                values = [getattr(cost, name) / 1e9 for cost in costs]
                axes.plot(sizes, values, color=colour, marker="o", markersize=4, linewidth=1.8, label=label)
            axes.set(title=title, xscale="log", yscale="log", xlabel="image size, pixels a side")
            axes.set_xticks(sizes, [str(size) for size in sizes])
            axes.minorticks_off()
        left.set_ylabel("GFLOPs an image, forward")
        _break_even(left, costs)
        right.legend(frameon=False, loc="upper left")
        return _chart(figure)


def _break_even(axes: Axes, costs: Sequence[Cost]) -> None:
    """Mark the size from which TTT needs fewer FLOPs."""
    tokens = costs[0].break_even_tokens
    patch = costs[0].size / (costs[0].tokens - 1) ** 0.5
    axes.axvline(patch * tokens**0.5, color="#94a3b8", linestyle=":", linewidth=1.4)
    note: dict[str, Any] = {"xytext": (5, 4), "textcoords": "offset points", "color": "#64748b", "fontsize": 9}
    axes.annotate(f"break-even: {tokens} tokens", (patch * tokens**0.5, axes.get_ylim()[0]), **note)


def _chart(figure: Figure) -> str:
    figure.tight_layout(w_pad=2.5)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=170)
    plt.close(figure)
    return _address(buffer.getvalue())


def _address(png: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(png).decode()
