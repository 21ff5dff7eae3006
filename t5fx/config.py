"""What a converted attention site becomes: :class:`TTTConfig` and the published presets.

A preset is a plain value: pass it, or change it with ``T5.replace(inner_lr=4.0)``.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from .errors import ConfigError, RecipeError
from .inner import INNER, LOSSES, InnerModel, class_name, op_name, weight_names

# The fast weights are trained on L(y, v), and v reaches them only through dL/dy. Where d2L/(dy dv) is
# zero, no gradient reaches the value projection and the site can't learn it (a finding of ViT3).
_NO_VALUE_GRADIENT = frozenset({"l1", "mae", "l1_loss", "absolute_error", "mean_absolute_error"})


@dataclass(frozen=True)
class TTTConfig:
    """How one softmax attention site is rewritten. Hashable, comparable, JSON-able.

    inner: "swiglu", "mlp", or an object with the two methods of :class:`t5fx.inner.InnerModel`.
    loss: "dot" or "mse", what the inner model is trained on at test time.
    inner_lr: step size of that training.
    learn_inner_lr: make the step size a parameter of the site, one value per head; ``inner_lr`` is where it starts.
    hidden_ratio: width of the inner model over head_dim.
    key_norm, key_norm_eps: standardise the keys over the tokens. Without it, training diverges (T5).
    dwc: side of the depthwise convolution on queries and keys (odd, 3 or more), or None for none.
    init_std: standard deviation of the inner weights' truncated normal start.
    drop_bias: convert sites that add a float bias or mask to the scores (relative positions of Swin, BEiT,
        MaxViT), and leave the bias out; the report says so. Boolean and causal masks are never dropped.

    Raises ConfigError on a value that can't be used.
    """

    inner: str | InnerModel = "swiglu"
    loss: str = "dot"
    inner_lr: float = 1.0
    hidden_ratio: float = 1.0
    key_norm: bool = True
    key_norm_eps: float = 1.0
    dwc: int | None = 3
    init_std: float = 0.02
    drop_bias: bool = False
    learn_inner_lr: bool = False
    #: The string by which the operators know ``inner``.
    inner_name: str = field(init=False, repr=False, compare=False, default="")

    def __post_init__(self) -> None:
        if isinstance(self.inner, str) and self.inner not in INNER:
            raise ConfigError(
                f"inner={self.inner!r} is no inner model: use one of {sorted(INNER)}, or pass an object with "
                "the methods init and apply (t5fx.inner.InnerModel)"
            )
        _check_loss(self.loss)
        for name in ("inner_lr", "hidden_ratio", "key_norm_eps", "init_std"):
            object.__setattr__(self, name, _positive(name, getattr(self, name)))
        for name in ("key_norm", "drop_bias", "learn_inner_lr"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"{name} must be True or False, got {getattr(self, name)!r}")
        if self.dwc is not None and (type(self.dwc) is not int or self.dwc < 3 or self.dwc % 2 == 0):
            raise ConfigError(
                f"dwc must be an odd kernel size of 3 or more, or None for no convolution: got {self.dwc!r}"
            )
        object.__setattr__(self, "inner_name", op_name(self.inner))
        if self.learn_inner_lr and "inner_lr" in weight_names(self.inner_name):
            raise ConfigError(
                f"the inner model {self.inner_name} has a weight 'inner_lr', which is the name of the step size with "
                "learn_inner_lr=True: give the weight another name"
            )

    def __setstate__(self, state: dict[str, Any]) -> None:
        # Unpickled in another process, a custom inner model has yet to be made known to the operators.
        for name, value in state.items():
            object.__setattr__(self, name, value)
        object.__setattr__(self, "inner_name", op_name(self.inner))

    def hidden(self, head_dim: int) -> int:
        """Width of the inner model's hidden layer for heads of this size."""
        return max(1, round(self.hidden_ratio * head_dim))

    def replace(self, **changes: Any) -> TTTConfig:
        """A copy with some fields changed. Raises ConfigError on a field that does not exist."""
        unknown = set(changes) - set(_FIELDS)
        if unknown:
            names = ", ".join(sorted(unknown))
            raise ConfigError(f"TTTConfig has no field {names}; it has {', '.join(_FIELDS)}")
        return dataclasses.replace(self, **changes)

    def to_dict(self) -> dict[str, Any]:
        """JSON-able fields. A custom inner model is written as ``{"custom": "module:QualName"}``."""
        fields = {name: getattr(self, name) for name in _FIELDS}
        if not isinstance(self.inner, str):
            builtin = self.inner_name in INNER
            fields["inner"] = self.inner_name if builtin else {"custom": class_name(self.inner)}
        return fields

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any], *, inner: InnerModel | None = None) -> TTTConfig:
        """Inverse of :meth:`to_dict`. A custom inner model isn't rebuilt from its name: pass it as ``inner``.

        Raises RecipeError on fields that this version does not know, or a custom inner model that is
        missing or of another class than the one written; ConfigError on a value that can't be used.
        """
        values = dict(fields)
        unknown = set(values) - set(_FIELDS)
        if unknown:
            names = ", ".join(sorted(unknown))
            raise RecipeError(
                f"the recipe's config has fields that this version of t5fx does not know ({names}): "
                "load it with the version that wrote it"
            )
        stored = values.get("inner", "swiglu")
        if isinstance(stored, Mapping):
            written = stored.get("custom")
            if not isinstance(written, str):
                raise RecipeError(f'a recipe\'s inner model is a name or {{"custom": "module:Class"}}: got {stored!r}')
            if inner is None:
                raise RecipeError(
                    f"the recipe uses the custom inner model {written}, which can't be rebuilt from its "
                    "name: pass an instance of it as inner="
                )
            # The module may differ: a class moves from __main__ or a notebook into a package.
            if written.split(":")[-1] != type(inner).__qualname__:
                raise RecipeError(f"the recipe uses the inner model {written}, but inner= is a {class_name(inner)}")
            values["inner"] = inner
        elif inner is not None:
            raise RecipeError(f"the recipe uses the built-in inner model {stored!r}: leave inner= away")
        return cls(**values)


_FIELDS = tuple(f.name for f in dataclasses.fields(TTTConfig) if f.init)


def _check_loss(loss: Any) -> None:
    if isinstance(loss, str) and loss.lower() in _NO_VALUE_GRADIENT:
        raise ConfigError(
            f"loss={loss!r} can't train a TTT site: its mixed second derivative d2L/(dy dv) vanishes, so no "
            f"gradient reaches the value projection. Use one of {list(LOSSES)}"
        )
    if loss not in LOSSES:
        raise ConfigError(f"loss={loss!r} is not known: use one of {list(LOSSES)}")


def _positive(name: str, value: Any) -> float:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not number or not math.isfinite(value) or value <= 0:
        raise ConfigError(f"{name} must be a finite number above 0, got {value!r}")
    return float(value)


#: T5 as published for vision transformers and SD3.5.
T5 = TTTConfig()

#: The TTT half of DiT5: a SiLU MLP trained on the squared error.
DIT5_TTT = TTTConfig(inner="mlp", loss="mse")

#: For conversion by :func:`t5fx.calibrate`. Mean relative squared error of the sites after short calibration, one seed
#: each: a small ViT on CIFAR-10 0.250, T5 0.330; a DINOv2 ViT-S/14 0.202, T5 0.245. After longer calibration (CIFAR-10,
#: 400 steps) they are alike: 0.150 and 0.153. docs/results.md has the comparison.
CALIBRATED = TTTConfig(inner="mlp", loss="mse", inner_lr=4.0, learn_inner_lr=True, key_norm_eps=1e-5)
