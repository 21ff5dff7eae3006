"""One form for every attention call.

Later passes see only :class:`AttentionCall`: the operands of ``scaled_dot_product_attention`` bound by name, whatever
way the call was written.  :func:`occurrences` lists the attention of a graph in order of execution;
:func:`canonicalize` turns one of them into an SDPA node and checks on random numbers that nothing has changed.  The
spellings of SDPA itself (the public function, the builtin behind it, the ATen operator of an exported program) are
known here; written-out attention is in :mod:`t5fx.passes.written`, ``nn.MultiheadAttention`` in
:mod:`t5fx.passes.mha`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from .replace import replace
from .written import VIEWS, Obstacle, Recognizer, Written

SDPA_FUNCTIONS = {
    F.scaled_dot_product_attention,
    torch._C._nn.scaled_dot_product_attention,
    torch.ops.aten.scaled_dot_product_attention,
    torch.ops.aten.scaled_dot_product_attention.default,
}
_NAMES = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
_KEYWORDS = {"scale", "enable_gqa"}


@dataclass
class AttentionCall:
    """The arguments of one ``scaled_dot_product_attention`` call; tensors in a dry run, nodes in a graph."""

    query: Any
    key: Any
    value: Any
    attn_mask: Any = None
    dropout_p: Any = 0.0
    is_causal: Any = False
    scale: Any = None
    enable_gqa: Any = False


def bind(args: tuple, kwargs: dict[str, Any]) -> AttentionCall:
    """Bind the arguments of an SDPA call to their names."""
    bound = dict(zip(_NAMES, args, strict=False))
    bound.update({key: value for key, value in kwargs.items() if key in _NAMES or key in _KEYWORDS})
    return AttentionCall(**bound)


def occurrences(graph: fx.Graph, values: dict[fx.Node, Any], modules: Callable[[str], nn.Module]) -> list[fx.Node]:
    """SDPA nodes and the softmaxes of written-out attention, in order of execution."""
    softmaxes = set(Recognizer(graph, values, modules).softmaxes())
    return [n for n in graph.nodes if n in softmaxes or (n.op == "call_function" and n.target in SDPA_FUNCTIONS)]


def canonicalize(
    graph: fx.Graph, node: fx.Node, values: dict[fx.Node, Any], modules: Callable[[str], nn.Module], mode: Any
) -> fx.Node:
    """Turn one of the :func:`occurrences` into an SDPA node (if it is none yet) and return that.

    Raises:
        Obstacle: it is not attention of a form that is known, or the two forms do not compute the same.
    """
    if node.op == "call_function" and node.target in SDPA_FUNCTIONS:
        return node
    written = Recognizer(graph, values, modules).around(node)

    def emit(target: Any, args: tuple, kwargs: dict[str, Any]) -> fx.Node:
        kind = "call_method" if isinstance(target, str) else "call_function"
        with graph.inserting_before(written.out):
            new = graph.create_node(kind, target, args, kwargs)
        real_args, real_kwargs = fx.node.map_arg((args, kwargs), lambda n: values[n])
        with mode, torch.no_grad():
            values[new] = _call(new, real_args, real_kwargs)
        return new

    _check(written, values, modules)
    return replace(written, graph, emit, values)


def _call(node: fx.Node, args: tuple, kwargs: dict[str, Any]) -> Any:
    if node.op == "call_method":
        return getattr(args[0], str(node.target))(*args[1:], **kwargs)
    target: Any = node.target
    return target(*args, **kwargs)


def _check(written: Written, values: dict[fx.Node, Any], modules: Callable[[str], nn.Module]) -> None:
    """Run the written-out form on small random numbers, beside SDPA with what was recognised in it.

    Raises:
        Obstacle: they differ.
    """
    exact = any(Recognizer(written.out.graph, values, modules).name(n) in VIEWS for n in written.chain)
    shapes = _check_shapes(written, values, exact)
    if sum(math.prod(shape) for shape in shapes.values()) > 1 << 26:
        raise Obstacle("its form depends on sizes that are too large to be checked")
    generator = torch.Generator().manual_seed(0)
    known: dict[fx.Node, Any] = {
        node: torch.randn(shape, generator=generator, dtype=torch.float64) for node, shape in shapes.items()
    }
    for mask in written.masks:
        if mask.kind != "float":
            known[mask.node] = known[mask.node] > 0.8 if mask.kind == "hide" else known[mask.node] < 0.8
    try:
        out = _evaluate(written.out, known, values, modules)
        total = _mask_effect(written, known, values, modules)
    except Exception as error:  # shapes that only fit the example: it can't be checked, so it is not trusted
        raise Obstacle(f"the written-out form could not be checked ({type(error).__name__}: {error})") from error
    transposed = known[written.key].transpose(-1, -2) if written.key_transposed else known[written.key]
    wanted = F.scaled_dot_product_attention(
        known[written.query], transposed, known[written.value], attn_mask=total, scale=written.scale
    )
    if out.shape != wanted.shape or not torch.allclose(out.double(), wanted, rtol=1e-4, atol=1e-5):
        raise Obstacle("what was recognised as attention computes something else")


def _check_shapes(written: Written, values: dict[fx.Node, Any], exact: bool) -> dict[fx.Node, list[int]]:
    """Shapes for the check: those of the example, made small unless a reshape ties them to each other."""
    query, key, value = (list(values[n].shape) for n in (written.query, written.key, written.value))
    shapes = {written.query: query, written.key: key, written.value: value}
    shapes |= {mask.node: list(values[mask.node].shape) for mask in written.masks}
    if exact:
        return shapes
    channels, tokens = (-2, -1) if written.key_transposed else (-1, -2)
    lead = [min(n, 2) for n in query[:-2]]
    n_query, n_key = min(query[-2], 5), min(key[tokens], 5)
    key_shape = [*lead, 0, 0]
    key_shape[channels], key_shape[tokens] = key[channels], n_key
    small = {written.query: [*lead, n_query, query[-1]], written.key: key_shape}
    small[written.value] = [*lead, n_key, value[-1]]
    for mask in written.masks:
        shape = shapes[mask.node]
        ends = [1 if n == 1 else m for n, m in zip(shape[-2:], (n_query, n_key)[-len(shape) :], strict=True)]
        small[mask.node] = [min(n, 2) for n in shape[:-2]] + ends
    return small


def _mask_effect(written: Written, known: dict, values: dict, modules: Callable) -> Tensor | None:
    """What the masks add to the scores, as one float mask."""
    total = None
    for mask in written.masks:
        drawn = known[mask.node]
        if mask.kind != "float":
            hidden = drawn if mask.kind == "hide" else ~drawn
            drawn = torch.zeros(hidden.shape, dtype=torch.float64).masked_fill(hidden, -math.inf)
        assert written.product is not None
        scores, product = (_evaluate(n, known, values, modules) for n in (mask.scores, written.product))
        if scores.shape != product.shape:
            drawn = drawn.expand(scores.shape).reshape(product.shape)
        total = drawn if total is None else total + drawn
    return total


def _evaluate(node: Any, known: dict[fx.Node, Any], values: dict[fx.Node, Any], modules: Callable) -> Any:
    """The value of ``node`` from the known ones; plain numbers are the example's, dropout does nothing."""
    if not isinstance(node, fx.Node):
        return node
    if node in known:
        return known[node]
    example = values.get(node)
    if not isinstance(example, Tensor):
        return torch.float64 if isinstance(example, torch.dtype) else example
    name = Recognizer(node.graph, values, modules).name(node)
    mapped: Any = fx.node.map_arg((node.args, node.kwargs), lambda n: _evaluate(n, known, values, modules))
    args, kwargs = mapped
    if "dropout" in name or name in ("identity", "contiguous", "clone", "float", "half", "type_as", "bfloat16"):
        result: Any = args[0]
    elif name in ("to", "type", "double"):
        result = args[0].double()
    elif name == "softmax":
        result = torch.softmax(args[0], -1)
    elif name == "baddbmm" and kwargs.get("beta", 1) == 0:
        result = kwargs.get("alpha", 1) * (args[1] @ args[2])
    elif node.op == "call_module":
        raise Obstacle(f"{node.target} lies inside")
    else:
        result = _call(node, args, kwargs)
    known[node] = result
    return result
