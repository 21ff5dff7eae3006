"""A loss that pulls a converted model towards the softmax model it came from."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from .errors import ConfigError

Features = Tensor | Sequence[Tensor]


def distill_loss(
    student: Tensor | None = None,
    teacher: Tensor | None = None,
    *,
    temperature: float = 1.0,
    features: tuple[Features, Features] | None = None,
    feature_weight: float = 1.0,
) -> Tensor:
    """How far a student is from its teacher, in logits, in features, or in both; a float32 (float64) scalar.

    For logits, T^2 times the Kullback-Leibler divergence of the student's softmax from the teacher's at temperature T
    (Hinton, Vinyals and Dean, "Distilling the Knowledge in a Neural Network", 2015), mean over all but the last axis.
    For features, ``feature_weight`` times the mean squared difference over the variance of the teacher's, mean over the
    pairs: 1 is as bad as a constant.  No gradient flows to the teacher's side.

    Args:
        student, teacher: logits [..., classes], or both None.
        temperature: above 0.
        features: (student's, teacher's), each a tensor or a sequence of tensors; pairs have equal shapes.

    Raises:
        ConfigError: there is nothing to compare, or shapes or numbers do not fit.
    """
    if (student is None) != (teacher is None) or (student is None and features is None):
        raise ConfigError("distill_loss compares logits (student, teacher), features=(student's, teacher's), or both")
    if not temperature > 0 or not feature_weight >= 0:
        raise ConfigError(f"distill_loss: temperature {temperature!r} must be above 0, feature_weight at least 0")
    losses = []
    if student is not None and teacher is not None:
        _same("logits", student, teacher)
        mine, theirs = (F.log_softmax(_float(x) / temperature, dim=-1) for x in (student, teacher.detach()))
        divergence = F.kl_div(mine, theirs, reduction="none", log_target=True).sum(-1).mean()
        losses.append(divergence * temperature**2)
    if features is not None:
        mine_all, theirs_all = ([x] if isinstance(x, Tensor) else list(x) for x in features)
        if len(mine_all) != len(theirs_all) or not mine_all:
            raise ConfigError(
                f"distill_loss: {len(mine_all)} features of the student, {len(theirs_all)} of the teacher"
            )
        losses.append(
            feature_weight * torch.stack([_relative(*p) for p in zip(mine_all, theirs_all, strict=True)]).mean()
        )
    return torch.stack(losses).sum()


def _relative(student: Tensor, teacher: Tensor) -> Tensor:
    _same("features", student, teacher)
    mine, theirs = _float(student), _float(teacher.detach())
    variance = theirs.var(correction=0).clamp(min=torch.finfo(theirs.dtype).tiny)
    return (mine - theirs).square().mean() / variance


def _float(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _same(what: str, student: Tensor, teacher: Tensor) -> None:
    if student.shape != teacher.shape:
        raise ConfigError(
            f"distill_loss: the student's {what} are {list(student.shape)}, the teacher's {list(teacher.shape)}"
        )
