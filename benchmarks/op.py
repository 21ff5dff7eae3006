"""One attention call: softmax, the TTT operators under eager and Inductor, the fused kernel.

Query, key and value are views of one projection's output, [B, N, 3, H, D], as most vision transformers make them; the
TTT preset is T5's, with key norm and both convolutions. The rate counts the inner model's matmuls alone (nine of
head_dim x hidden a token, and nothing for norm and convolutions), over that of a large matmul in the same rounds.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from t5fx import T5
from t5fx.cost import ttt_flops
from t5fx.inner import resolve
from t5fx.ops import ttt_attention

from . import measure, results

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
PEERS = ("softmax", "eager", "inductor", "t5")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tokens", type=int, nargs="+", default=[1024, 4096, 16384], help="square numbers")
    parser.add_argument("--backward", type=int, nargs="*", default=[1024, 4096], help="lengths for forward + backward")
    parser.add_argument("--dtypes", nargs="+", default=list(DTYPES), choices=list(DTYPES))
    parser.add_argument("--malloc", nargs="+", default=["default", "kept"], choices=["default", "kept"])
    parser.add_argument("--heads", type=int, default=24)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--write", action="store_true", help="write the tables and plots into docs/")
    parser.add_argument("--child", help=argparse.SUPPRESS)


def run(args: argparse.Namespace) -> None:
    if args.child:
        print(json.dumps(_measure_all(args)))
        return
    shared = ["--tokens", *map(str, args.tokens), "--backward", *map(str, args.backward), "--dtypes", *args.dtypes,
              "--heads", str(args.heads), "--head-dim", str(args.head_dim), "--repeats", str(args.repeats)]  # fmt: skip
    rows = []
    for malloc in args.malloc:
        found = measure.child(["op", *shared, "--child", malloc], malloc)
        rows += [{**row, "malloc": malloc} for row in found]
    text = _tables(rows, args)
    print(text)
    if args.write:
        plot = results.FILE.parent / "results" / "op.png"
        _plot(rows, plot)
        results.put("op", text + "\n\n![time and memory against tokens](results/op.png)")


# ---- measuring -------------------------------------------------------------------------------------------


class Attention(torch.nn.Module):
    """TTT attention with parameters of its own on views of a projection's output."""

    def __init__(self, heads: int, dim: int, dtype: torch.dtype, device: str = "cpu") -> None:
        super().__init__()
        # Large enough that fast and initial weights differ, as after training.
        self.params: dict[str, Tensor] = resolve("swiglu").init(heads, dim, dim, dim, std=0.2)
        for name in "qk":
            conv = torch.nn.Conv2d(heads * dim, heads * dim, 3, groups=heads * dim)
            self.params |= {f"dwc_{name}.weight": conv.weight, f"dwc_{name}.bias": conv.bias}
        self.params = {k: p.detach().to(device, dtype).requires_grad_() for k, p in self.params.items()}

    def forward(self, qkv: Tensor, grid: tuple[int, int]) -> Tensor:
        query, key, value = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        return ttt_attention(query, key, value, self.params, T5, grid=grid)


def softmax(qkv: Tensor, grid: tuple[int, int]) -> Tensor:
    query, key, value = qkv.permute(2, 0, 3, 1, 4).unbind(0)
    return F.scaled_dot_product_attention(query, key, value)


def competitors(module: Attention) -> dict[str, Callable[..., Tensor]]:
    """The :data:`PEERS`, each called with (qkv, grid)."""
    return {
        "softmax": softmax,
        "eager": module,
        "inductor": torch.compile(module, backend="inductor", fullgraph=True, dynamic=False),
        "t5": torch.compile(module, backend="t5", fullgraph=True, dynamic=False),
    }


def _measure_all(args: argparse.Namespace) -> list[dict[str, Any]]:
    rows = []
    for name in args.dtypes:
        for tokens in args.tokens:
            rows.append(_measure(args, name, tokens, backward=False))
        for tokens in args.backward:
            rows.append(_measure(args, name, tokens, backward=True))
    return rows


def _measure(args: argparse.Namespace, dtype_name: str, tokens: int, *, backward: bool) -> dict[str, Any]:
    torch.manual_seed(0)
    torch._dynamo.reset()
    dtype, side = DTYPES[dtype_name], math.isqrt(tokens)
    if side * side != tokens:
        raise SystemExit(f"--tokens must be square numbers, not {tokens}")
    module = Attention(args.heads, args.head_dim, dtype)
    qkv = torch.randn(1, tokens, 3, args.heads, args.head_dim, dtype=dtype, requires_grad=backward)
    runs = competitors(module)
    grad = torch.randn(1, args.heads, tokens, args.head_dim, dtype=dtype)
    gemm, gemm_flops = measure.matmul(dtype)

    def call(run: Callable[..., Tensor]) -> Callable[[], object]:
        def forward() -> object:
            with torch.no_grad():
                return run(qkv, (side, side))

        def both() -> object:
            for leaf in (qkv, *module.params.values()):
                leaf.grad = None
            return run(qkv, (side, side)).backward(grad)

        return both if backward else forward

    calls = {"matmul": gemm, **{name: call(run) for name, run in runs.items()}}
    seconds = measure.alternate(calls, repeats=args.repeats, seconds=0.1)
    flops = inner_flops(args.heads, args.head_dim, tokens)
    # Memory that malloc keeps does not rise again: only the default setting shows what a call needs.
    shows = not backward and measure.malloc_setting() == "default"
    memory = {name: measure.peak_above(calls[name]) for name in PEERS} if shows else {}
    return {
        "dtype": dtype_name, "tokens": tokens, "backward": backward, "seconds": seconds, "memory": memory,
        "share": flops / seconds["t5"] / (gemm_flops / seconds["matmul"]),
        "gflops": gemm_flops / seconds["matmul"] / 1e9,
        "in_and_out": 4 * tokens * args.heads * args.head_dim * dtype.itemsize, "machine": measure.machine(),
    }  # fmt: skip


def inner_flops(heads: int, dim: int, tokens: int) -> float:
    """Forward, without norm and convolutions."""
    sizes = {"batch": 1, "heads": heads, "queries": tokens, "keys": tokens, "head_dim": dim, "value_dim": dim,
             "hidden": dim}  # fmt: skip
    expression = ttt_flops(T5.replace(dwc=None))
    return float(expression.subs({symbol: sizes[symbol.name] for symbol in expression.free_symbols}))


# ---- showing ---------------------------------------------------------------------------------------------


def _tables(rows: list[dict[str, Any]], args: argparse.Namespace) -> str:
    def cells(row: dict[str, Any]) -> list[str]:
        s = row["seconds"]
        start = [row["dtype"], row["malloc"], f"{row['tokens']:,}", f"{1e3 * s['t5']:.1f}"]
        ratios = [f"{s[peer] / s['t5']:.1f}x" for peer in ("softmax", "eager", "inductor")]
        return start + ratios

    head = ["dtype", "malloc", "tokens", "t5, ms", "softmax / t5", "eager / t5", "Inductor / t5"]
    forward = [row for row in rows if not row["backward"]]
    text = [f"{args.heads} heads of {args.head_dim}, batch 1. {rows[0]['machine']}.", "", "Forward:", ""]
    more = ["of matmul rate", "peak / (in + out)"]
    lines = [
        [*cells(r), f"{r['share']:.2f} of {r['gflops']:.0f} GFLOP/s", f"{_peak(r):.2f}" if r["memory"] else "-"]
        for r in forward
    ]
    text.append(results.table(head + more, lines))
    backward = [row for row in rows if row["backward"]]
    if backward:
        text += ["", "Forward and backward:", "", results.table(head, [cells(r) for r in backward])]
    return "\n".join(text)


def _peak(row: dict[str, Any]) -> float:
    """Inputs, outputs and temporaries over inputs and outputs: the output itself is part of the rise."""
    inputs = 3 * row["in_and_out"] / 4
    return (inputs + row["memory"]["t5"]) / row["in_and_out"]


def _plot(rows: list[dict[str, Any]], file: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    names = {"softmax": "softmax (SDPA)", "eager": "TTT, eager", "inductor": "TTT, Inductor", "t5": "TTT, t5 kernel"}
    malloc = rows[0]["malloc"]
    dtypes = list(dict.fromkeys(row["dtype"] for row in rows))
    figure, grid = plt.subplots(2, len(dtypes), figsize=(4.6 * len(dtypes), 6.4), squeeze=False, sharex=True)
    for column, dtype in enumerate(dtypes):
        some = [r for r in rows if r["dtype"] == dtype and r["malloc"] == malloc and not r["backward"]]
        tokens = [r["tokens"] for r in some]
        for peer, label in names.items():
            grid[0][column].plot(tokens, [1e3 * r["seconds"][peer] for r in some], "o-", label=label)
            if all(r["memory"] for r in some):
                grid[1][column].plot(tokens, [r["memory"][peer] / 2**20 for r in some], "o-", label=label)
        grid[0][column].set(title=f"{dtype}, forward", ylabel="milliseconds", xscale="log", yscale="log")
        grid[1][column].set(xlabel="tokens", ylabel="peak memory above inputs, MiB", yscale="log")
        for axes in (grid[0][column], grid[1][column]):
            axes.grid(alpha=0.3)
            axes.set_xticks(tokens, [f"{t:,}" for t in tokens])
            axes.minorticks_off()
    grid[0][0].legend(frameon=False, fontsize=8)
    figure.tight_layout()
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=110)
