"""One form for every attention call.

Later passes see only :class:`AttentionCall`: the operands of ``scaled_dot_product_attention`` bound by name,
whatever way the call was written.  This file knows the spellings of that function (the public one, the builtin
behind it, the ATen operator an exported program holds); :mod:`t5fx.passes.match` decides what may be converted.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

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


def attention_nodes(graph: fx.Graph) -> list[fx.Node]:
    """The SDPA nodes of ``graph`` in order of execution."""
    return [n for n in graph.nodes if n.op == "call_function" and n.target in SDPA_FUNCTIONS]
