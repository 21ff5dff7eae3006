"""The command line: ``t5fx inspect timm/NAME --size 518``, ``t5fx demo``."""

from __future__ import annotations

import argparse
import difflib
import importlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from torch import nn

from .config import DIT5_TTT, T5
from .errors import T5fxError
from .report import Report, count
from .select import choose, every_other, everything

PRESETS = {"T5": T5, "DIT5_TTT": DIT5_TTT}


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit status."""
    parser = _parser()
    options = parser.parse_args(arguments)
    console = Console()
    try:
        return options.run(options, console)
    except T5fxError as error:
        Console(stderr=True).print(f"[red]t5fx:[/red] {escape(str(error))}", highlight=False)
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="t5fx", description="Turn softmax vision transformers into linear ones.")
    commands = parser.add_subparsers(required=True, metavar="command")
    look = commands.add_parser(
        "inspect",
        help="list the attention sites of a model, their costs, and what can be converted",
        description="Build a model without weights (on the meta device: nothing is downloaded or computed) and list "
        "its attention sites.",
    )
    look.add_argument(
        "model", help="timm/NAME, diffusers/CLASS or transformers/CLASS, such as timm/vit_base_patch16_224"
    )
    look.add_argument("--size", type=_size, help="image (or latent) size: 518, or 518x784 (height x width)")
    look.add_argument("--config", type=Path, help="config.json of a diffusers or transformers model")
    look.add_argument("--preset", choices=PRESETS, default="T5", help="what the sites would become")
    look.add_argument("--json", action="store_true", help="print the report as JSON")
    look.set_defaults(run=_inspect)
    demo = commands.add_parser("demo", help="train, linearize, fine-tune, save and load a small model; writes a report")
    from . import demo as demo_module

    demo_module.add_arguments(demo)
    demo.set_defaults(run=lambda options, console: demo_module.run(options) or 0)
    return parser


def _size(text: str) -> tuple[int, int]:
    try:
        sizes = [int(part) for part in text.lower().split("x")]
        height, width = sizes * 2 if len(sizes) == 1 else sizes
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no size: write 518, or 518x784 (height x width)") from None
    if min(height, width) < 1:
        raise argparse.ArgumentTypeError("a size must be positive")
    return height, width


def _inspect(options: argparse.Namespace, console: Console) -> int:
    from .api import inspect
    from .capture.inputs import infer

    model = build(options.model, options.size, options.config)
    report = inspect(model, infer(model, options.size), PRESETS[options.preset])
    if options.json:
        print(json.dumps(report.to_dict(), indent=1))
        return 0
    console.print(report)
    if report.convertible:
        console.print(totals(report))
    return 0


def totals(report: Report) -> Table:
    """Attention FLOPs of the model as it is, with half of the blocks converted, and with all."""
    table = Table(title="attention FLOPs of one forward pass (batch 1)", title_justify="left")
    for column in ("converted", "sites", "FLOPs", "of softmax"):
        table.add_column(column, justify="left" if column == "converted" else "right")
    rows: list[tuple[str, list]] = [("none", [])]
    for label, selector in (("half (every other block)", every_other), ("all", everything)):
        try:
            rows.append((label, choose(report.sites, selector)))
        except T5fxError:
            continue  # a model of one block has no half
    for label, chosen in rows:
        sums = report.totals(chosen)
        share = sums["flops"] / max(sums["softmax_flops"], 1)
        table.add_row(label, str(len(chosen)), count(sums["flops"]), f"{share:.1%}")
    return table


def build(name: str, size: tuple[int, int] | None = None, config: Path | None = None) -> nn.Module:
    """Build ``timm/NAME``, ``diffusers/CLASS`` or ``transformers/CLASS`` on the meta device, in eval mode.

    Raises:
        T5fxError: the library is not installed, knows no such model, or needs a ``config``.
    """
    library, _, short = name.partition("/")
    if library not in _BUILDERS or not short:
        raise T5fxError(f"{name!r}: write timm/NAME, diffusers/CLASS or transformers/CLASS")
    try:
        module = importlib.import_module(library)
    except ImportError as error:
        raise T5fxError(f"{library} is not installed: pip install 't5fx[{library}]'") from error
    with torch.device("meta"):
        model = _BUILDERS[library](module, short, size, config)
    return model.eval()


def _build_timm(timm: Any, name: str, size: tuple[int, int] | None, config: Path | None) -> nn.Module:
    if not timm.is_model(name):
        near = difflib.get_close_matches(name, timm.list_models(), n=5, cutoff=0.5)
        hint = f"did you mean {', '.join(near)}?" if near else "timm.list_models() lists them"
        raise T5fxError(f"timm has no model {name!r}: {hint}")
    if size is not None:
        try:
            return timm.create_model(name, pretrained=False, img_size=size)
        except TypeError:
            pass  # a model that takes any size has no such argument
    return timm.create_model(name, pretrained=False)


def _config(name: str, path: Path | None) -> dict[str, Any]:
    if path is None:
        return {}
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise T5fxError(f"--config {path} can't be read as JSON: {error}") from error


def _class(module: Any, name: str) -> Any:
    found = getattr(module, name, None)
    if not isinstance(found, type) or not issubclass(found, nn.Module):
        raise T5fxError(f"{module.__name__} has no model class {name!r}")
    return found


def _build_diffusers(diffusers: Any, name: str, size: tuple[int, int] | None, path: Path | None) -> nn.Module:
    model_class = _class(diffusers, name)
    config = _config(name, path)
    return model_class.from_config(config) if config else model_class()


def _build_transformers(transformers: Any, name: str, size: tuple[int, int] | None, path: Path | None) -> nn.Module:
    model_class = _class(transformers, name)
    values = _config(name, path)
    config_class = model_class.config_class
    if config_class is None:
        raise T5fxError(f"transformers.{name} is a base class: name a model such as ViTModel")
    config = config_class(**values)
    if size is not None and hasattr(config, "image_size"):
        if size[0] != size[1]:
            raise T5fxError(f"transformers.{name} takes a square size, not {size[0]}x{size[1]}")
        config.image_size = size[0]
    return model_class(config)


_BUILDERS = {"timm": _build_timm, "diffusers": _build_diffusers, "transformers": _build_transformers}


if __name__ == "__main__":
    sys.exit(main())
