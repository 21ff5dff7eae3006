"""The Frechet distance of two sets of Fashion-MNIST pictures, on the features of a small classifier.

The usual distance (Heusel et al., 2017) takes the features of an Inception network trained on ImageNet.  These are of
a classifier trained on the pictures themselves: the numbers compare with each other, not with published ones.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Classifier(nn.Module):
    """A small convolutional classifier; ``features`` are its 64 pooled channels."""

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for channels, width, stride in ((1, 32, 1), (32, 64, 2), (64, 128, 2), (128, 64, 2)):
            layers += [nn.Conv2d(channels, width, 3, stride, 1), nn.GroupNorm(8, width), nn.ReLU()]
        self.body, self.head = nn.Sequential(*layers), nn.Linear(64, 10)

    def features(self, images: Tensor) -> Tensor:
        """[B, 1, 32, 32] -> [B, 64]."""
        return self.body(images).mean((2, 3))

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.features(images))

    @torch.no_grad()
    def describe(self, images: Tensor) -> Tensor:
        """Features of many images, in small batches, on the CPU."""
        device = self.head.weight.device
        return torch.cat([self.features(some.to(device)).cpu() for some in images.split(500)])

    @torch.no_grad()
    def right(self, features: Tensor, labels: Tensor) -> float:
        """How many of the pictures with these features are taken for what they should be, in %."""
        return 100 * float((self.head(features.to(self.head.weight.device)).argmax(1).cpu() == labels).float().mean())


def distance(a: Tensor, b: Tensor) -> float:
    """Of the two Gaussians fitted to features [N, D] and [M, D], in float64."""
    a, b = a.double(), b.double()
    mean, cov_a, cov_b = a.mean(0) - b.mean(0), a.T.cov(), b.T.cov()
    values, vectors = torch.linalg.eigh(cov_a)
    root = vectors * values.clamp(min=0).sqrt() @ vectors.T
    cross = torch.linalg.eigvalsh(root @ cov_b @ root).clamp(min=0).sqrt().sum()
    return float(mean.square().sum() + cov_a.trace() + cov_b.trace() - 2 * cross)
