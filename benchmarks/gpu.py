"""On a GPU, in one run of a few minutes: is it right, how fast is one attention call, how fast a model.

    python -m benchmarks gpu --write

Correctness is that of ``tests/test_triton.py``: the kernel against the operators in float64. Rates stand beside those
of a copy (bytes/s) and of a large matmul (FLOP/s) of the same rounds, so that a figure says how much of this card is
used. Peers: softmax through FlashAttention and through whatever F.scaled_dot_product_attention picks, the operators
under eager and Inductor, and flash-linear-attention's chunked linear attention where it is installed.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from t5fx import T5
from t5fx.cost import ttt_bytes

from . import measure, model, results
from .op import DTYPES, Attention, competitors, inner_flops


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tokens", type=int, nargs="+", default=[1024, 4096, 16384, 65536], help="square numbers")
    parser.add_argument("--dtypes", nargs="+", default=["bf16", "fp32"], choices=list(DTYPES))
    parser.add_argument("--heads", type=int, default=24)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--sizes", nargs="*", default=["1K", "2K"], help="images for the model table")
    parser.add_argument("--device", default="cuda", help="cpu tries the script itself, at small sizes")
    parser.add_argument("--write", action="store_true", help="write the tables into docs/results.md")


def run(args: argparse.Namespace) -> None:
    if args.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("benchmarks gpu needs a GPU: torch.cuda.is_available() is False")
    name = torch.cuda.get_device_name() if args.device == "cuda" else "no GPU"
    text = [f"{name}. {measure.machine()}."]
    text += ["", "Largest error against the operators in float64, over the largest value:", "", _correctness(args)]
    for backward in (False, True):
        way = "Forward and backward" if backward else "Forward"
        text += ["", f"{way}, {args.heads} heads of {args.head_dim}, batch 1:", "", _op(args, backward)]
    if args.sizes:
        text += ["", "One step of the transformer of `benchmarks/model.py`, bfloat16:", "", _model(args)]
    print("\n".join(text))
    if args.write:
        results.put("gpu", "\n".join(text))


def _correctness(args: argparse.Namespace) -> str:
    rows = []
    for dtype_name in args.dtypes:
        dtype = DTYPES[dtype_name]
        for tokens in args.tokens[:2]:
            side = math.isqrt(tokens)
            torch.manual_seed(0)
            module = Attention(2, args.head_dim, dtype, args.device)
            qkv = torch.randn(1, tokens, 3, 2, args.head_dim, device=args.device).to(dtype).requires_grad_()
            found = _outcome(torch.compile(module, backend="t5", fullgraph=True, dynamic=False), module, qkv, side)
            exact = Attention(2, args.head_dim, torch.float64, args.device)
            exact.params = {k: p.detach().double().requires_grad_() for k, p in module.params.items()}
            wanted = _outcome(exact, exact, qkv.detach().double().requires_grad_(), side)
            errors = [float((f.double() - w).abs().max() / w.abs().max()) for f, w in zip(found, wanted, strict=True)]
            rows.append([dtype_name, f"{tokens:,}", f"{errors[0]:.1e}", f"{max(errors[1:]):.1e}"])
    return results.table(["dtype", "tokens", "output", "gradients, the worst"], rows)


def _outcome(run: Callable[..., Tensor], module: Attention, qkv: Tensor, side: int) -> list[Tensor]:
    out = run(qkv, (side, side))
    cotangent = torch.linspace(-1, 1, out.numel(), device=out.device).view(out.shape).to(out.dtype)
    return [out.detach(), *torch.autograd.grad(out, [qkv, *module.params.values()], cotangent)]


def _op(args: argparse.Namespace, backward: bool) -> str:
    rows = []
    for dtype_name in args.dtypes:
        for tokens in args.tokens:
            seconds, moved, flops = _time(args, DTYPES[dtype_name], tokens, backward)
            ratios = [f"{seconds[p] / seconds['t5']:.2f}x" if p in seconds else "-" for p in _PEERS]
            rates = [f"{moved / seconds['t5'] / 1e12:.2f} of {seconds['copy rate'] / 1e12:.2f}",
                     f"{flops / seconds['t5'] / 1e12:.0f} of {seconds['matmul rate'] / 1e12:.0f}"]  # fmt: skip
            rows.append(
                [dtype_name, f"{tokens:,}", f"{1e3 * seconds['t5']:.3f}", *ratios, *([] if backward else rates)]
            )
    head = ["dtype", "tokens", "t5, ms", *(f"{peer} / t5" for peer in _PEERS)]
    return results.table([*head, *([] if backward else ["TB/s, of a copy", "TFLOP/s, of a matmul"])], rows)


_PEERS = ("softmax", "flash", "eager", "inductor", "fla linear")


def _time(args: argparse.Namespace, dtype: torch.dtype, tokens: int, backward: bool) -> tuple[dict, float, float]:
    torch.manual_seed(0)
    torch._dynamo.reset()
    side = math.isqrt(tokens)
    module = Attention(args.heads, args.head_dim, dtype, args.device)
    shape = (1, tokens, 3, args.heads, args.head_dim)
    qkv = torch.randn(*shape, device=args.device).to(dtype).requires_grad_(backward)
    ways = competitors(module)
    if args.device == "cuda" and dtype != torch.float32:
        ways["flash"] = _flash
        if (linear := _fla()) is not None:
            ways["fla linear"] = linear
    grad = torch.randn(1, args.heads, tokens, args.head_dim, device=args.device).to(dtype)

    def call(way: Callable[..., Tensor]) -> Callable[[], object]:
        def forward() -> None:
            with torch.no_grad():
                way(qkv, (side, side))
            _wait(args.device)

        def both() -> None:
            leaves = [qkv, *module.params.values()]
            torch.autograd.grad(way(qkv, (side, side)), leaves, grad, allow_unused=True)
            _wait(args.device)

        return both if backward else forward

    source = torch.empty(2**28 if args.device == "cuda" else 2**22, dtype=torch.uint8, device=args.device)
    target = torch.empty_like(source)
    n = 8192 if args.device == "cuda" else 512
    a, b = (torch.randn(n, n, device=args.device).to(dtype) for _ in range(2))
    calls = {name: call(way) for name, way in ways.items()}
    calls |= {"copy": lambda: (target.copy_(source), _wait(args.device)),
              "matmul": lambda: (torch.mm(a, b), _wait(args.device))}  # fmt: skip
    seconds = measure.alternate(calls, repeats=args.repeats, seconds=0.02, warmup=3)
    rates = {"copy rate": 2 * source.numel() / seconds["copy"], "matmul rate": 2 * n**3 / seconds["matmul"]}
    sizes = {"batch": 1, "heads": args.heads, "queries": tokens, "keys": tokens, "head_dim": args.head_dim,
             "value_dim": args.head_dim, "hidden": args.head_dim, "element_size": dtype.itemsize}  # fmt: skip
    moved = ttt_bytes(T5)
    moved = float(moved.subs({symbol: sizes[symbol.name] for symbol in moved.free_symbols}))
    return {**seconds, **rates}, moved, inner_flops(args.heads, args.head_dim, tokens)


def _flash(qkv: Tensor, grid: tuple[int, int]) -> Tensor:
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        return F.scaled_dot_product_attention(*qkv.permute(2, 0, 3, 1, 4).unbind(0))


def _fla() -> Callable[..., Tensor] | None:
    try:
        from fla.ops.linear_attn import chunk_linear_attn
    except ImportError:
        return None

    def linear(qkv: Tensor, grid: tuple[int, int]) -> Tensor:
        query, key, value = qkv.unbind(2)  # [B, N, H, D], which is its layout
        return chunk_linear_attn(query, key, value, normalize=False)[0].transpose(1, 2)

    return linear


def _model(args: argparse.Namespace) -> str:
    rows = []
    for size in args.sizes:
        s = model.measure_ways(size, args.repeats, args.device)
        for way in ("half", "all"):
            ratios = [f"{s['softmax'] / s[way]:.2f}x", f"{s[way + ' bound'] / s[way]:.2f}"]
            rows.append([size, way, f"{1e3 * s['softmax']:.1f}", f"{1e3 * s[way]:.1f}", *ratios])
    head = ["image", "converted", "softmax, ms", "converted, ms", "speed-up", "of the bound's speed"]
    return results.table(head, rows)


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()
