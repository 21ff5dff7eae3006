"""Optimizer groups for fine-tuning a linearized model."""

from __future__ import annotations

from typing import Any

from torch import nn

from .api import record_of
from .errors import T5fxError
from .weights import TTTWeights


def param_groups(
    model: nn.Module,
    lr: float,
    *,
    new_lr_scale: float = 20.0,
    inherited_lr_scale: float = 1.0,
    weight_decay: float = 0.0,
) -> list[dict[str, Any]]:
    """Groups for a torch optimizer: inherited and new parameters, each with and without weight decay.

    The papers train the new parameters faster than the inherited ones (T5, ICML 2026: 20x).  Biases and parameters
    of one axis (norms, scales) are not decayed, as is usual for vision transformers, nor are those that the model names
    itself (``no_weight_decay()`` of timm: position embeddings, class token).  Frozen parameters are left out.

    Args:
        lr: learning rate of the inherited parameters, before ``inherited_lr_scale``.
        new_lr_scale, inherited_lr_scale: factors on ``lr``; 0 leaves the group's parameters out.
        weight_decay: of the decayed groups.

    Returns:
        Non-empty groups with ``params``, ``lr``, ``weight_decay`` and ``name`` ("inherited", "inherited_no_decay",
        "new", "new_no_decay").

    Raises:
        T5fxError: ``model`` is not linearized, or a number is negative.
    """
    record_of(model)
    for name, number in (("lr", lr), ("new_lr_scale", new_lr_scale), ("inherited_lr_scale", inherited_lr_scale),
                         ("weight_decay", weight_decay)):  # fmt: skip
        if not number >= 0:
            raise T5fxError(f"param_groups: {name} must be a number of at least 0, not {number!r}")
    new = {id(p) for module in model.modules() if isinstance(module, TTTWeights) for p in module.parameters()}
    name_of = {id(p): name for name, p in model.named_parameters()}
    names: Any = getattr(model, "no_weight_decay", None)
    undecayed = set(names()) if callable(names) else set()
    groups: dict[str, dict[str, Any]] = {}
    for parameter in model.parameters():
        if not parameter.requires_grad:
            continue
        kind, scale = ("new", new_lr_scale) if id(parameter) in new else ("inherited", inherited_lr_scale)
        if not scale:
            continue
        decayed = parameter.dim() > 1 and name_of[id(parameter)] not in undecayed
        name = kind if decayed else f"{kind}_no_decay"
        group = {"name": name, "lr": lr * scale, "weight_decay": weight_decay if decayed else 0.0, "params": []}
        groups.setdefault(name, group)["params"].append(parameter)
    return list(groups.values())
