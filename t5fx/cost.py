"""What a site costs as softmax attention and as TTT: FLOPs, bytes, break-even length, as sympy expressions.

FLOPs are those of the forward pass as torch.utils.flop_counter counts them: the matmuls and the
convolutions, two per multiply-add; elementwise work is free. The expressions agree exactly with that
counter run on the operators of :mod:`t5fx.ops`.

Bytes are what has to cross the memory bus even for perfectly fused kernels. Softmax: query, key and
value are read once and the output is written once. TTT: the same four, and the inner weights and the
convolutions' weights and biases are read once; normed keys, hidden activations and fast weights never
leave the chip. Everything has the same element size.

    >>> softmax_flops()
    2*batch*heads*keys*queries*(head_dim + value_dim)
    >>> break_even(TTTConfig(), head_dim=64).tokens
    298
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import sympy
import torch
from torch.utils.flop_counter import FlopCounterMode

from .config import TTTConfig
from .errors import ConfigError
from .inner import INNER, InnerModel, functional_apply, functional_step, resolve

B, H, NQ, N, D, DV, HIDDEN = sympy.symbols(
    "batch heads queries keys head_dim value_dim hidden", integer=True, positive=True
)
GRID, ELEMENT = sympy.symbols("grid_tokens element_size", integer=True, nonnegative=True)
#: The arguments of every expression here, in the order of the lambdified functions.
SYMBOLS = (B, H, NQ, N, D, DV, HIDDEN, GRID, ELEMENT)

# Matmuls for one token of one head: how many head_dim x hidden, and how many hidden x value_dim. A step
# runs the model forward as far as the loss needs it, then forms the gradient of each weight.
_STEP = {"swiglu": (4, 2), "mlp": (2, 2)}
_STEP_MSE = (0, 1)  # the prediction itself, which only mse looks at
_APPLY = {"swiglu": (2, 1), "mlp": (1, 1)}


@dataclass(frozen=True)
class SiteCost:
    """Forward FLOPs and bytes of one site, both ways. Ints.

    break_even_tokens: the number of tokens from which TTT needs fewer FLOPs, were the site a
    self-attention whose tokens all lie on the grid.
    """

    softmax_flops: int
    ttt_flops: int
    softmax_bytes: int
    ttt_bytes: int
    break_even_tokens: int


@dataclass(frozen=True)
class BreakEven:
    """solution: the length at which both need the same FLOPs, an expression; tokens: the first above it."""

    solution: sympy.Expr
    tokens: int


def softmax_flops() -> sympy.Expr:
    """Both matmuls of softmax attention."""
    return 2 * B * H * NQ * N * (D + DV)


def softmax_bytes() -> sympy.Expr:
    """Query, key, value and output, once each."""
    return ELEMENT * B * H * (NQ * D + N * D + N * DV + NQ * DV)


def ttt_flops(config: TTTConfig, *, grid_axes: int = 2, sizes: Sizes | None = None) -> sympy.Expr:
    """The convolutions, the inner step and its application.

    grid_axes: 2 for an image, 3 for a video. For a custom inner model the FLOPs are measured, and the
    result holds for these sizes, whatever ``queries`` and ``keys``. Raises ConfigError when they are
    missing, or when the model's FLOPs are not linear in the tokens.
    """
    name = config.inner_name
    if name in INNER:
        step = B * H * N * _per_token(_STEP[name], _STEP_MSE if config.loss == "mse" else (0, 0))
        apply = B * H * NQ * _per_token(_APPLY[name])
    elif sizes is None:
        raise ConfigError(f"the FLOPs of the custom inner model {name} are measured: pass sizes=Sizes(...)")
    else:
        step, apply = _measured(name, config.loss, sizes)
    convolutions = 0 if config.dwc is None else 2 * (2 * B * H * D * GRID * config.dwc**grid_axes)
    return convolutions + step + apply


def ttt_bytes(config: TTTConfig, *, grid_axes: int = 2, sizes: Sizes | None = None) -> sympy.Expr:
    """Query, key, value, output and the parameters, once each. Arguments and errors as :func:`ttt_flops`."""
    name = config.inner_name
    if name in INNER:
        into, out = _APPLY[name]  # each matrix is applied once
        parameters = H * (into * D * HIDDEN + out * HIDDEN * DV)
    elif sizes is None:
        raise ConfigError(f"the weights of the custom inner model {name} are counted: pass sizes=Sizes(...)")
    else:
        parameters = sympy.Integer(sum(w.numel() for w in _meta_weights(resolve(name), sizes).values()))
    if config.dwc is not None:
        parameters += 2 * H * D * (config.dwc**grid_axes + 1)
    return softmax_bytes() + ELEMENT * parameters


def break_even(
    config: TTTConfig,
    *,
    head_dim: int,
    value_dim: int | None = None,
    batch: int = 1,
    heads: int = 1,
    grid_axes: int = 2,
) -> BreakEven:
    """The length of a self-attention, all of it on the grid, from which TTT needs fewer FLOPs.

    Solved with sympy. For the built-in inner models the solution is an expression in head_dim, value_dim
    and hidden, and batch and heads cancel. Raises ConfigError as :func:`ttt_flops`.
    """
    value_dim = head_dim if value_dim is None else value_dim
    sizes = Sizes(batch, heads, head_dim, value_dim, config.hidden(head_dim))
    solution = _solve(config, grid_axes, sizes if config.inner_name not in INNER else None)
    # At the solution itself the two are equal, so the first length past it, also where it is whole.
    tokens = int(sympy.floor(solution.subs(_dims(sizes)))) + 1
    return BreakEven(solution, tokens)


@lru_cache(maxsize=4096)
def site_cost(
    *,
    batch: int,
    heads: int,
    queries: int,
    keys: int,
    head_dim: int,
    value_dim: int,
    config: TTTConfig,
    grid_tokens: int,
    element_size: int = 2,
    grid_axes: int = 2,
) -> SiteCost:
    """The cost of one site: what the tables print. Cached, as a model has many like it.

    grid_tokens: tokens that the convolutions see, on each of query and key. Raises ConfigError.
    """
    sizes = Sizes(batch, heads, head_dim, value_dim, config.hidden(head_dim))
    numbers = (batch, heads, queries, keys, head_dim, value_dim, sizes.hidden, grid_tokens, element_size)
    measured = None if config.inner_name in INNER else sizes
    softmax, ttt, softmax_moved, ttt_moved = (int(f(*numbers)) for f in _functions(config, grid_axes, measured))
    even = break_even(config, head_dim=head_dim, value_dim=value_dim, batch=batch, heads=heads, grid_axes=grid_axes)
    return SiteCost(softmax, ttt, softmax_moved, ttt_moved, even.tokens)


@dataclass(frozen=True)
class Sizes:
    """The sizes that the FLOPs of a custom inner model are measured at."""

    batch: int
    heads: int
    head_dim: int
    value_dim: int
    hidden: int


def _dims(sizes: Sizes) -> dict[sympy.Symbol, int]:
    return {B: sizes.batch, H: sizes.heads, D: sizes.head_dim, DV: sizes.value_dim, HIDDEN: sizes.hidden}


def _per_token(*matmuls: tuple[int, int]) -> sympy.Expr:
    into, out = (sum(counts) for counts in zip(*matmuls, strict=True))
    return 2 * (into * D * HIDDEN + out * HIDDEN * DV)


@lru_cache(maxsize=256)
def _functions(config: TTTConfig, grid_axes: int, sizes: Sizes | None) -> tuple[Callable[..., Any], ...]:
    expressions = (
        softmax_flops(),
        ttt_flops(config, grid_axes=grid_axes, sizes=sizes),
        softmax_bytes(),
        ttt_bytes(config, grid_axes=grid_axes, sizes=sizes),
    )
    return tuple(sympy.lambdify(SYMBOLS, expression, modules="math") for expression in expressions)


@lru_cache(maxsize=256)
def _solve(config: TTTConfig, grid_axes: int, sizes: Sizes | None) -> sympy.Expr:
    length = sympy.Symbol("N", positive=True)
    same = {NQ: length, N: length, GRID: length}
    difference = (softmax_flops() - ttt_flops(config, grid_axes=grid_axes, sizes=sizes)).subs(same)
    if sizes is not None:
        difference = difference.subs(_dims(sizes))
    # Softmax grows with the square, TTT with the line: past the largest root softmax is the dearer.
    roots = sympy.solve(difference, length)
    return sympy.simplify(sympy.Max(*roots)) if roots else sympy.Integer(0)


def _meta_weights(inner: InnerModel, sizes: Sizes) -> dict[str, torch.Tensor]:
    dims = (sizes.heads, sizes.head_dim, sizes.value_dim, sizes.hidden)
    return inner.init(*dims, std=0.02, device="meta", dtype=torch.float32)


@lru_cache(maxsize=256)
def _measured(name: str, loss: str, sizes: Sizes) -> tuple[sympy.Expr, sympy.Expr]:
    """Step and application of a custom inner model, as lines in keys and queries."""
    inner = resolve(name)
    # torch.func needs autograd's dispatch, which inference mode takes away.
    with torch.inference_mode(False), torch.no_grad():
        weights = _meta_weights(inner, sizes)
        fast = {n: w.expand(sizes.batch, *w.shape).clone() for n, w in weights.items()}

        def tokens(length: int, channels: int) -> torch.Tensor:
            return torch.empty(sizes.batch, sizes.heads, length, channels, device="meta")

        def step(length: int) -> None:
            key, value = tokens(length, sizes.head_dim), tokens(length, sizes.value_dim)
            functional_step(inner, weights, key, value, loss=loss, scale=1.0, lr=1.0)

        def apply(length: int) -> None:
            functional_apply(inner, fast, tokens(length, sizes.head_dim))

        return _line(step, N, name), _line(apply, NQ, name)


def _line(run: Callable[[int], None], length: sympy.Symbol, name: str) -> sympy.Expr:
    def count(tokens: int) -> int:
        with FlopCounterMode(display=False) as counter:
            run(tokens)
        return counter.get_total_flops()

    low, high, check = 64, 128, 256
    slope, rest = divmod(count(high) - count(low), high - low)
    line = slope * length + (count(low) - slope * low)
    if rest or line.subs(length, check) != count(check):
        raise ConfigError(f"the FLOPs of the inner model {name} do not grow linearly with the tokens")
    return sympy.sympify(line)
