"""Replace one SDPA node by its TTT subgraph.

For a site whose weights live in ``owner.ttt`` the node

    out = scaled_dot_product_attention(q, k, v)

becomes (mask and grouped heads left away)

    w = ttt()
    prefix, grid = ttt.layout.resolve(k.size(2))
    k    = t5fx.key_norm(k, eps)
    q, k = t5fx.dwc(q, w["dwc_q.weight"], w["dwc_q.bias"], prefix, grid), t5fx.dwc(k, ...)
    fast = t5fx.inner_step(k, v, [w["w1"], w["w2"], w["w3"]], "swiglu", "dot", scale, lr)
    out  = t5fx.inner_apply(q, fast, "swiglu")

which is :func:`t5fx.ops.ttt_attention` written as graph nodes.  Where ``lr`` is learned it is 1.0 here, and
``w["inner_lr"]`` is the step's last argument.  The parameters come from a call of ``ttt`` and not from its attributes,
so that hooks which bring a module's weights for its forward (offloading, sharding) bring these too.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from .. import ops  # noqa: F401  (defines torch.ops.t5fx)
from ..config import TTTConfig
from ..inner import weight_names
from .canonicalize import bind
from .match import Match, key_padding


def rewrite(graph: fx.Graph, node: fx.Node, match: Match, config: TTTConfig, ttt: str, self_attention: bool) -> fx.Node:
    """Replace ``node`` in ``graph``; returns the node that computes the output in its stead.

    Args:
        ttt: qualified name, seen from the graph's module, of the :class:`~t5fx.weights.TTTWeights`.
        self_attention: queries and keys are the same tokens, so a key-padding mask holds for both.
    """
    call = bind(node.args, node.kwargs)
    op = torch.ops.t5fx
    with graph.inserting_before(node):
        query, key, value = call.query, call.key, call.value
        if match.groups > 1:
            key, value = (graph.call_method("repeat_interleave", (x, match.groups, 1)) for x in (key, value))
        mask = None
        if call.attn_mask is not None and match.mask != "float":
            batch = graph.call_method("size", (key, 0))
            mask = graph.call_function(key_padding, (call.attn_mask, batch, match.mask == "boolean"))
        if config.key_norm:
            key = graph.call_function(op.key_norm.default, (key, config.key_norm_eps, mask))
        parameters = graph.call_module(ttt)
        if config.dwc is not None:
            query, key = _convolve(graph, query, key, mask, ttt, parameters, self_attention)
        weights = [_item(graph, parameters, name) for name in weight_names(config.inner_name)]
        inner = config.inner_name
        scale = call.scale if isinstance(call.scale, fx.Node) else match.scale  # a node where sizes decide it
        step: tuple = (key, value, weights, inner, config.loss, scale, config.inner_lr, mask)
        if config.learn_inner_lr:  # a parameter in place of the number
            step = (*step[:-2], 1.0, mask, _item(graph, parameters, "inner_lr"))
        fast = graph.call_function(op.inner_step.default, step)
        out = graph.call_function(op.inner_apply.default, (query, fast, inner))
    node.replace_all_uses_with(out)
    graph.erase_node(node)
    return out


def _item(graph: fx.Graph, parameters: fx.Node, name: str) -> fx.Node:
    return graph.call_function(operator.getitem, (parameters, name))


def _convolve(
    graph: fx.Graph, query: Any, key: Any, mask: Any, ttt: str, parameters: fx.Node, self_attention: bool
) -> tuple[Any, Any]:
    op = torch.ops.t5fx.dwc.default
    tokens = graph.call_method("size", (key, 2))
    layout = graph.call_method("resolve", (graph.get_attr(f"{ttt}.layout"), tokens))
    prefix, grid = (graph.call_function(operator.getitem, (layout, i)) for i in range(2))
    out = []
    for x, name, x_mask in ((query, "dwc_q", mask if self_attention else None), (key, "dwc_k", mask)):
        weight, bias = (_item(graph, parameters, f"{name}.{part}") for part in ("weight", "bias"))
        out.append(graph.call_function(op, (x, weight, bias, prefix, grid, x_mask)))
    return out[0], out[1]
