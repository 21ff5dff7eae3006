"""What the real vision transformer costs at one resolution after another, with softmax and with TTT.

The models are built on the meta device: shapes without weights, so that a 2,072-pixel image costs no memory.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import timm
import torch
from torch.utils.flop_counter import FlopCounterMode

import t5fx
from t5fx.select import choose

MODEL, PATCH = "vit_small_patch14_dinov2", 14
SIZES = (112, 224, 364, 518, 728, 1036, 1456, 2072)


@dataclass(frozen=True)
class Cost:
    """Forward FLOPs for one image of ``size`` x ``size`` pixels: of the attention sites, and of the whole network."""

    size: int
    tokens: int
    break_even_tokens: int
    softmax: int
    half: int
    all: int
    network: int  # of the softmax model

    @property
    def network_half(self) -> int:
        return self.network - self.softmax + self.half

    @property
    def network_all(self) -> int:
        return self.network - self.softmax + self.all


def at_size(size: int) -> Cost:
    """Inspect the model at one image size; its own layers are counted by torch's FLOP counter."""
    with torch.device("meta"):
        model = timm.create_model(MODEL, pretrained=False, num_classes=0, img_size=size).eval()
        image = torch.empty(1, 3, size, size)
    report = t5fx.inspect(model, image)
    half = choose(report.sites, t5fx.every_other)
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(image)
    return Cost(
        size=size,
        tokens=report.sites[0].keys,
        break_even_tokens=report.sites[0].break_even_tokens,
        softmax=report.totals()["softmax_flops"],
        half=report.totals(half)["flops"],
        all=report.totals(report.convertible)["flops"],
        network=counter.get_total_flops(),
    )


def over_sizes(sizes: tuple[int, ...] = SIZES, tick: Callable[[], None] = lambda: None) -> list[Cost]:
    """One :class:`Cost` a size."""
    costs = []
    for size in sizes:
        costs.append(at_size(size))
        tick()
    return costs
