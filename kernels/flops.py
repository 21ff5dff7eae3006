"""FLOPs of the fused operators, for torch.utils.flop_counter: the matmuls and convolutions, two per multiply-add.

Forward counts what :mod:`t5fx.cost` counts for the four operators. Backward counts its formula
(``kernels/reference.py``), the activations that are made again included.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.utils.flop_counter import register_flop_formula

from . import op as _op  # noqa: F401  (defines torch.ops.t5fx.ttt)

# Matmuls a token: how many [head_dim x hidden], and how many [hidden x value_dim].
_FORWARD = {"swiglu": {"step": (4, 2), "apply": (2, 1)}, "mlp": {"step": (2, 2), "apply": (1, 1)}}
_BACKWARD = {"swiglu": {"step": (10, 5), "apply": (6, 2)}, "mlp": {"step": (5, 5), "apply": (3, 2)}}
_MSE = {"forward": 1, "backward": 3}  # more of the latter in the step: the error looks at the prediction


def _flops(way: str, shapes: Any) -> int:
    query, key, value, weights, _, conv_query, _, conv_key, _, _, inner, loss, _, _, _, grid, *_ = shapes
    table = (_FORWARD if way == "forward" else _BACKWARD)[inner]
    batch, heads, queries, dim = query
    hidden, value_dim, keys = weights[0][2], value[3], key[2]
    into, out = dim * hidden, hidden * value_dim
    step = table["step"][0] * into + (table["step"][1] + (_MSE[way] if loss == "mse" else 0)) * out
    apply = table["apply"][0] * into + table["apply"][1] * out
    # In backward a convolution runs again, and has a gradient for its input and one for its weight.
    passes = 1 if way == "forward" else 3
    taps = sum(math.prod(conv[2:]) for conv in (conv_query, conv_key) if conv is not None)
    convolutions = passes * taps * dim * math.prod(grid) if taps else 0
    return 2 * batch * heads * (keys * step + queries * apply + convolutions)


@register_flop_formula(torch.ops.t5fx.ttt)
def _forward_flops(*shapes: Any, **options: Any) -> int:
    return _flops("forward", shapes)


@register_flop_formula(torch.ops.t5fx.ttt_backward)
def _backward_flops(grad: Any, stats: Any, fast: Any, *shapes: Any, **options: Any) -> int:
    return _flops("backward", shapes)
