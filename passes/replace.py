"""Write recognised attention (:mod:`t5fx.passes.written`) as one SDPA node, and drop what nobody reads any more."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

from ..capture.proxy import expect
from .written import CASTS, PRODUCTS, VIEWS, Obstacle, Written, name_of, without_factors

# What changes where numbers are and not what they are: a factor may be taken out before as well as after.
_MOVES = (
    "view", "reshape", "flatten", "unflatten", "transpose", "swapaxes", "permute", "contiguous", "repeat_interleave",
)  # fmt: skip


def replace(written: Written, graph: fx.Graph, emit: Callable[..., fx.Node], values: dict[fx.Node, Any]) -> fx.Node:
    """Write ``written`` as one SDPA node; an attention map that is returned beside becomes None.

    ``emit(function or method name, args, kwargs)`` adds a node with its example value.
    """
    key = written.key
    if written.key_transposed:
        key = _untransposed(key, values) or emit("transpose", (key, -2, -1), {})
    query, value = written.query, written.value
    folded = _unfold((query, key, value), values)
    if folded is not None:
        query, key, value = folded
    query, key = (_without_factor(node, written, emit, values) for node in (query, key))
    mask = _mask(written, emit, values)
    if mask is not None and folded is not None and values[mask].dim() == 3:
        raise Obstacle("a mask lies over heads that are folded into the batch")
    for factor in written.factors:
        emit(expect, (factor, values[factor]), {})
    kwargs = {"attn_mask": mask, "dropout_p": written.dropout, "scale": written.scale}
    out = emit(F.scaled_dot_product_attention, (query, key, value), kwargs)
    last = out
    if folded is not None:
        last = emit("flatten", (out, 0, 1), {})
    if values[last].dtype != values[written.out].dtype:
        last = emit("to", (last, values[written.out].dtype), {})
    written.out.replace_all_uses_with(last)
    for user in written.map_users:
        if user.op != "output":
            raise Obstacle(f"the attention map is also used by {user.name}")
        user.args = fx.node.map_arg(user.args, lambda n: None if n in written.chain else n)
    for node in (written.out, *written.chain[::-1]):
        _erase(node, graph)
    return out


def _erase(node: fx.Node, graph: fx.Graph) -> None:
    if not node.users and node.graph is graph and not node._erased:
        graph.erase_node(node)


def _without_factor(node: Any, written: Written, emit: Callable[..., fx.Node], values: dict[fx.Node, Any]) -> fx.Node:
    """A query (or key) that was scaled before it was split into heads, transposed or folded, without that scaling.

    The factor goes to the scores, where it is in every other spelling; the moves after it are made again without it.
    """
    moves = []
    at = node
    while isinstance(at, fx.Node) and name_of(at) in _MOVES:
        moves.append(at)
        at = at.args[0]
    bare = without_factors(at, written, values)
    if bare is at:
        return node
    for move in reversed(moves):
        bare = emit(move.target, (bare, *move.args[1:]), dict(move.kwargs))
    return bare


def _untransposed(node: Any, values: dict[fx.Node, Any]) -> fx.Node | None:
    """The node that ``node`` is the transpose of its last two axes of."""
    dims = values[node].dim()
    name = name_of(node)
    if name in ("transpose", "swapaxes"):
        swapped = {d % dims for d in node.args[1:3]} == {dims - 1, dims - 2}
    elif name == "permute":
        order = node.args[1] if isinstance(node.args[1], (tuple, list)) else node.args[1:]
        swapped = [d % dims for d in order] == [*range(dims - 2), dims - 1, dims - 2]
    else:
        swapped = name == "getattr" and node.args[1] == "mT"
    if swapped:
        return node.args[0]
    return None


def _unfold(nodes: tuple[fx.Node, ...], values: dict[fx.Node, Any]) -> tuple[fx.Node, ...] | None:
    """[batch * heads, tokens, channels] operands as the [batch, heads, ...] ones that they were reshaped from."""
    if any(values[n].dim() != 3 for n in nodes):
        return None
    found = []
    node: Any
    for node in nodes:
        shape = values[node].shape
        while isinstance(node, fx.Node) and name_of(node) in ("view", "reshape", "flatten", "contiguous", *CASTS):
            node = node.args[0]
            if values[node].dim() == 4 and values[node].shape[2:] == shape[1:]:
                found.append(node)
                break
    heads = {values[n].shape[:2] for n in found}
    return tuple(found) if len(found) == len(nodes) and len(heads) == 1 else None


def _mask(written: Written, emit: Callable[..., fx.Node], values: dict[fx.Node, Any]) -> fx.Node | None:
    """All masks as one: boolean (True = attend) if they are boolean, the sum if they are float."""
    kinds = {mask.kind == "float" for mask in written.masks}
    if len(kinds) > 1:
        raise Obstacle("a float and a boolean mask lie over the same scores")
    total = None
    for mask in written.masks:
        one = mask.node
        if mask.kind == "hide":
            one = emit("logical_not", (one,), {})
        elif mask.kind == "keep":
            one = emit("to", (one, torch.bool), {})
        if written.product is not None and values[mask.scores].shape != values[written.product].shape:
            fill = torch.zeros_like if mask.kind == "float" else torch.ones_like
            like = emit(fill, (mask.scores,), {} if mask.kind == "float" else {"dtype": torch.bool})
            one = emit(operator.add if mask.kind == "float" else operator.and_, (like, one), {})
            one = emit("view_as", (one, written.product), {})
        if total is not None:
            one = emit(operator.add if mask.kind == "float" else operator.and_, (total, one), {})
        total = one
    return total


_PURE = {
    *PRODUCTS, *CASTS, *VIEWS, "mul", "div", "add", "and", "view_as", "zeros_like", "ones_like", "transpose",
    "logical_not", "masked_fill", "softmax", "unsqueeze", "permute", "getitem", "index", "size", "sigmoid", "neg",
    "getattr", "expand", "squeeze", "mT",
}  # fmt: skip


def sweep(graph: fx.Graph) -> None:
    """Drop what nobody reads any more after a site was rewritten: its scores, and a bias that was dropped."""
    for node in reversed(graph.nodes):
        target = (
            str(node.target).rsplit(".", 1)[-1] if node.op == "call_method" else getattr(node.target, "__name__", "")
        )
        in_place = (target.endswith("_") and not target.endswith("__")) or target.startswith("__i")
        if not node.users and (node.op == "get_attr" or (name_of(node) in _PURE and not in_place)):
            graph.erase_node(node)
