"""A whole site as two operators, ``t5fx::ttt`` and ``t5fx::ttt_backward``, opaque to every compiler.

``passes/fuse.py`` puts the first in place of the four operators of a site; autograd makes the second. Both only hand
their arguments to the kernel that they are told by name (:mod:`t5fx.kernels.dispatch` chooses it, when a graph is
compiled), check what comes back and give it fixed strides, so that compilers can plan memory without running it.

    ttt(query, key, value, weights, head_lr, conv_q_weight, conv_q_bias, conv_k_weight, conv_k_bias, mask,
        inner, loss, rate, eps, prefix, grid, mask_query, kernel) -> (output, stats, fast)

Shapes as in :mod:`t5fx.ops`; a float ``rate`` is scale * inner_lr, ``head_lr`` [H] multiplies it. ``output`` is
[B, H, Nq, Dv] in query's dtype over memory [B, Nq, H, Dv]: the transpose and reshape that follow attention in every
model are views of it. ``stats`` [B, H, 2, D] and ``fast`` [B, H, all fast weights] are float32 (float64 if anything
is) and are there for backward, which recomputes everything else.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..ops import compute_dtype
from . import dispatch
from .problem import Convolution, Kernel, Problem, Saved, Tensors, empty_tokens

_SITE = (
    "Tensor query, Tensor key, Tensor value, Tensor[] weights, Tensor? head_lr, Tensor? conv_q_weight, "
    "Tensor? conv_q_bias, Tensor? conv_k_weight, Tensor? conv_k_bias, Tensor? mask, str inner, str loss, float rate, "
    "float? eps, SymInt prefix, SymInt[] grid, bool mask_query, str kernel"
)
_TENSORS = 10  # so many of these arguments are tensors or lists of them


def _split(site: Sequence[Any]) -> tuple[Problem, Tensors, Kernel]:
    query, key, value, weights, _, qw, qb, kw, kb, mask, inner, loss, _, eps, prefix, grid, mask_query, name = site
    problem = Problem(inner, loss, eps, int(prefix), tuple(map(int, grid)), mask_query)
    conv_query = None if qw is None else Convolution(qw, qb)
    conv_key = None if kw is None else Convolution(kw, kb)
    return problem, Tensors(query, key, value, weights, conv_query, conv_key, mask), dispatch.kernel(name)


def _rate(site: Sequence[Any]) -> Tensor:
    query, head_lr, rate = site[0], site[4], site[12]
    dtype = _saved_dtype(site)
    if head_lr is None:
        return torch.full((query.shape[1],), rate, dtype=dtype, device=query.device)
    return head_lr.to(dtype) * rate


def _saved_dtype(site: Sequence[Any]) -> torch.dtype:
    return compute_dtype(*site[:3], *site[3])


def _empty_like_saved(site: Sequence[Any]) -> tuple[Tensor, Tensor, Tensor]:
    query, key, value, weights, eps = site[0], site[1], site[2], site[3], site[13]
    batch, heads, _, dim = query.shape
    output = empty_tokens(query, channels=value.shape[3])
    dtype = _saved_dtype(site)
    stats = key.new_empty(batch, heads, 2, dim if eps is not None else 0, dtype=dtype)
    fast = query.new_empty(batch, heads, sum(w.shape[1] * w.shape[2] for w in weights), dtype=dtype)
    return output, stats, fast


@torch.library.custom_op("t5fx::ttt", mutates_args=(), schema=f"({_SITE}) -> (Tensor, Tensor, Tensor)")
def ttt(*site: Any) -> tuple[Tensor, Tensor, Tensor]:
    problem, tensors, kernel = _split(site)
    output, saved = kernel.forward(problem, tensors, _rate(site))
    dtype = _saved_dtype(site)
    fast = torch.cat([f.reshape(*f.shape[:2], -1) for f in saved.fast], dim=-1).to(dtype)
    return _tokens_outside(output.to(tensors.query.dtype)), saved.stats.to(dtype).contiguous(), fast


@ttt.register_fake
def _(*site: Any) -> tuple[Tensor, Tensor, Tensor]:
    return _empty_like_saved(site)


@torch.library.custom_op(
    "t5fx::ttt_backward", mutates_args=(), schema=f"(Tensor grad, Tensor stats, Tensor fast, {_SITE}) -> Tensor[]"
)
def ttt_backward(grad: Tensor, stats: Tensor, fast: Tensor, *site: Any) -> list[Tensor]:
    problem, tensors, kernel = _split(site)
    shapes = [(*fast.shape[:2], *w.shape[1:]) for w in tensors.weights]
    pieces = fast.split([s[2] * s[3] for s in shapes], dim=-1)
    saved = Saved(stats, [p.reshape(s) for p, s in zip(pieces, shapes, strict=True)])
    found = kernel.backward(problem, tensors, _rate(site), saved, grad)
    out = [found.query, found.key, found.value, *found.weights]
    if site[4] is not None:
        out.append(found.rate * site[12])
    for conv in (found.conv_query, found.conv_key):
        out += [] if conv is None else [g for g in conv if g is not None]
    out = [g.to(like.dtype) for g, like in zip(out, _differentiable(site), strict=True)]
    return [*map(_tokens_outside, out[:3]), *(g.contiguous() for g in out[3:])]


@ttt_backward.register_fake
def _(grad: Tensor, stats: Tensor, fast: Tensor, *site: Any) -> list[Tensor]:
    query, key, value, *rest = _differentiable(site)
    return [*map(empty_tokens, (query, key, value)), *(x.new_empty(x.shape) for x in rest)]


def _tokens_outside(x: Tensor) -> Tensor:
    """[B, H, N, D] over memory [B, N, H, D], where it came from: one layout, whatever the kernel found handy."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def _differentiable(site: Sequence[Any]) -> list[Tensor]:
    """The tensors that have a gradient, in the order in which ttt_backward returns these."""
    query, key, value, weights, head_lr, *convs = site[: _TENSORS - 1]
    return [x for x in (query, key, value, *weights, head_lr, *convs) if x is not None]


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    query, key, value, weights, *rest = inputs[:_TENSORS]
    _, stats, fast = output
    ctx.mark_non_differentiable(stats, fast)
    ctx.count = len(weights)
    ctx.numbers = inputs[_TENSORS:]
    ctx.save_for_backward(stats, fast, query, key, value, *weights, *rest)


def _backward(ctx: Any, grad: Tensor, *_: Any) -> tuple[Any, ...]:
    stats, fast, query, key, value, *rest = ctx.saved_tensors
    weights, rest = rest[: ctx.count], rest[ctx.count :]
    site = (query, key, value, weights, *rest, *ctx.numbers)
    found = iter(torch.ops.t5fx.ttt_backward.default(grad, stats, fast, *site))
    grads: list[Any] = [next(found), next(found), next(found), [next(found) for _ in weights]]
    grads += [None if x is None else next(found) for x in rest[:-1]]
    # The mask, and what is no tensor, have none. (An empty list is a list of no tensors, and wants its like.)
    return (*grads, None, *([] if x == [] else None for x in ctx.numbers))


ttt.register_autograd(_backward, setup_context=_setup_context)
