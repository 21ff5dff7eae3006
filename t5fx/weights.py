"""The new parameters of a converted site, ``<owner>.ttt``."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from .config import TTTConfig
from .grid import SiteLayout
from .inner import resolve

_CONVOLUTION: dict[int, Any] = {2: nn.Conv2d, 3: nn.Conv3d}


class TTTWeights(nn.Module):
    """Holds what a site trains: the inner model's initial weights and the depthwise convolutions.

    The computation is in the owner's rewritten graph; see :func:`t5fx.ops.ttt_attention` for what it computes.

    Attributes:
        w1, w2, ...: [heads, head_dim, hidden] or [heads, hidden, value_dim]; names and shapes are the inner model's.
        dwc_q, dwc_k: depthwise convolutions of heads * head_dim channels, unless ``config.dwc`` is None.
        layout: where the grid lies among the tokens.
    """

    layout: SiteLayout | None

    def __init__(
        self,
        config: TTTConfig,
        heads: int,
        head_dim: int,
        value_dim: int,
        layout: SiteLayout | None,
        axes: int = 2,
        *,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.config = config
        self.layout = layout
        self.sizes = {"heads": heads, "head_dim": head_dim, "value_dim": value_dim, "axes": axes}
        inner = resolve(config.inner)
        options = {"std": config.init_std, "device": device, "dtype": dtype}
        for name, weight in inner.init(heads, head_dim, value_dim, config.hidden(head_dim), **options).items():
            self.register_parameter(name, nn.Parameter(weight.detach()))
        if config.dwc is not None:
            channels = heads * head_dim
            shape = (channels, channels, config.dwc)
            for name in ("dwc_q", "dwc_k"):
                convolution = _CONVOLUTION[axes](
                    *shape, padding=config.dwc // 2, groups=channels, device=device, dtype=dtype
                )
                self.add_module(name, convolution)

    def extra_repr(self) -> str:
        shapes = ", ".join(f"{name} {list(p.shape)}" for name, p in self.named_parameters(recurse=False))
        return f"{self.config.inner_name}, {self.config.loss} loss, {shapes}, {self.layout}"
