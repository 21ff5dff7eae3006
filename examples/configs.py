"""The configurations that finetune_timm.py and ablations.py know by name, and linear attention as an inner model."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import t5fx


class Linear:
    """Linear attention as an inner model: queries times the sum over tokens of key times value, and a learned start."""

    def init(self, heads: int, head_dim: int, value_dim: int, hidden: int, *, std: float, device: Any = None,
             dtype: Any = None, generator: Any = None) -> dict[str, Tensor]:  # fmt: skip
        weight = torch.empty(heads, head_dim, value_dim, device=device, dtype=dtype)
        return {"w": nn.init.trunc_normal_(weight, std=std, generator=generator)}

    def apply(self, weights: dict[str, Tensor], x: Tensor) -> Tensor:
        return x @ weights["w"]


CONFIGS = {
    "t5": t5fx.T5,
    "dit5": t5fx.DIT5_TTT,
    "calibrated": t5fx.CALIBRATED,
    "linear": t5fx.T5.replace(inner=Linear()),
}
#: What the stage ``presets`` compares: one change at a time from the published ones to ours.
CANDIDATES = {
    "T5": t5fx.T5,
    "T5, learned rate from 4": t5fx.T5.replace(inner_lr=4.0, learn_inner_lr=True),
    "T5, learned rate from 4, eps 1e-5": t5fx.T5.replace(inner_lr=4.0, learn_inner_lr=True, key_norm_eps=1e-5),
    "MLP, dot": t5fx.T5.replace(inner="mlp"),
    "MLP, MSE": t5fx.DIT5_TTT,
    "MLP, MSE, eps 1e-5": t5fx.DIT5_TTT.replace(key_norm_eps=1e-5),
    "MLP, MSE, learned rate from 4": t5fx.DIT5_TTT.replace(inner_lr=4.0, learn_inner_lr=True),
    "MLP, MSE, learned rate from 1, eps 1e-5": t5fx.DIT5_TTT.replace(learn_inner_lr=True, key_norm_eps=1e-5),
    "MLP, MSE, learned rate from 4, eps 1e-5": t5fx.CALIBRATED,
    "MLP, dot, learned rate from 4, eps 1e-5": t5fx.CALIBRATED.replace(loss="dot"),
    "MLP, MSE, learned rate from 10, eps 1e-5": t5fx.CALIBRATED.replace(inner_lr=10.0),
    "MLP, dot, learned rate from 1, eps 1e-5": t5fx.CALIBRATED.replace(loss="dot", inner_lr=1.0),
    "linear attention": CONFIGS["linear"],
}
#: What --config takes.
NAMED = {**CONFIGS, **CANDIDATES}
