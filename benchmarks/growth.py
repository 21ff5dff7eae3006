"""How the time of the fused kernel grows with the tokens: both lengths in the same alternated rounds, forward."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable
from typing import Any

import torch

from . import measure, results
from .op import DTYPES, Attention


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tokens", type=int, nargs=2, default=[4096, 16384], help="square numbers")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--write", action="store_true", help="write the table into docs/results.md")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)


def run(args: argparse.Namespace) -> None:
    if args.child:
        print(json.dumps([_measure(name, args.tokens, args.repeats) for name in DTYPES]))
        return
    rows = []
    for malloc in ("default", "kept"):
        command = ["growth", "--tokens", *map(str, args.tokens), "--repeats", str(args.repeats), "--child"]
        for found in measure.child(command, malloc):
            short, long = found["seconds"]
            times = [f"{1e3 * short:.1f}", f"{1e3 * long:.1f}", f"{long / short:.2f}"]
            rows.append([found["dtype"], malloc, *times])
    head = ["dtype", "malloc", *(f"{n:,} tokens, ms" for n in args.tokens), "ratio"]
    text = f"24 heads of 64, batch 1. {measure.machine()}.\n\n{results.table(head, rows)}"
    print(text)
    if args.write:
        results.put("growth", text)


def _measure(dtype_name: str, lengths: list[int], repeats: int) -> dict[str, Any]:
    dtype = DTYPES[dtype_name]
    module = Attention(24, 64, dtype)
    calls: dict[str, Callable[[], object]] = {}
    for tokens in lengths:
        side = math.isqrt(tokens)
        qkv = torch.randn(1, tokens, 3, 24, 64).to(dtype)
        compiled = torch.compile(module, backend="t5", fullgraph=True, dynamic=False)

        def call(compiled: Any = compiled, qkv: torch.Tensor = qkv, side: int = side) -> None:
            with torch.no_grad():
                compiled(qkv, (side, side))

        calls[str(tokens)] = call
    seconds = measure.alternate(calls, repeats=repeats, warmup=3)
    return {"dtype": dtype_name, "seconds": [seconds[str(n)] for n in lengths]}
