"""Inner models: the small networks that are trained at test time on (key, value).

Attention at one head is a map from queries to values that the keys and values define. TTT replaces
that map by a small network f: one gradient step on ``L(f(key), value)`` turns its learned weights
into *fast weights*, and the output is ``f(query)`` with those. The cost is linear in the tokens.

An inner model has two methods (:class:`InnerModel`): ``init`` makes its weights, ``apply`` runs one
head. The gradient step follows from them: :func:`functional_step` takes ``apply`` through
``torch.func.grad`` and ``vmap``. :class:`SwiGLU` and :class:`MLP` also give that step in closed form,
the one that the fused kernels compute; the tests hold the two equal.

The loss of one head, with y = f(key), summed over its N tokens and the channels (the sign and the
scale are those of "T5 models.py" and "DiT5 models.py" of the official release):

    dot    L = -scale / N * sum(y * v)              dL/dy = -v * scale / N
    mse    L = scale / (2 N) * sum((y - v)^2)       dL/dy = (y - v) * scale / N

Everywhere below ``scale / N`` multiplies the gradient of the weights, *after* the sum over tokens:
``v / N`` on its own falls out of the range of float16.
"""

from __future__ import annotations

import hashlib
import inspect
import pickle
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import grad, vmap

from .errors import ConfigError, MaskError

LOSSES = ("dot", "mse")


@runtime_checkable
class InnerModel(Protocol):
    """What a user writes to bring an inner model. Instances must not change after they are made.

    Two instances of one class whose attributes are equal are taken for the same model.
    """

    def init(
        self,
        heads: int,
        head_dim: int,
        value_dim: int,
        hidden: int,
        *,
        std: float,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        generator: torch.Generator | None = None,
    ) -> dict[str, Tensor]:
        """New weights by name, each with a leading dimension of size ``heads``."""
        ...

    def apply(self, weights: Mapping[str, Tensor], x: Tensor) -> Tensor:
        """One head: x [N, head_dim] -> [N, value_dim]; the weights come without their heads dimension."""
        ...


def _trunc_normal(shapes: Mapping[str, Sequence[int]], std: float, **options: Any) -> dict[str, Tensor]:
    generator = options.pop("generator", None)
    return {
        name: torch.nn.init.trunc_normal_(torch.empty(tuple(shape), **options), std=std, generator=generator)
        for name, shape in shapes.items()
    }


class SwiGLU:
    """``(silu(x w1) * (x w2)) w3``: the inner model of T5 ("T5 models.py").

    Weights: w1, w2 [heads, head_dim, hidden], w3 [heads, hidden, value_dim].
    """

    def init(self, heads, head_dim, value_dim, hidden, *, std, device=None, dtype=None, generator=None):
        into, out = (heads, head_dim, hidden), (heads, hidden, value_dim)
        shapes = {"w1": into, "w2": into, "w3": out}
        return _trunc_normal(shapes, std, device=device, dtype=dtype, generator=generator)

    def apply(self, weights: Mapping[str, Tensor], x: Tensor) -> Tensor:
        """x [..., N, head_dim] -> [..., N, value_dim], the weights' leading dimensions broadcast to x's."""
        return (F.silu(x @ weights["w1"]) * (x @ weights["w2"])) @ weights["w3"]

    def step(self, weights, key, value, *, loss, scale, lr, mask=None) -> dict[str, Tensor]:
        """Closed form of :func:`functional_step`; same arguments and result."""
        key, value = zero_masked(key, mask), zero_masked(value, mask)
        w1, w2, w3 = (weights[name] for name in ("w1", "w2", "w3"))
        gate, up = key @ w1, key @ w2
        sigmoid = torch.sigmoid(gate)
        act = gate * sigmoid
        hidden = act * up
        error = _loss_slope(loss, lambda: hidden @ w3, value)
        d_hidden = error @ w3.mT
        gradients = {
            "w1": key.mT @ (d_hidden * up * sigmoid * (1 + gate * (1 - sigmoid))),
            "w2": key.mT @ (d_hidden * act),
            "w3": hidden.mT @ error,
        }
        return _descend(weights, gradients, lr * scale, token_count(key, mask))


class MLP:
    """``silu(x w1) w2``: the inner model of DiT5 and of T5's first version ("DiT5 models.py").

    Weights: w1 [heads, head_dim, hidden], w2 [heads, hidden, value_dim].
    """

    def init(self, heads, head_dim, value_dim, hidden, *, std, device=None, dtype=None, generator=None):
        shapes = {"w1": (heads, head_dim, hidden), "w2": (heads, hidden, value_dim)}
        return _trunc_normal(shapes, std, device=device, dtype=dtype, generator=generator)

    def apply(self, weights: Mapping[str, Tensor], x: Tensor) -> Tensor:
        """x [..., N, head_dim] -> [..., N, value_dim], the weights' leading dimensions broadcast to x's."""
        return F.silu(x @ weights["w1"]) @ weights["w2"]

    def step(self, weights, key, value, *, loss, scale, lr, mask=None) -> dict[str, Tensor]:
        """Closed form of :func:`functional_step`; same arguments and result."""
        key, value = zero_masked(key, mask), zero_masked(value, mask)
        w1, w2 = weights["w1"], weights["w2"]
        before = key @ w1
        sigmoid = torch.sigmoid(before)
        hidden = before * sigmoid
        error = _loss_slope(loss, lambda: hidden @ w2, value)
        gradients = {
            "w1": key.mT @ ((error @ w2.mT) * sigmoid * (1 + before * (1 - sigmoid))),
            "w2": hidden.mT @ error,
        }
        return _descend(weights, gradients, lr * scale, token_count(key, mask))


# ---- the loss, its gradient step, and masks --------------------------------------------------------


def loss_sum(loss: str, prediction: Tensor, value: Tensor, mask: Tensor | None = None) -> Tensor:
    """The loss of one head without its factor ``scale / N``: prediction, value [N, value_dim], mask [N]."""
    terms = -(prediction * value) if loss == "dot" else 0.5 * (prediction - value).square()
    return (terms if mask is None else terms.masked_fill(~mask[:, None], 0)).sum()


def _loss_slope(loss: str, predict: Callable[[], Tensor], value: Tensor) -> Tensor:
    """d loss_sum / d prediction. Only mse looks at the prediction: dot saves its matmul."""
    return -value if loss == "dot" else predict() - value


def _descend(
    weights: Mapping[str, Tensor], gradients: Mapping[str, Tensor], rate: float | Tensor, tokens: int | Tensor
) -> dict[str, Tensor]:
    """``weights - gradients * rate / tokens``: [heads, ...] - [B, heads, ...]; rate is a number or one a head [heads],
    tokens is N or one N a row."""

    def mean(gradient: Tensor) -> Tensor:
        step = gradient * (rate.view(-1, *[1] * (gradient.ndim - 2)) if isinstance(rate, Tensor) else rate)
        if isinstance(tokens, Tensor):
            return step / tokens.view(-1, *[1] * (gradient.ndim - 1))
        return step / tokens

    return {name: weights[name] - mean(gradients[name]) for name in weights}


def check_mask(mask: Tensor, tokens: Tensor) -> None:
    """Raise MaskError unless ``mask`` is bool [B, N] for ``tokens`` [B, heads, N, channels]."""
    if mask.dtype != torch.bool or mask.ndim != 2:
        raise MaskError(
            f"a TTT site takes a boolean key-padding mask of shape [batch, tokens] (True: takes part), "
            f"got {mask.dtype} of shape {tuple(mask.shape)}"
        )
    if mask.shape[0] != tokens.shape[0] or mask.shape[1] != tokens.shape[2]:
        raise MaskError(
            f"the mask has shape {tuple(mask.shape)} but the tokens it masks are [batch, tokens] = "
            f"{(tokens.shape[0], tokens.shape[2])}"
        )


def zero_masked(x: Tensor, mask: Tensor | None) -> Tensor:
    """x [B, heads, N, channels] with zeros, and no gradient, where mask [B, N] is False.

    A fill, not a product: padding may hold inf or nan.
    """
    return x if mask is None else x.masked_fill(~mask[:, None, :, None], 0)


def token_count(x: Tensor, mask: Tensor | None) -> int | Tensor:
    """N of x [B, heads, N, channels]: an int, or [B] in x's dtype under a mask. At least 1 there, so that
    a row without a token divides to zero and not to nan."""
    return x.shape[2] if mask is None else mask.sum(-1).clamp(min=1).to(x.dtype)


def functional_step(
    inner: InnerModel,
    weights: Mapping[str, Tensor],
    key: Tensor,
    value: Tensor,
    *,
    loss: str,
    scale: float,
    lr: float | Tensor,
    mask: Tensor | None = None,
) -> dict[str, Tensor]:
    """One gradient step of any inner model, for all batch rows and heads: the fast weights.

    weights: each [heads, ...]; key [B, heads, N, head_dim]; value [B, heads, N, value_dim]; lr a number or one
    a head [heads]; mask bool [B, N], True where a token takes part. Returns each weight as [B, heads, ...].
    All in one dtype; nothing is cast here. Differentiable in weights, key, value and a tensor lr.
    """

    def head_loss(weights: dict[str, Tensor], key: Tensor, value: Tensor, mask: Tensor | None = None):
        return loss_sum(loss, inner.apply(weights, key), value, mask)

    tensors = (dict(weights), zero_masked(key, mask), zero_masked(value, mask))
    if mask is None:
        gradients = vmap(vmap(grad(head_loss)), in_dims=(None, 0, 0))(*tensors)
    else:
        over_heads = vmap(grad(head_loss), in_dims=(0, 0, 0, None))
        gradients = vmap(over_heads, in_dims=(None, 0, 0, 0))(*tensors, mask)
    return _descend(weights, gradients, lr * scale, token_count(key, mask))


def functional_apply(inner: InnerModel, fast: Mapping[str, Tensor], query: Tensor) -> Tensor:
    """Run an inner model on its fast weights: query [B, heads, Nq, head_dim] -> [B, heads, Nq, value_dim]."""
    return vmap(vmap(inner.apply))(dict(fast), query)


# ---- names: the operators and the saved recipes speak of an inner model by a string -----------------

INNER: dict[str, Any] = {"swiglu": SwiGLU(), "mlp": MLP()}

# A custom model must be reachable from the string that its graph nodes carry, so it is kept here.
_registered: dict[str, Any] = dict(INNER)
_weight_names: dict[str, tuple[str, ...]] = {"swiglu": ("w1", "w2", "w3"), "mlp": ("w1", "w2")}


def class_name(inner: object) -> str:
    """``module:QualName`` of an inner model's class: what a recipe stores."""
    return f"{type(inner).__module__}:{type(inner).__qualname__}"


def resolve(inner: str | InnerModel) -> Any:
    """The inner model that a config, or an operator's string, means. Raises ConfigError if none."""
    if not isinstance(inner, str):
        return inner
    if inner not in _registered:
        raise ConfigError(
            f"no inner model is called {inner!r}: use one of {sorted(INNER)} or pass an object with the "
            "methods init and apply. (A custom one is known by name only after TTTConfig(inner=...) was made "
            "in this process.)"
        )
    return _registered[inner]


def op_name(inner: str | InnerModel) -> str:
    """The string by which the operators know an inner model; registers a custom one, once validated.

    It carries a hash of the class' source and of the instance: compiled artifacts are cached on disk
    under the operators' arguments, and must not outlive a change of the model. Raises ConfigError.
    """
    if isinstance(inner, str):
        resolve(inner)
        return inner
    for name, builtin in INNER.items():
        if type(inner) is type(builtin):
            return name
    base = name = f"{class_name(inner)}@{_fingerprint(inner)}"
    twins = 1
    # One source can make two classes, by a closure: they must not share a name.
    while name in _registered and type(_registered[name]) is not type(inner):
        twins += 1
        name = f"{base}#{twins}"
    if name not in _registered:
        _weight_names[name] = validate_inner(inner)
        _registered[name] = inner
    return name


def weight_names(inner: str | InnerModel) -> tuple[str, ...]:
    """The names of an inner model's weights, in the order that the operators take them."""
    return _weight_names[op_name(inner)]


def _fingerprint(inner: object) -> str:
    try:
        source = "".join(inspect.getsource(c) for c in type(inner).__mro__ if c.__module__ not in _ROOTS)
    except (OSError, TypeError):  # typed at a prompt: no source to hash, so share nothing
        source = str(id(type(inner)))
    try:
        state = pickle.dumps(getattr(inner, "__dict__", repr(inner)))
    except Exception:
        state = str(id(inner)).encode()
    return hashlib.sha256(source.encode() + state).hexdigest()[:8]


_ROOTS = frozenset({"builtins", "typing", "typing_extensions"})


def validate_inner(inner: InnerModel) -> tuple[str, ...]:
    """Try an inner model on tiny CPU tensors; return its weights' names.

    Raises ConfigError, which names the class, when a method is missing, fails or gives a wrong shape.
    """
    if isinstance(inner, type):
        raise ConfigError(f"inner must be an instance, got the class {inner.__qualname__}: write it with ()")
    what = f"inner model {class_name(inner)}"
    if not isinstance(inner, InnerModel):
        raise ConfigError(f"{what} needs the methods init and apply: see t5fx.inner.InnerModel")
    try:
        # Whatever the caller is in the middle of: its random numbers are not drawn, its modes not obeyed.
        no_autocast = torch.autocast("cpu", enabled=False)
        with torch.random.fork_rng(devices=[]), torch.inference_mode(False), no_autocast:
            return _try(inner, what)
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(f"{what} failed on a tiny example: {type(error).__name__}: {error}") from error


def _try(inner: InnerModel, what: str) -> tuple[str, ...]:
    batch, heads, tokens, dim = 2, 3, 5, 4
    weights = inner.init(heads, dim, dim, 6, std=0.02, device="cpu", dtype=torch.float32)
    if not isinstance(weights, dict) or not weights:
        raise ConfigError(f"{what}: init must return a dict of tensors, got {_describe(weights)}")
    for name, weight in weights.items():
        if not isinstance(weight, Tensor) or weight.ndim == 0 or weight.shape[0] != heads:
            raise ConfigError(
                f"{what}: weight {name!r} must be a tensor with a leading dimension of {heads} heads, got "
                f"{_describe(weight)}"
            )
    key = torch.linspace(-1, 1, batch * heads * tokens * dim, device="cpu").view(batch, heads, tokens, dim)
    one = inner.apply({name: weight[0] for name, weight in weights.items()}, key[0, 0])
    if not isinstance(one, Tensor) or one.shape != (tokens, dim):
        raise ConfigError(
            f"{what}: apply must map [N, head_dim] to [N, value_dim], here to {(tokens, dim)}: got {_describe(one)}"
        )
    fast = functional_step(inner, weights, key, key, loss="mse", scale=1.0, lr=1.0)
    functional_apply(inner, fast, key)
    return tuple(weights)


def _describe(thing: object) -> str:
    return str(tuple(thing.shape)) if isinstance(thing, Tensor) else type(thing).__name__
