"""The new parameters of a converted site, ``<owner>.ttt``."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from .config import TTTConfig
from .grid import SiteLayout
from .inner import resolve


class Depthwise2d(nn.Conv2d):
    """A convolution whose forward hands its parameters out, under the hooks of a forward."""

    def forward(self) -> tuple[Any, Any]:  # type: ignore[override]
        return self.weight, self.bias


class Depthwise3d(nn.Conv3d):
    """The same for video."""

    def forward(self) -> tuple[Any, Any]:  # type: ignore[override]
        return self.weight, self.bias


_CONVOLUTION: dict[int, Any] = {2: Depthwise2d, 3: Depthwise3d}


class TTTWeights(nn.Module):
    """Holds what a site trains: the inner model's initial weights and the depthwise convolutions.

    The computation is in the owner's rewritten graph, which calls this module for its parameters; see
    :func:`t5fx.ops.ttt_attention` for what it computes.

    Attributes:
        w1, w2, ...: [heads, head_dim, hidden] or [heads, hidden, value_dim]; names and shapes are the inner model's.
        inner_lr: [heads], the step size of the inner model's training, if ``config.learn_inner_lr``.
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
        self.names: list[str] = []
        options = {"std": config.init_std, "device": device, "dtype": dtype}
        for name, weight in inner.init(heads, head_dim, value_dim, config.hidden(head_dim), **options).items():
            self.register_parameter(name, nn.Parameter(weight.detach()))
            self.names.append(name)
        if config.learn_inner_lr:
            start = torch.full((heads,), config.inner_lr, device=device, dtype=dtype)
            self.register_parameter("inner_lr", nn.Parameter(start))
            self.names.append("inner_lr")
        if config.dwc is not None:
            channels = heads * head_dim
            shape = (channels, channels, config.dwc)
            for name in ("dwc_q", "dwc_k"):
                convolution = _CONVOLUTION[axes](
                    *shape, padding=config.dwc // 2, groups=channels, device=device, dtype=dtype
                )
                self.add_module(name, convolution)

    def forward(self) -> dict[str, torch.Tensor]:
        """The parameters by name, as :func:`t5fx.ops.ttt_attention` takes them."""
        parameters: dict[str, torch.Tensor] = {name: getattr(self, name) for name in self.names}
        for name in ("dwc_q", "dwc_k"):
            if name in self._modules:
                parameters[f"{name}.weight"], parameters[f"{name}.bias"] = self.get_submodule(name)()
        return parameters

    def extra_repr(self) -> str:
        shapes = ", ".join(f"{name} {list(p.shape)}" for name, p in self.named_parameters(recurse=False))
        return f"{self.config.inner_name}, {self.config.loss} loss, {shapes}, {self.layout}"
