"""``report.html``: one page without any other file, script or address."""

from __future__ import annotations

import html
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from . import figures
from .digits import Digits
from .style import STYLE

if TYPE_CHECKING:
    from .costs import Cost
    from .photos import Photo
    from .training import Stage

#: Digits shown: first all that a model misses, then the first others of the test set.
SHOWN = 60


def write(
    folder: Path,
    results: dict[str, Any],
    *,
    data: Digits,
    training: Sequence[tuple[int, float]],
    stages: Sequence[Stage],
    predictions: dict[str, Tensor],
    costs: Sequence[Cost],
    photos: Sequence[Photo],
    skipped: str | None,
) -> Path:
    """Write the page; returns its path.

    results: the plain values that :mod:`.script` also writes as JSON. predictions: classes [N] of the test images by
    model. skipped: why there are no photos.
    """
    parts = [
        _head(results, stages, costs),
        _accuracy(results, stages, training),
        _digits(data, predictions),
        _costs(costs),
        _photos(photos, skipped),
        _foot(results),
    ]
    page = (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>t5fx demo</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<style>{STYLE}</style></head><body><main>{''.join(parts)}</main></body></html>\n"
    )
    path = folder / "report.html"
    path.write_text(page, encoding="utf-8")
    return path


def _head(results: dict[str, Any], stages: Sequence[Stage], costs: Sequence[Cost]) -> str:
    softmax, _, whole = stages
    largest = costs[-1]
    fewer = largest.network / largest.network_all
    tiles = {
        f"{softmax.tuned:.1f} → {whole.tuned:.1f} %": "test accuracy on digits: softmax, and all sites converted, "
        "after the same extra epochs",
        f"{fewer:.1f}× fewer": f"FLOPs of a whole ViT-S/14 at {largest.size:,} px with all sites converted",
        "bit for bit": "equal outputs after saving and loading into a fresh model",
    }
    cards = "".join(f'<div class="tile"><b>{value}</b><span>{text}</span></div>' for value, text in tiles.items())
    quick = "Run with --quick: a few epochs only, the accuracies prove nothing." if results["quick"] else ""
    return f"""<header><h1>A vision transformer, turned linear</h1>
<p>Softmax attention is replaced by test-time training, whose cost grows with the tokens instead of their square. All
pretrained weights are kept; calibration and a short fine-tune bring the accuracy back.</p>
<p class="warn">{quick}</p><div class="tiles">{cards}</div></header>"""


def _accuracy(results: dict[str, Any], stages: Sequence[Stage], training: Sequence[tuple[int, float]]) -> str:
    epochs, extra = results["epochs"], results["fine_tune_epochs"]
    rows = []
    for stage in stages:
        gap = f"{stage.tuned - stages[0].tuned:+.1f}" if stage.converted else "control"
        rows.append([
            _key(stage.name), f"{stage.converted} of {stage.sites}", f"{stage.new_parameters:,}",
            f"{stage.at_once:.1f}", "" if stage.calibrated is None else f"{stage.calibrated:.1f}",
            f"<b>{stage.tuned:.1f}</b>", gap,
        ])  # fmt: skip
    heads = [
        "model",
        "sites converted",
        "new parameters",
        "at once, %",
        f"after {results['calibrate_steps']} steps of calibration, %",
        f"after {extra} epochs, %",
        "points to control",
    ]
    return f"""<section><h2>Accuracy on handwritten digits</h2>
<p>A small ViT (4 blocks, {results["parameters"]:,} parameters) is trained with softmax for {epochs} epochs on
{results["train_images"]:,} images of scikit-learn's digits and tested on {results["test_images"]}. Copies of it are
converted. Calibration then teaches the new weights alone what softmax attention gave at their place: it needs no labels
and leaves the pretrained weights untouched. Last, all weights are trained on for {extra} more epochs,
{100 * extra / epochs:.0f} % of the training. The control is the softmax model itself, given the same epochs and recipe:
the loss is the labels' cross-entropy, and the distance of the patch features after the last block from those of the
softmax model as it was trained.</p>
{_table(heads, rows)}
<img class="chart" alt="test error by epoch" src="{figures.curves(training, stages)}"></section>"""


def _digits(data: Digits, predictions: dict[str, Tensor]) -> str:
    truth = data.test_labels
    missed = torch.stack([classes != truth for classes in predictions.values()]).any(0)
    order = [*missed.nonzero()[:, 0].tolist(), *(~missed).nonzero()[:, 0].tolist()][:SHOWN]
    cells = []
    for index in order:
        right = int(truth[index])
        guesses = ""
        for name, classes in predictions.items():
            miss = "" if classes[index] == right else ' class="miss"'
            guesses += f'<span{miss} style="color:{figures.COLOURS[name]}">{int(classes[index])}</span>'
        image = figures.digit(data.test_images[index, 0].numpy())
        cells.append(
            f'<figure class="digit{" wrong" if missed[index] else ""}"><img alt="a {right}" src="{image}">'
            f"<figcaption>{guesses}</figcaption></figure>"
        )
    counts = {name: int((classes != truth).sum()) for name, classes in predictions.items()}
    keys = "".join(f'<span class="key">{_key(name)}: {n} of {len(truth)} wrong</span>' for name, n in counts.items())
    return f"""<section><h2>What the models read</h2>
<p>Test images, and below each what the models read in it after fine-tuning. First all that one of the two misses
(framed; the wrong number is crossed out), then the first others of the test set.</p>
<p>{keys}</p><div class="digits">{"".join(cells)}</div></section>"""


def _costs(costs: Sequence[Cost]) -> str:
    rows = [
        [f"{c.size:,} px", f"{c.tokens:,}", *(f"{n / 1e9:,.1f}" for n in (c.softmax, c.half, c.all)),
         f"{c.softmax / c.all:.2f}×", f"{c.network / c.network_all:.2f}×"]
        for c in costs
    ]  # fmt: skip
    heads = [
        "image",
        "tokens",
        "softmax, GFLOPs",
        "half converted",
        "all converted",
        "attention: fewer by",
        "whole network",
    ]
    return f"""<section><h2>FLOPs against resolution</h2>
<p>The attention of a ViT-S/14 (12 sites) as <code>t5fx.inspect</code> counts it, for one image. TTT needs fewer FLOPs
than softmax from {costs[0].break_even_tokens} tokens on; below that it needs more, as for the small digits above.
FLOPs are counted, not timed.</p>
<img class="chart" alt="FLOPs against image size" src="{figures.flops(costs)}">
{_table(heads, rows)}</section>"""


def _photos(photos: Sequence[Photo], skipped: str | None) -> str:
    title = "<section><h2>Real weights: what the features look like</h2>"
    if skipped is not None:
        return f"{title}<p>{html.escape(skipped)}</p></section>"
    rows = ""
    for photo in photos:
        cells = _figure(photo.name, figures.picture(photo.image, width=420), "photo")
        for name, pixels in photo.pictures.items():
            note = "" if name == "softmax" else f" · cosine {photo.cosines[name]:.2f}"
            cells += _figure(name, figures.picture(pixels), _key(name) + note, "map")
        rows += f'<div class="photos">{cells}</div>'
    return f"""{title}
<p>Patch features of a pretrained ViT-S/14 at 518 px (1,369 patches), projected to the three principal components of the
<b>softmax</b> model's features and shown as red, green and blue. The converted models are shown <b>at once, without any
fine-tuning</b>: their new parameters are random, so this is what a fine-tune starts from, not where it ends. Cosine:
mean similarity of a patch's feature to the softmax model's.</p>
{rows}</section>"""


def _foot(results: dict[str, Any]) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in results["versions"].items())
    run = f"seed {results['seed']} · torch threads: {results['threads']} · {results['seconds']:.0f} s in all"
    return f"<footer>{run} · {html.escape(versions)}</footer>"


def _key(name: str) -> str:
    return f'<i style="background:{figures.COLOURS[name]}"></i>{name}'


def _figure(alt: str, source: str, caption: str, kind: str = "") -> str:
    image = f'<img class="{kind}" alt="{alt}" src="{source}">'
    return f"<figure>{image}<figcaption>{caption}</figcaption></figure>"


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th>{text}</th>" for text in heads)
    body = "".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
