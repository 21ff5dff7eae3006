"""How long ``torch.compile(backend="t5")`` of a converted model takes, over Inductor's time for the unconverted one.

Caches are off, and both are compiled in turn; the first call's own run is inside, and small in these models.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path

import torch

import t5fx

from . import measure, results

MODELS = ["diffusers/DiT", "diffusers/SD3", "timm/vit_dinov2_reg4", "diffusers/Wan"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--write", action="store_true", help="write the table into docs/results.md")


def run(args: argparse.Namespace) -> None:
    sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
    from zoo import build

    rows = []
    for name in MODELS:
        ratios = {}
        for backward in (False, True):
            taken: dict[str, list[float]] = {"softmax": [], "t5": []}
            for _ in range(args.repeats + 1):
                for way in taken:
                    model, positional, keywords = build(name)
                    if way == "t5":
                        t5fx.linearize(model, t5fx.everything, example_inputs=(positional, keywords))
                    taken[way].append(_compile(model, positional, keywords, way, backward))
            # The first round brings modules in and builds the CPU kernel.
            ratios[backward] = [statistics.median(seconds[1:]) for seconds in taken.values()]
        cells = [f"{softmax:.1f} | {t5:.1f} | {t5 / softmax:.2f}x" for softmax, t5 in ratios.values()]
        rows.append([name.split("/")[1], *cells])
    head = ["model", "inference: Inductor, softmax, s", "t5, all converted, s", "ratio",
            "training: Inductor, softmax, s", "t5, all converted, s", "ratio"]  # fmt: skip
    text = f"{measure.machine()}, malloc {measure.malloc_setting()}.\n\n{results.table(head, rows)}"
    print(text)
    if args.write:
        results.put("compile", text)


def _compile(model: torch.nn.Module, args: tuple, kwargs: dict, way: str, backward: bool) -> float:
    torch._dynamo.reset()
    torch.compiler.reset()
    backend = "t5" if way == "t5" else "inductor"
    with torch._inductor.config.patch(force_disable_caches=True), torch.set_grad_enabled(backward):
        compiled = torch.compile(model, backend=backend, fullgraph=True)
        start = time.perf_counter()
        out = compiled(*args, **kwargs)
        if backward:
            (out if isinstance(out, torch.Tensor) else out[0]).float().sum().backward()
        return time.perf_counter() - start
