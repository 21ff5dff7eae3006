"""Make one operator of the four of a site.

What :mod:`~t5fx.passes.rewrite` wrote reaches a backend, among the rest of the model, as

    k2 = t5fx.key_norm(k, eps, mask);  q2 = t5fx.dwc(q, ...);  k3 = t5fx.dwc(k2, ...)
    fast = t5fx.inner_step(k3, v, weights, ...);  out = t5fx.inner_apply(q2, [fast[0], fast[1], fast[2]], inner)

and leaves as ``out = t5fx.ttt(q, k, v, weights, ...)[0]`` where a kernel takes it (:mod:`t5fx.kernels.dispatch`). The
norm and the convolutions may be absent. A site that no kernel takes, or whose operators don't belong together, keeps
the four, which Inductor compiles like any others. The match goes backwards from ``inner_apply`` and needs no pattern
language: a site has one shape.
"""

from __future__ import annotations

import functools
import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from ..inner import INNER
from ..kernels import dispatch, flops  # noqa: F401  (defines and counts torch.ops.t5fx.ttt)
from ..kernels.problem import Convolution, Problem, Tensors


@dataclass(frozen=True)
class Fusion:
    """What became of one site: its module's qualified name, and the choice with its reasons."""

    site: str
    choice: dispatch.Choice

    def __str__(self) -> str:
        return f"{self.site}: {self.choice}"


def fuse(module: fx.GraphModule, *, kernel: str | None = None, tag: str = "") -> list[Fusion]:
    """Fuse the sites of ``module``, in place; its nodes carry example values as Dynamo's or AOTAutograd's do.

    kernel: force one, as ``T5FX_KERNEL`` does. tag: written behind the kernel's name ("cpu@tag"), so that graphs differ
    where it does: a compiler's cache keeps no artifact beyond a change of what the tag stands for. (A tag on the cache
    itself would not do: backward graphs are compiled later, when the caller's settings are gone.)

    Raises ConfigError on a name that no kernel has.
    """
    found = []
    for node in [n for n in module.graph.nodes if _is(n, torch.ops.t5fx.inner_apply.default)]:
        site, name = _site(node), _name(node)
        if isinstance(site, dispatch.Choice):
            found.append(Fusion(name, site))
            continue
        choice = _choose(site, kernel)
        found.append(Fusion(name, choice))
        if choice.kernel is not None:
            _replace(node, site, f"{choice.kernel}@{tag}" if tag else choice.kernel)
    if found:
        module.graph.lint()
        module.recompile()
    return found


@dataclass(frozen=True)
class _Site:
    query: Any
    key: Any
    value: Any
    weights: list[Any]
    head_lr: Any
    conv_query: tuple[Any, Any] | None
    conv_key: tuple[Any, Any] | None
    mask: Any
    inner: str
    loss: str
    scale: Any
    lr: float
    eps: float | None
    prefix: Any
    grid: list[Any]
    mask_query: bool

    @property
    def dtype(self) -> torch.dtype:
        """The widest of query, key and value, in which the operators compute: a kernel wants one for all three."""
        dtypes = [_example(x).dtype for x in (self.query, self.key, self.value)]
        return functools.reduce(torch.promote_types, dtypes)


def _site(apply: fx.Node) -> _Site | dispatch.Choice:
    """The site that ends in ``apply``, or why there is none."""
    ops = torch.ops.t5fx
    query, fast, inner = _arguments(apply)
    step = _made_by_one_step(fast)
    if step is None:
        return _no("its fast weights do not come from one inner step")
    if inner not in INNER:
        return _no(f"no kernel computes the custom inner model {inner}")
    key, value, weights, step_inner, loss, scale, lr, mask, head_lr = _arguments(step)
    if step_inner != inner:
        return _no("its step and its application are of two inner models")
    masks, grids = [mask], []
    conv_key = conv_query = eps = None
    mask_query = False
    if _is(key, ops.dwc.default):
        key, *conv_key, prefix, grid, conv_mask = _arguments(key)
        masks.append(conv_mask)
        grids.append((prefix, grid))
    if _is(key, ops.key_norm.default):
        key, eps, norm_mask = _arguments(key)
        masks.append(norm_mask)
    if _is(query, ops.dwc.default):
        query, *conv_query, prefix, grid, conv_mask = _arguments(query)
        grids.append((prefix, grid))
        mask_query = conv_mask is not None
        masks += [conv_mask] if mask_query else []
    if any(m is not mask for m in masks):
        return _no("its operators do not have the same mask")
    if any(g != grids[0] for g in grids):
        return _no("its convolutions do not have the same grid")
    prefix, grid = grids[0] if grids else (0, [])
    return _Site(
        query, key, value, list(weights), head_lr,
        tuple(conv_query) if conv_query else None, tuple(conv_key) if conv_key else None, mask,
        inner, loss, scale, lr, eps, prefix, list(grid), mask_query,
    )  # fmt: skip


def _choose(site: _Site, kernel: str | None) -> dispatch.Choice:
    def example(x: Any) -> Any:
        return _example(x) if isinstance(x, fx.Node) else x

    query, key, value = (example(x).to(site.dtype) for x in (site.query, site.key, site.value))
    conv_query, conv_key = (
        None if c is None else Convolution(*map(example, c)) for c in (site.conv_query, site.conv_key)
    )
    grid = tuple(example(g) for g in site.grid)
    problem = Problem(site.inner, site.loss, site.eps, example(site.prefix), grid, site.mask_query)
    weights = [example(w) for w in site.weights]
    tensors = Tensors(query, key, value, weights, conv_query, conv_key, example(site.mask))
    return dispatch.choose(problem, tensors, forced=kernel)


def _replace(apply: fx.Node, site: _Site, kernel: str) -> None:
    graph = apply.graph
    with graph.inserting_before(apply):
        qkv = [
            x if _example(x).dtype == site.dtype else graph.call_method("to", (x, site.dtype))
            for x in (site.query, site.key, site.value)
        ]
        rate = _product(graph, site.scale, site.lr)
        convs = [*(site.conv_query or (None, None)), *(site.conv_key or (None, None))]
        numbers = (site.inner, site.loss, rate, site.eps, site.prefix, site.grid, site.mask_query, kernel)
        fused = graph.call_function(
            torch.ops.t5fx.ttt.default, (*qkv, site.weights, site.head_lr, *convs, site.mask, *numbers)
        )
        out = graph.call_function(operator.getitem, (fused, 0))
        wanted = _example(apply).dtype  # that of autocast, where it is on
        if wanted != site.dtype:
            out = graph.call_method("to", (out, wanted))
    for key in ("nn_module_stack", "stack_trace", "source_fn_stack"):
        if key in apply.meta:
            fused.meta[key] = apply.meta[key]
    apply.replace_all_uses_with(out)
    _erase(apply)


def _erase(node: fx.Node) -> None:
    """``node`` and what only it needed, as far as the site goes."""
    inputs = node.all_input_nodes
    node.graph.erase_node(node)
    for x in inputs:
        ours = x.target is operator.getitem or getattr(_target(x), "namespace", None) == "t5fx"
        if ours and not x.users:
            _erase(x)


# ---- reading nodes ---------------------------------------------------------------------------------------


def _is(x: Any, target: Any) -> bool:
    return isinstance(x, fx.Node) and x.op == "call_function" and _target(x) is target


def _target(node: fx.Node) -> Any:
    """The overload, where someone called ``torch.ops.t5fx.dwc`` without naming it."""
    return node.target.default if isinstance(node.target, torch._ops.OpOverloadPacket) else node.target


def _arguments(node: fx.Node) -> list[Any]:
    """All arguments of an operator in the order of its schema, defaults filled in."""
    schema = _target(node)._schema
    given = dict(zip((a.name for a in schema.arguments), node.args, strict=False)) | node.kwargs
    return [given.get(a.name, a.default_value) for a in schema.arguments]


def _made_by_one_step(fast: Any) -> fx.Node | None:
    if isinstance(fast, fx.Node):
        return fast if _is(fast, torch.ops.t5fx.inner_step.default) else None
    items = [x for x in fast if _is(x, operator.getitem) and _is(x.args[0], torch.ops.t5fx.inner_step.default)]
    if len(items) != len(fast) or any(x.args != (items[0].args[0], i) for i, x in enumerate(items)):
        return None
    return items[0].args[0]


def _example(node: Any) -> Any:
    return node.meta["example_value"] if "example_value" in node.meta else node.meta["val"]


def _product(graph: fx.Graph, scale: Any, lr: float) -> Any:
    return graph.call_function(operator.mul, (scale, lr)) if isinstance(scale, fx.Node) else scale * lr


def _name(node: fx.Node) -> str:
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    path = stack[-1][0] if stack else node.name
    return path.removeprefix("L['self'].")


def _no(reason: str) -> dispatch.Choice:
    return dispatch.Choice(None, {"fuse": reason})
