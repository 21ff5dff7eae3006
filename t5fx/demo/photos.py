"""Real weights on real photos: what the patch features look like before and after, as colours.

The model is a ViT-S/14 of the DINOv2 architecture. Its features are projected to the three principal components of
the *softmax* model's features, the same projection for every model, and shown as red, green and blue.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import timm
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from sklearn.datasets import load_sample_images
from torch import Tensor

import t5fx

from .costs import MODEL, PATCH

SIZE = 518
MEAN, DEVIATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
SELECTORS = {"softmax": None, "half converted": t5fx.every_other, "all converted": t5fx.everything}


@dataclass(frozen=True)
class Photo:
    """One photo [H, W, 3] uint8; of each model a picture [h, w, 3] uint8 and the cosine similarity to softmax."""

    name: str
    image: np.ndarray
    pictures: Mapping[str, np.ndarray]
    cosines: Mapping[str, float]


def find_weights(given: Path | None) -> Path | None:
    """The weights file: the one given, else the first of the model's name in ``../shared/weights``, else None."""
    if given is not None:
        return given if given.is_file() else None
    folder = Path(t5fx.__file__).resolve().parents[2] / "shared" / "weights"
    return next(iter(sorted(folder.glob(f"{MODEL}*.safetensors"))), None)


def look(weights: Path, seed: int, tick: Callable[[], None] = lambda: None) -> list[Photo]:
    """Features of scikit-learn's two photos from the softmax model and from the converted ones, not fine-tuned.

    Raises:
        RuntimeError: the file holds another model's weights.
    """
    bunch = load_sample_images()
    names = [Path(name).stem for name in bunch.filenames]
    batch = torch.stack([prepare(image) for image in bunch.images])
    base = timm.create_model(MODEL, pretrained=False, num_classes=0, img_size=SIZE).eval()
    base.load_state_dict({key: tensor.float() for key, tensor in load_file(weights).items()}, strict=True)
    features = {}
    for name, select in SELECTORS.items():
        model = base
        if select is not None:
            torch.manual_seed(seed)
            model = t5fx.linearize(copy.deepcopy(base), select)
        features[name] = patch_features(model, batch)
        tick()
    grid = SIZE // PATCH
    pictures = pca_pictures(features, "softmax", (grid, grid))
    photos = []
    for index, (name, image) in enumerate(zip(names, bunch.images, strict=True)):
        cosines = {
            which: F.cosine_similarity(tokens[index], features["softmax"][index], dim=-1).mean().item()
            for which, tokens in features.items()
        }
        photos.append(Photo(name, image, {which: p[index] for which, p in pictures.items()}, cosines))
    return photos


def prepare(image: np.ndarray) -> Tensor:
    """[H, W, 3] uint8 -> [3, 518, 518], standardised with ImageNet's mean and deviation."""
    pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1)[None].float() / 255
    pixels = F.interpolate(pixels, (SIZE, SIZE), mode="bicubic", antialias=True)[0].clamp(0, 1)
    return (pixels - torch.tensor(MEAN)[:, None, None]) / torch.tensor(DEVIATION)[:, None, None]


@torch.no_grad()
def patch_features(model: torch.nn.Module, batch: Tensor) -> Tensor:
    """Tokens [B, h*w, C] of the last block after the norm, without the class token."""
    return torch.cat([model.forward_features(image[None])[:, 1:] for image in batch])  # type: ignore[operator]


def pca_pictures(features: Mapping[str, Tensor], reference: str, grid: tuple[int, int]) -> dict[str, np.ndarray]:
    """Features [B, h*w, C] as pictures [B, h, w, 3], uint8.

    Principal components, and the range of each colour (1st to 99th percentile), are those of ``reference`` over its
    whole batch, so that equal colours mean equal features in all pictures.
    """
    base = features[reference].flatten(0, 1).double()
    mean = base.mean(0)
    _, _, components = torch.linalg.svd(base - mean, full_matrices=False)
    components = components[:3]
    # The sign of a component is arbitrary; fixing it keeps the colours the same on every machine.
    largest = components.gather(1, components.abs().argmax(1, keepdim=True))
    components = components * largest.sign()
    projected = (base - mean) @ components.T
    low, high = projected.quantile(0.01, 0), projected.quantile(0.99, 0)
    pictures = {}
    for name, tokens in features.items():
        colours = ((tokens.double() - mean) @ components.T - low) / (high - low).clamp(min=1e-12)
        shaped = colours.clamp(0, 1).mul(255).round().to(torch.uint8)
        pictures[name] = shaped.reshape(len(tokens), *grid, 3).numpy()
    return pictures
