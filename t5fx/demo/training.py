"""The demo's stages: train with softmax, convert copies, calibrate them, fine-tune them beside a control."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

import t5fx

from .digits import Digits, accuracy, augment

LEARNING_RATE, WEIGHT_DECAY, BATCH = 4e-3, 0.05, 128
FINE_TUNE_RATE, FINE_TUNE_BATCH = 5e-4, 32
#: Share of the training epochs that fine-tuning gets.
FINE_TUNE_SHARE = 0.1
#: Steps of calibration, of ``BATCH`` unlabelled images each: about as many images as fine-tuning sees.
CALIBRATE_STEPS = 150
#: New parameters are calibrated already when fine-tuning begins: twice the rate is enough. The papers' 20x did as well.
NEW_RATE_SCALE = 2.0
#: Weight of the distance to the softmax model's features in the loss of fine-tuning. With labels alone, or with soft
#: labels, the converted models fit the training images as well but lose about a point on the test images.
FEATURE_WEIGHT = 5.0

Tick = Callable[[], None]


@dataclass
class Stage:
    """One model of the comparison. Accuracies are in % of the test images; curves hold (epoch, accuracy)."""

    name: str
    model: VisionTransformer
    converted: int
    sites: int
    new_parameters: int
    at_once: float
    calibrated: float | None = None  # None for softmax
    tuned: float = math.nan
    curve: list[tuple[int, float]] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        plain = {k: v for k, v in vars(self).items() if k != "model"}
        return {**plain, "curve": [list(point) for point in self.curve]}


def fit(
    model: VisionTransformer,
    data: Digits,
    groups: Sequence[dict[str, Any]],
    *,
    epochs: int,
    batch: int,
    warm_up: float,
    seed: int,
    tick: Tick,
    teacher: VisionTransformer | None = None,
) -> list[tuple[int, float]]:
    """Train with AdamW, linear warm-up and cosine decay; returns the test accuracy after every epoch.

    groups: optimizer groups with an ``lr`` each. teacher: a model whose grid tokens after the last
    block (mean squared distance over their variance) are a target beside the labels.
    """
    optimizer = torch.optim.AdamW(groups, fused=True)
    peaks = [group["lr"] for group in optimizer.param_groups]
    generator = torch.Generator().manual_seed(seed)
    count = len(data.train_images)
    steps = count // batch
    curve = []
    for epoch in range(epochs):
        model.train()
        order = torch.randperm(count, generator=generator)
        for step in range(steps):
            done = (epoch * steps + step + 1) / (epochs * steps)
            for group, peak in zip(optimizer.param_groups, peaks, strict=True):
                group["lr"] = peak * schedule(done, warm_up)
            chosen = order[step * batch : (step + 1) * batch]
            images = augment(data.train_images[chosen], data.background, generator)
            features = model.forward_features(images)
            output = model.forward_head(features)
            loss = F.cross_entropy(output, data.train_labels[chosen], label_smoothing=0.1)
            if teacher is not None:
                with torch.no_grad():
                    wanted = teacher.forward_features(images)[:, 1:]
                loss = loss + FEATURE_WEIGHT * F.mse_loss(features[:, 1:], wanted) / wanted.var()
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        curve.append((epoch + 1, accuracy(model, data)))
        tick()
    model.eval()
    return curve


def schedule(done: float, warm_up: float) -> float:
    """Factor on the learning rate when the share ``done`` of all steps is reached."""
    if done <= warm_up:
        return done / warm_up
    return 0.5 + 0.5 * math.cos(math.pi * (done - warm_up) / (1 - warm_up))


def train_softmax(
    model: VisionTransformer, data: Digits, *, epochs: int, seed: int, tick: Tick
) -> list[tuple[int, float]]:
    """Train the softmax model from its initial weights; returns the test accuracy after every epoch."""
    groups = softmax_groups(model, LEARNING_RATE)
    return fit(model, data, groups, epochs=epochs, batch=BATCH, warm_up=0.1, seed=seed, tick=tick)


def softmax_groups(model: nn.Module, lr: float) -> list[dict[str, Any]]:
    """Optimizer groups of an unconverted model; as :func:`t5fx.param_groups`, biases and norms are not decayed."""
    decayed = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() <= 1]
    return [
        {"params": decayed, "lr": lr, "weight_decay": WEIGHT_DECAY},
        {"params": others, "lr": lr, "weight_decay": 0.0},
    ]


def convert(softmax: VisionTransformer, data: Digits, seed: int) -> list[Stage]:
    """The three that are compared: the softmax model itself (the control), and copies converted by half and wholly."""
    base = sum(p.numel() for p in softmax.parameters())
    stages = []
    for name, select in (("softmax", None), ("half converted", t5fx.every_other), ("all converted", t5fx.everything)):
        model = copy.deepcopy(softmax)
        sites = len(t5fx.inspect(model))
        converted = 0
        if select is not None:
            torch.manual_seed(seed)
            t5fx.linearize(model, select)
            converted = len(t5fx.report(model).selected)
        new = sum(p.numel() for p in model.parameters()) - base
        stages.append(Stage(name, model, converted, sites, new, accuracy(model, data)))
    return stages


def calibrate(stage: Stage, data: Digits, *, steps: int, seed: int, tick: Tick) -> None:
    """Teach the new weights of a converted stage what softmax attention gave; no labels, inherited weights stay."""
    generator = torch.Generator().manual_seed(seed + 2)

    def batches() -> Iterator[Tensor]:
        while True:
            chosen = torch.randint(len(data.train_images), (BATCH,), generator=generator)
            tick()
            yield augment(data.train_images[chosen], data.background, generator)

    t5fx.calibrate(stage.model, batches(), steps=steps, progress=False)
    stage.calibrated = accuracy(stage.model, data)


def fine_tune(stage: Stage, softmax: VisionTransformer, data: Digits, *, epochs: int, seed: int, tick: Tick) -> None:
    """Train a stage on for ``epochs``, with the same recipe for the converted models and the control."""
    if stage.converted:
        groups = t5fx.param_groups(stage.model, FINE_TUNE_RATE, new_lr_scale=NEW_RATE_SCALE, weight_decay=WEIGHT_DECAY)
    else:
        groups = softmax_groups(stage.model, FINE_TUNE_RATE)
    curve = fit(
        stage.model,
        data,
        groups,
        epochs=epochs,
        batch=FINE_TUNE_BATCH,
        warm_up=0.2,
        seed=seed + 1,
        tick=tick,
        teacher=softmax,
    )
    stage.curve = [(0, stage.at_once if stage.calibrated is None else stage.calibrated), *curve]
    stage.tuned = curve[-1][1]
