"""Decide whether an attention call can become a TTT subgraph: :class:`Match`, or :class:`~t5fx.site.Refusal`.

The decision is made twice with the same code: on the dry run, for the report, and on every graph that is about to
be rewritten, so that a call that turns up later with a mask or ``is_causal=True`` is refused then.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..errors import MaskError
from ..site import Refusal
from .canonicalize import AttentionCall


@dataclass(frozen=True)
class Match:
    """An attention call that can be converted.

    ``groups``: how many query heads share one key head.  ``mask``: "none", "key padding", "boolean" (spread over the
    queries, compared at run time) or "float" (dropped).  ``scale``: the softmax scale, which becomes the scale of the
    inner loss.
    """

    batch: int
    heads: int
    queries: int
    keys: int
    head_dim: int
    value_dim: int
    groups: int
    mask: str
    scale: float
    notes: tuple[str, ...] = ()


def mask_kind(call: AttentionCall) -> str:
    """ "none", "causal", "float", "key padding" (boolean, the same for every head and query) or "boolean"."""
    if call.is_causal:
        return "causal"
    mask = call.attn_mask
    if mask is None:
        return "none"
    if mask.dtype != torch.bool:
        return "float"
    return "key padding" if _same_for_queries(mask) else "boolean"


def _same_for_queries(mask: Tensor) -> bool:
    """An axis of size 1 or stride 0 holds one value: no numbers need to be read to know it."""
    sizes, strides = mask.shape, mask.stride()
    axes = range(1, mask.dim() - 1) if mask.dim() == 4 else range(mask.dim() - 1)
    return all(sizes[a] == 1 or strides[a] == 0 for a in axes)


def key_padding(mask: Tensor, batch: int, check: bool = False) -> Tensor:
    """In a graph: a boolean attention mask [B or 1, 1, 1, N] (or expanded views of it) -> [batch, N], True = attend.

    Args:
        check: the mask was seen to be spread over the queries in memory: compare the numbers, in every call.

    Raises:
        MaskError: the mask is not boolean, or could differ from query to query.  (A RuntimeError from compiled code.)
    """
    if check and mask.dtype == torch.bool and mask.dim() == 4 and not _same_for_queries(mask):
        same = (mask == mask[:, :1, :1]).all()
        if torch.compiler.is_compiling():
            torch._assert_async(same, "a converted attention site got a mask that differs between queries")
        elif not same:
            raise MaskError("a converted attention site got a boolean mask that differs between queries or heads")
    elif mask.dtype != torch.bool or not _same_for_queries(mask):
        raise MaskError(
            f"a converted attention site takes a boolean mask that is the same for all queries (key padding), not "
            f"{mask.dtype} of shape {list(mask.shape)}: leave this site out of the selection, or pass no mask"
        )
    if mask.dim() == 4:
        mask = mask[:, 0, 0]
    else:
        while mask.dim() > 1:
            mask = mask[0]
        mask = mask[None]
    return mask.expand(batch, mask.shape[-1])


def match(call: AttentionCall, *, drop_bias: bool = False, uniform_mask: bool = False) -> Match | Refusal:
    """Look at the operands (tensors with shapes; fake ones do) of one attention call.

    Args:
        drop_bias: a float mask is left out (:attr:`t5fx.TTTConfig.drop_bias`).
        uniform_mask: a boolean mask is known to be the same for all queries, though its shape does not show it.
    """
    query, key, value = call.query, call.key, call.value
    if query.dim() != 4 or key.dim() != 4 or value.dim() != 4:
        return Refusal(
            "shape",
            f"the query has {query.dim()} axes, not the four [batch, heads, tokens, head_dim], so heads or windows "
            "can't be told from the batch",
        )
    kind = mask_kind(call)
    if kind == "causal":
        return Refusal("causal", "causal attention: each query sees other keys; one inner model can't serve them all")
    if kind == "float" and not drop_bias:
        return Refusal(
            "float-mask",
            "a float mask or position bias is added to the scores, and TTT has no scores to add it to; "
            "config=t5fx.T5.replace(drop_bias=True) converts the site without it",
        )
    if kind == "boolean" and not uniform_mask:
        return Refusal(
            "query-mask", "a boolean mask that differs between queries or heads; only key padding is supported"
        )
    heads, key_heads = query.shape[1], key.shape[1]
    if heads % key_heads or value.shape[1] != key_heads or (heads != key_heads and not call.enable_gqa):
        return Refusal("heads", f"{heads} query heads do not share {key_heads} key and {value.shape[1]} value heads")
    if not query.is_floating_point():
        return Refusal("dtype", f"the query is {query.dtype}, not floating point")
    scale = call.scale
    if scale is not None and not isinstance(scale, (int, float)):
        return Refusal("scale", "the softmax scale is computed from a tensor")
    notes = []
    if kind == "float":
        notes.append("the float mask or position bias that was added to the scores is dropped")
    if isinstance(call.dropout_p, (int, float)) and call.dropout_p > 0:
        notes.append(f"attention dropout of {call.dropout_p} has no counterpart in TTT and is dropped")
    return Match(
        batch=int(query.shape[0]),
        heads=int(heads),
        queries=int(query.shape[2]),
        keys=int(key.shape[2]),
        head_dim=int(query.shape[3]),
        value_dim=int(value.shape[3]),
        groups=int(heads // key_heads),
        mask=kind,
        scale=float(scale) if scale is not None else float(query.shape[3]) ** -0.5,
        notes=tuple(notes),
    )


def value_of(argument: Any, values: dict) -> Any:
    """The example value of a graph argument (a node, or a constant)."""
    return values.get(argument, argument) if isinstance(argument, torch.fx.Node) else argument
