"""An SD3.5-Medium-shaped transformer of four blocks at 1K and 2K, compiled: what converting it buys.

1536 wide, 24 heads of 64, two blocks of four with a second attention on the image alone, RMS QK-norm, 333 text tokens,
bfloat16, random weights. Every converted model is also measured with its converted attention calls taken out (the
values pass through, queries and keys are still projected): no attention, however fast, could beat that bound.
"""

from __future__ import annotations

import argparse
import copy
import json
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

import t5fx

from . import measure, results

LATENTS = {"1K": 128, "2K": 256}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--sizes", nargs="+", default=list(LATENTS), choices=list(LATENTS))
    parser.add_argument("--malloc", nargs="+", default=["kept"], choices=["default", "kept"])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--write", action="store_true", help="write the table into docs/results.md")
    parser.add_argument("--child", help=argparse.SUPPRESS)


def run(args: argparse.Namespace) -> None:
    if args.child:
        print(json.dumps([_measure(size, args.repeats) for size in args.sizes]))
        return
    rows, machine = [], ""
    for malloc in args.malloc:
        for size in args.sizes:
            command = ["model", "--sizes", size, "--repeats", str(args.repeats), "--child", malloc]
            [found] = measure.child(command, malloc)
            machine = found["machine"]
            s = found["seconds"]
            for way in ("half", "all"):
                rows.append([size, malloc, way, f"{s['softmax']:.2f}", f"{s[way]:.2f}", f"{s[way + ' bound']:.2f}",
                             f"{s['softmax'] / s[way]:.2f}x", f"{s[way + ' bound'] / s[way]:.2f}"])  # fmt: skip
    head = ["image", "malloc", "blocks converted", "softmax, s", "converted, s", "attention taken out, s", "speed-up",
            "of the bound's speed"]  # fmt: skip
    text = f"One step of the transformer, batch 1. {machine}.\n\n{results.table(head, rows)}"
    print(text)
    if args.write:
        results.put("model", text)


def sd35(*, blocks: int, dual: int, pos_embed_max_size: int) -> torch.nn.Module:
    """The configuration of stable-diffusion-3.5-medium's transformer, random weights, bfloat16.

    The published one has 24 ``blocks``, the first 13 of them ``dual``, and a position table of 384 x 384.
    """
    from diffusers import SD3Transformer2DModel

    model = SD3Transformer2DModel(
        sample_size=128, patch_size=2, in_channels=16, num_layers=blocks, attention_head_dim=64,
        num_attention_heads=24, joint_attention_dim=4096, caption_projection_dim=1536, pooled_projection_dim=2048,
        out_channels=16, pos_embed_max_size=pos_embed_max_size, dual_attention_layers=tuple(range(dual)),
        qk_norm="rms_norm",
    )  # fmt: skip
    return model.to(torch.bfloat16)


def build() -> torch.nn.Module:
    torch.manual_seed(0)
    return sd35(blocks=4, dual=2, pos_embed_max_size=192).eval()


def inputs(side: int, device: str = "cpu") -> dict[str, torch.Tensor]:
    call = {
        "hidden_states": torch.randn(1, 16, side, side, dtype=torch.bfloat16),
        "encoder_hidden_states": torch.randn(1, 333, 4096, dtype=torch.bfloat16),
        "pooled_projections": torch.randn(1, 2048, dtype=torch.bfloat16),
        "timestep": torch.tensor([500.0]),
    }
    return {name: x.to(device) for name, x in call.items()}


def without_attention(graph: fx.GraphModule, example_inputs: Any) -> Any:
    """A backend: Inductor, with each converted site's output replaced by its values.

    Queries and keys are still made, as outputs that nobody reads: their projections are no part of attention.
    """
    from torch._inductor.compile_fx import compile_fx

    [output] = graph.graph.find_nodes(op="output")
    results, kept = output.args[0], []
    for node in list(graph.graph.nodes):
        if node.target is torch.ops.t5fx.inner_apply.default:
            query, (first, *_), _ = node.args
            key, value, *_ = first.args[0].args
            kept += [_raw(query), _raw(key)]
            node.replace_all_uses_with(value)
            graph.graph.erase_node(node)
    output.args = ((*results, *kept),)
    graph.graph.eliminate_dead_code()
    graph.recompile()
    compiled = compile_fx(graph, example_inputs)
    return lambda *args: compiled(*args)[: len(results)]


def _raw(node: fx.Node) -> fx.Node:
    """A query or key before norm and convolution."""
    while node.target in (torch.ops.t5fx.dwc.default, torch.ops.t5fx.key_norm.default):
        node = node.args[0]
    return node


def measure_ways(size: str, repeats: int, device: str = "cpu") -> dict[str, float]:
    """Median seconds of one step: softmax, half and all converted, and the bound of each."""
    softmax = build().to(device)
    half, everything = copy.deepcopy(softmax), copy.deepcopy(softmax)
    example = ((), inputs(LATENTS["1K"], device))
    t5fx.linearize(half, t5fx.every_other, example_inputs=example)
    t5fx.linearize(everything, t5fx.everything, example_inputs=example)
    ways = {
        "softmax": (softmax, "inductor"),
        "half": (half, "t5"),
        "half bound": (copy.deepcopy(half), without_attention),
        "all": (everything, "t5"),
        "all bound": (copy.deepcopy(everything), without_attention),
    }
    call = inputs(LATENTS[size], device)
    runs: dict[str, Callable[[], object]] = {}
    for name, (model, backend) in ways.items():
        compiled = torch.compile(model, backend=backend, dynamic=False, fullgraph=True)

        def step(compiled: Any = compiled) -> None:
            with torch.no_grad():
                compiled(**call, return_dict=False)
            if device == "cuda":
                torch.cuda.synchronize()

        runs[name] = step
    return measure.alternate(runs, repeats=repeats)


def _measure(size: str, repeats: int) -> dict[str, Any]:
    return {"size": size, "seconds": measure_ways(size, repeats), "machine": measure.machine()}
