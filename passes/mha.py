"""``nn.MultiheadAttention`` opened: the same computation around one SDPA call, for tracing.

PyTorch computes it inside one function, where neither a trace nor a rewrite can look.  These two functions take the
arguments of ``nn.MultiheadAttention.forward`` and of ``F.multi_head_attention_forward`` and do the same in the open.
The trace of an owner uses them in place of the originals (:mod:`t5fx.passes.registry`).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..errors import CaptureError


def mha_forward(
    self: nn.MultiheadAttention,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_padding_mask: Tensor | None = None,
    need_weights: bool = True,
    attn_mask: Tensor | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> tuple[Tensor, None]:
    """``nn.MultiheadAttention.forward``; masks keep their dtype, so that a boolean one can be told.

    Raises:
        CaptureError: the attention map is asked for, or the module adds keys of its own (bias_k, add_zero_attn).
    """
    swap = self.batch_first and query.dim() == 3
    if swap:
        query, key, value = (x.transpose(0, 1) for x in (query, key, value))
    out, _ = multi_head_attention(
        query, key, value, self.embed_dim, self.num_heads, self.in_proj_weight, self.in_proj_bias, self.bias_k,
        self.bias_v, self.add_zero_attn, self.dropout, self.out_proj.weight, self.out_proj.bias,
        training=self.training, key_padding_mask=key_padding_mask, need_weights=need_weights, attn_mask=attn_mask,
        use_separate_proj_weight=not self._qkv_same_embed_dim, q_proj_weight=self.q_proj_weight,
        k_proj_weight=self.k_proj_weight, v_proj_weight=self.v_proj_weight, is_causal=is_causal,
    )  # fmt: skip
    return (out.transpose(0, 1) if swap else out), None


def multi_head_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    embed_dim_to_check: int,
    num_heads: int,
    in_proj_weight: Tensor | None,
    in_proj_bias: Tensor | None,
    bias_k: Tensor | None,
    bias_v: Tensor | None,
    add_zero_attn: bool,
    dropout_p: float,
    out_proj_weight: Tensor,
    out_proj_bias: Tensor | None,
    training: bool = True,
    key_padding_mask: Tensor | None = None,
    need_weights: bool = True,
    attn_mask: Tensor | None = None,
    use_separate_proj_weight: bool = False,
    q_proj_weight: Tensor | None = None,
    k_proj_weight: Tensor | None = None,
    v_proj_weight: Tensor | None = None,
    static_k: Tensor | None = None,
    static_v: Tensor | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> tuple[Tensor, None]:
    """``F.multi_head_attention_forward`` around one SDPA call.

    query [Nq, B, E], key and value [N, B, ...] (or without B); returns [Nq, B, E] and None.
    """
    if need_weights:
        raise CaptureError(
            "nn.MultiheadAttention is asked for its attention map (need_weights=True, which is its default): TTT has "
            "none. Call it with need_weights=False if the map is not used",
            code="map",
        )
    if bias_k is not None or bias_v is not None or add_zero_attn or static_k is not None or static_v is not None:
        raise CaptureError("nn.MultiheadAttention adds keys of its own (bias_k, add_zero_attn or static keys)")
    single = query.dim() == 2
    if single:
        query, key, value = (x.unsqueeze(1) for x in (query, key, value))
    weights: Any
    if use_separate_proj_weight:
        weights = (q_proj_weight, k_proj_weight, v_proj_weight)
    else:
        assert in_proj_weight is not None
        weights = in_proj_weight.chunk(3)
    biases: Any = (None, None, None) if in_proj_bias is None else in_proj_bias.chunk(3)
    query, key, value = (
        F.linear(x, weight, bias).unflatten(-1, (num_heads, -1)).permute(1, 2, 0, 3)
        for x, weight, bias in zip((query, key, value), weights, biases, strict=True)
    )
    mask = _sdpa_mask(attn_mask, key_padding_mask, num_heads)
    out = F.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=mask,
        dropout_p=dropout_p if training else 0.0,
        is_causal=is_causal and mask is None,
    )
    out = F.linear(out.permute(2, 0, 1, 3).flatten(2), out_proj_weight, out_proj_bias)
    return (out.squeeze(1) if single else out), None


def _sdpa_mask(attn_mask: Tensor | None, key_padding_mask: Tensor | None, heads: int) -> Tensor | None:
    """MultiheadAttention hides where a boolean mask is True, SDPA where it is False; padding is [B, N] or [N]."""
    masks = []
    if attn_mask is not None:
        masks.append(attn_mask.unflatten(0, (-1, heads)) if attn_mask.dim() == 3 else attn_mask)
    if key_padding_mask is not None:
        masks.append(key_padding_mask[..., None, None, :])
    if not masks:
        return None
    if all(mask.dtype == torch.bool for mask in masks):
        hidden = masks[0] if len(masks) == 1 else masks[0] | masks[1]
        return hidden.logical_not()
    floats = [
        torch.zeros_like(m, dtype=torch.float32).masked_fill(m, -torch.inf) if m.dtype == torch.bool else m
        for m in masks
    ]
    return floats[0] if len(floats) == 1 else floats[0] + floats[1]
