"""``t5fx.linearize`` on full-size models with real parameters: seconds, and memory above the model's own."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from typing import Any

import torch

import t5fx

from . import measure, results
from .model import sd35


def sd35_medium() -> torch.nn.Module:
    """stable-diffusion-3.5-medium's transformer, random weights, bfloat16."""
    return sd35(blocks=24, dual=13, pos_embed_max_size=384)


def vit_large() -> torch.nn.Module:
    """timm's vit_large_patch16_224, random weights, float32."""
    import timm

    return timm.create_model("vit_large_patch16_224")


MODELS: dict[str, Callable[[], torch.nn.Module]] = {"SD3.5-Medium": sd35_medium, "ViT-L/16": vit_large}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--write", action="store_true", help="write the table into docs/results.md")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)


def run(args: argparse.Namespace) -> None:
    if args.child:
        print(json.dumps(_measure(args.models[0])))
        return
    rows = []
    for name in args.models:  # each in a process of its own: the peak of one must not hide that of the next
        found = measure.child(["linearize", "--models", name, "--child"], "default")
        rows.append([name, found["sites"], f"{found['size'] / 1e9:.2f}", f"{found['seconds']:.1f}",
                     f"{1 + found['above'] / found['size']:.3f}"])  # fmt: skip
    head = ["model", "sites", "model, GB", "seconds", "peak memory / model"]
    text = f"{measure.machine()}.\n\n{results.table(head, rows)}"
    print(text)
    if args.write:
        results.put("linearize", text)


def _measure(name: str) -> dict[str, Any]:
    model = MODELS[name]()
    size = sum(t.numel() * t.element_size() for t in (*model.parameters(), *model.buffers()))
    took = 0.0

    def convert() -> None:
        nonlocal took
        start = time.perf_counter()
        t5fx.linearize(model)
        took = time.perf_counter() - start

    above = measure.peak_above(convert)
    return {"size": size, "seconds": took, "above": above, "sites": sum(site.selected for site in t5fx.report(model))}
