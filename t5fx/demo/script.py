"""The demo from beginning to end: what is done in which order, and what is printed."""

from __future__ import annotations

import argparse
import json
import platform
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from timm.models.vision_transformer import VisionTransformer

import t5fx

from ..errors import T5fxError
from . import costs, digits, photos, report, training
from .digits import Digits
from .training import Stage

EPOCHS, QUICK_EPOCHS = 160, 2
QUICK_STEPS = 5
QUICK_SIZES = (224, 518)


def play(options: argparse.Namespace, console: Console | None = None) -> None:
    """Run everything and write ``options.out``; see :func:`t5fx.demo.run`."""
    console = console or Console()
    begin = time.perf_counter()
    torch.set_num_threads(options.threads)
    folder = Path(options.out)
    folder.mkdir(parents=True, exist_ok=True)
    epochs = QUICK_EPOCHS if options.quick else EPOCHS
    extra = max(1, round(epochs * training.FINE_TUNE_SHARE))
    steps = QUICK_STEPS if options.quick else training.CALIBRATE_STEPS
    data = digits.load()
    console.print(f"[bold]Digits[/bold]: {len(data.train_images)} to train, {len(data.test_images)} to test")
    with _progress(console) as progress:
        curve, softmax = _train(progress, data, epochs, options.seed)
        stages = training.convert(softmax, data, options.seed)
        for stage in stages:
            if stage.converted:
                tick = _bar(progress, f"calibrate, {stage.name}", steps)
                training.calibrate(stage, data, steps=steps, seed=options.seed, tick=tick)
            tick = _bar(progress, f"fine-tune, {stage.name}", extra)
            training.fine_tune(stage, softmax, data, epochs=extra, seed=options.seed, tick=tick)
    console.print(accuracy_table(stages, steps, extra))
    console.print(verdict(stages))
    save_and_load(stages[2], data, folder / "model")
    console.print(
        f"Saved to {folder / 'model'}, loaded into a fresh model: outputs [green]equal bit for bit[/green].\n"
    )

    weights = photos.find_weights(options.weights)
    shown, skipped = [], None
    with _progress(console) as progress:
        sizes = QUICK_SIZES if options.quick else costs.SIZES
        prices = costs.over_sizes(sizes, _bar(progress, "count FLOPs of a ViT-S/14", len(sizes)))
        if weights is not None:
            bar = _bar(progress, "features of two photos", len(photos.SELECTORS))
            shown = photos.look(weights, options.seed, bar)
    console.print(cost_table(prices))
    if weights is None:
        where = options.weights or "../shared/weights beside the repository"
        skipped = f"Photos skipped: no weights of {costs.MODEL} in {where} (give a file with --weights)."
        console.print(skipped, highlight=False)
    else:
        console.print(cosine_table(shown))
    results = {
        "quick": options.quick,
        "seed": options.seed,
        "threads": torch.get_num_threads(),
        "epochs": epochs,
        "calibrate_steps": steps,
        "fine_tune_epochs": extra,
        "parameters": sum(p.numel() for p in softmax.parameters()),
        "train_images": len(data.train_images),
        "test_images": len(data.test_images),
        "softmax_accuracy": curve[-1][1],
        "stages": [stage.to_dict() for stage in stages],
        "reloaded_equal": True,  # otherwise save_and_load has raised
        "costs": [vars(price) for price in prices],
        "cosines": {photo.name: dict(photo.cosines) for photo in shown},
        "versions": {"t5fx": t5fx.__version__, "Python": platform.python_version()}
        | {name: version(name) for name in ("torch", "timm", "scikit-learn")},
        "seconds": round(time.perf_counter() - begin, 1),
    }
    predictions = {s.name: digits.predict(s.model, data.test_images) for s in (stages[0], stages[2])}
    path = report.write(folder, results, data=data, training=curve, stages=stages, predictions=predictions,
                        costs=prices, photos=shown, skipped=skipped)  # fmt: skip
    (folder / "results.json").write_text(json.dumps(results, indent=1) + "\n")
    console.print(f"Report: [bold]{path}[/bold]   ({results['seconds']:.0f} s)", highlight=False)


def _train(
    progress: Progress, data: Digits, epochs: int, seed: int
) -> tuple[list[tuple[int, float]], VisionTransformer]:
    torch.manual_seed(seed)
    model = digits.build()
    tick = _bar(progress, "train with softmax", epochs)
    return training.train_softmax(model, data, epochs=epochs, seed=seed, tick=tick), model


def save_and_load(stage: Stage, data: Digits, folder: Path) -> None:
    """Save, load into a freshly built model, and compare the outputs for all test images."""
    t5fx.save(stage.model, folder)
    loaded = t5fx.load(digits.build(), folder).eval()
    with torch.no_grad():
        same = torch.equal(loaded(data.test_images), stage.model(data.test_images))
    if not same:
        raise T5fxError(f"the model loaded from {folder} gives other outputs than the one that was saved")


def accuracy_table(stages: list[Stage], steps: int, extra: int) -> Table:
    """Accuracies of the three models: at once, after calibration, after fine-tuning."""
    table = Table(title="Test accuracy on digits, % (and points to the control)", title_justify="left")
    table.add_column("model")
    headings = ("sites", "new weights", "at once", f"calibrated, {steps} steps", f"after {extra} epochs", "to control")
    for heading in headings:
        table.add_column(heading, justify="right")
    for stage in stages:
        gap = f"{stage.tuned - stages[0].tuned:+.1f}" if stage.converted else "control"
        sites = f"{stage.converted} of {stage.sites}"
        table.add_row(
            stage.name,
            sites,
            f"{stage.new_parameters:,}",
            f"{stage.at_once:.1f}",
            "" if stage.calibrated is None else f"{stage.calibrated:.1f}",
            f"[bold]{stage.tuned:.1f}[/bold]",
            gap,
        )
    return table


def verdict(stages: list[Stage]) -> str:
    """Whether the converted models came back: half within 1 point of the control, all within 2."""
    lines = []
    for stage, allowed in zip(stages[1:], (1, 2), strict=True):
        gap = stages[0].tuned - stage.tuned
        answer = "[green]yes[/green]" if gap <= allowed + 1e-9 else "[red]no[/red]"
        lines.append(f"{stage.name}, within {allowed} point{'s' * (allowed > 1)} of softmax: {answer}")
    return "\n".join(lines)


def cost_table(prices: list[costs.Cost]) -> Table:
    """GFLOPs of the ViT-S/14's attention sites at each size."""
    table = Table(title="Attention of a ViT-S/14, GFLOPs an image", title_justify="left")
    for heading in ("image", "tokens", "softmax", "half converted", "all converted"):
        table.add_column(heading, justify="right")
    for p in prices:
        table.add_row(
            f"{p.size} px", f"{p.tokens:,}", f"{p.softmax / 1e9:,.1f}", f"{p.half / 1e9:,.1f}", f"{p.all / 1e9:,.1f}"
        )
    return table


def cosine_table(shown: list[photos.Photo]) -> Table:
    """Similarity of the patch features to the softmax model's, before any fine-tuning."""
    table = Table(title="Patch features at once, without fine-tuning: cosine to softmax", title_justify="left")
    table.add_column("photo")
    for name in list(photos.SELECTORS)[1:]:
        table.add_column(name, justify="right")
    for photo in shown:
        table.add_row(photo.name, *(f"{photo.cosines[name]:.3f}" for name in list(photos.SELECTORS)[1:]))
    return table


def _progress(console: Console) -> Progress:
    columns = (TextColumn("{task.description:<28}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, console=console)


def _bar(progress: Progress, name: str, total: int) -> Callable[[], None]:
    """A new progress bar; returns the function that moves it on by one."""
    task = progress.add_task(name, total=total)
    return lambda: progress.advance(task)
