"""The model that finetune_timm.py and ablations.py train: a small vision transformer, or any of timm."""

from __future__ import annotations

import argparse
from typing import Any

import data
import timm
import torch
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn


class ConvStem(nn.Module):
    """Four 3 x 3 convolutions, two of them with stride 2, in place of the cut into patches of 4 x 4 pixels.

    A transformer that learns from few images needs the start that convolutions give it.  Group norm: its result is the
    same however the batch is shared by processes.
    """

    def __init__(
        self, img_size: int = 32, patch_size: int = 4, in_chans: int = 3, embed_dim: int = 96, **_: Any
    ) -> None:
        super().__init__()
        self.img_size, self.patch_size = (img_size, img_size), (patch_size, patch_size)
        self.grid_size = (img_size // patch_size, img_size // patch_size)
        self.num_patches = self.grid_size[0] * self.grid_size[1]
        widths = (embed_dim // 4, embed_dim // 2, embed_dim // 2, embed_dim)
        layers: list[nn.Module] = []
        for channels, width, stride in zip((in_chans, *widths), widths, (1, 2, 1, 2), strict=False):
            layers += [nn.Conv2d(channels, width, 3, stride, 1, bias=False), nn.GroupNorm(8, width), nn.ReLU()]
        self.body = nn.Sequential(*layers[:-2])

    def forward(self, images: Tensor) -> Tensor:
        """[B, channels, height, width] -> tokens [B, height * width / 16, embed_dim]."""
        return self.body(images).flatten(2).transpose(1, 2)


def small_vit(classes: int, channels: int, size: int, width: int, depth: int, seed: int) -> VisionTransformer:
    """Heads of 32 channels, an MLP of twice the width, no class token: what one CPU core can train."""
    torch.manual_seed(seed)
    return VisionTransformer(
        img_size=size, patch_size=4, in_chans=channels, embed_dim=width, depth=depth, num_heads=width // 32,
        mlp_ratio=2, num_classes=classes, embed_layer=ConvStem, class_token=False, global_pool="avg",
    )  # fmt: skip


def build(args: argparse.Namespace, images: data.Images) -> nn.Module:
    channels, size = images.batch(torch.tensor([0])).shape[1:3]
    if args.model == "small":
        return small_vit(len(images.classes), channels, size, args.width, args.depth, args.seed)
    torch.manual_seed(args.seed)
    sized = {"img_size": size} if "vit" in args.model else {}
    options = {"pretrained": args.pretrained, "num_classes": len(images.classes), "in_chans": channels, **sized}
    return timm.create_model(args.model, **options)
