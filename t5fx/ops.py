"""The TTT operators, written plainly: the one reference that every kernel and every rewritten graph meets.

A converted attention site is four operators in this order (T5, ICML 2026; shapes below):

    key = t5fx::key_norm(key, eps)                              standardise the keys over the tokens
    query, key = t5fx::dwc(query, ...), t5fx::dwc(key, ...)     let neighbours on the grid see each other
    fast = t5fx::inner_step(key, value, weights, ...)           one gradient step of the inner model
    output = t5fx::inner_apply(query, fast, inner)              run it

They are CompositeImplicitAutograd: plain PyTorch in eager, one node each under Dynamo and
torch.export, and aten operators under any backend that does not know them. :func:`ttt_attention`
composes the four.

Shapes: query [B, H, Nq, D], key [B, H, N, D], value [B, H, N, Dv], each weight [H, ...], each fast
weight [B, H, ...], output [B, H, Nq, Dv]; mask bool [B, N], True where a token takes part.

Dtypes: float16 and bfloat16 inputs are computed in float32 inside key_norm, inner_step and
inner_apply, and inputs of different dtypes are promoted. key_norm and dwc return the dtype of what
they are given; fast weights are float32 (float64 if anything is); the output has the query's dtype, or
that of autocast where it is on, as F.scaled_dot_product_attention does. Autocast is off inside, so
that it can't round the sums over tokens.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import guard_or_false, statically_known_true

from .config import TTTConfig
from .errors import CaptureError, ConfigError, LayoutError
from .inner import (
    INNER,
    LOSSES,
    check_mask,
    functional_apply,
    functional_step,
    resolve,
    weight_names,
    zero_masked,
)

_CONVOLUTIONS = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}


def key_norm(key: Tensor, eps: float, mask: Tensor | None = None) -> Tensor:
    """``(key - mean) / sqrt(var + eps)`` over the tokens, biased variance, per row, head and channel.

    key [B, H, N, D]; returns the same shape and dtype, zeros at masked tokens. Raises MaskError.
    """
    with _no_autocast(key):
        x = key.to(compute_dtype(key))
        if mask is None:
            var, mean = torch.var_mean(x, dim=2, correction=0, keepdim=True)
            centred = x - mean
        else:
            check_mask(mask, key)
            x, tokens = zero_masked(x, mask), mask.sum(-1).clamp(min=1).to(x.dtype)[:, None, None, None]
            centred = zero_masked(x - x.sum(2, keepdim=True) / tokens, mask)
            var = centred.square().sum(2, keepdim=True) / tokens
        return (centred * torch.rsqrt(var + eps)).to(key.dtype)


def dwc(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    prefix: int,
    grid: Sequence[int],
    mask: Tensor | None = None,
) -> Tensor:
    """``x + DWC(x)`` on the tokens of a grid; the others pass through (DWC-QK of T5).

    x [B, H, N, D]. The grid, (h, w) or (t, h, w), is tokens [prefix, prefix + prod(grid)) in row-major
    order. weight [H*D, 1, 3, 3] (or [H*D, 1, 3, 3, 3]; any odd sides), bias [H*D], channels ordered (head,
    channel); zero padding. Masked tokens count as zeros, like the border. Returns x's shape and dtype.
    Raises LayoutError when the grid does not fit, ConfigError when the weight does not, MaskError.
    """
    batch, heads, tokens, dim = x.shape
    grid = list(grid)
    cells = math.prod(grid)
    if len(grid) not in _CONVOLUTIONS:
        raise LayoutError(f"a token grid has one to three axes, got {grid}")
    if guard_or_false(prefix < 0) or guard_or_false(prefix + cells > tokens):
        shape = " x ".join(map(str, grid))
        raise LayoutError(f"a grid of {shape} tokens after a prefix of {prefix} does not fit {tokens} tokens")
    channels = heads * dim
    if weight.ndim != len(grid) + 2 or weight.shape[0] != channels or weight.shape[1] != 1:
        raise ConfigError(
            f"a depthwise convolution over a {len(grid)}-axis grid with {heads} heads of {dim} channels "
            f"needs a weight [{channels}, 1{', k' * len(grid)}], got {list(weight.shape)}"
        )
    with _no_autocast(x):
        if mask is not None:
            check_mask(mask, x)
            x = zero_masked(x, mask)
        middle = x.narrow(2, prefix, cells).transpose(1, 2)  # [B, cells, H, D]: channels last
        image = middle.reshape(batch, *grid, channels).movedim(-1, 1)
        padding = [side // 2 for side in weight.shape[2:]]
        bias = None if bias is None else bias.to(x.dtype)
        moved = _CONVOLUTIONS[len(grid)](image, weight.to(x.dtype), bias, padding=padding, groups=channels)
        moved = moved.movedim(1, -1).reshape(batch, cells, heads, dim)
        inside = (middle + moved).transpose(1, 2)
        # Only what is known without asking: a guard here would specialise a dynamic number of tokens.
        if statically_known_true(prefix == 0) and statically_known_true(cells == tokens):
            return inside
        end = prefix + cells
        return torch.cat([x.narrow(2, 0, prefix), inside, x.narrow(2, end, tokens - end)], dim=2)


def inner_step(
    key: Tensor,
    value: Tensor,
    weights: Sequence[Tensor],
    inner: str,
    loss: str,
    scale: float,
    lr: float,
    mask: Tensor | None = None,
    head_lr: Tensor | None = None,
) -> list[Tensor]:
    """The fast weights: ``w - lr * head_lr[h] * dL/dw`` for each row and head, in the order of ``weights``.

    inner is "swiglu", "mlp" or the ``inner_name`` of a TTTConfig; the loss is in :mod:`t5fx.inner`. head_lr [H] is a
    factor on ``lr`` for each head, None for 1. Differentiable in key, value, weights and head_lr. Raises ConfigError,
    MaskError.
    """
    model, named = resolve(inner), _by_name(inner, weights)
    if loss not in LOSSES:
        raise ConfigError(f"loss={loss!r} is not known: use one of {list(LOSSES)}")
    for name, weight in named.items():
        if weight.shape[0] != key.shape[1]:
            raise ConfigError(f"inner weight {name!r} has {weight.shape[0]} heads, key has {key.shape[1]}")
    if head_lr is not None and (head_lr.ndim != 1 or head_lr.shape[0] != key.shape[1]):
        raise ConfigError(f"head_lr must be one number a head, [{key.shape[1]}]: got {list(head_lr.shape)}")
    if mask is not None:
        check_mask(mask, key)
    with _no_autocast(key):
        dtype = compute_dtype(key, value, *weights, *([] if head_lr is None else [head_lr]))
        named = {name: weight.to(dtype) for name, weight in named.items()}
        if inner not in INNER:
            _check_transforms(inner)
        step = model.step if inner in INNER else partial(functional_step, model)
        rate = lr if head_lr is None else head_lr.to(dtype) * lr
        fast = step(named, key.to(dtype), value.to(dtype), loss=loss, scale=scale, lr=rate, mask=mask)
        return [fast[name] for name in named]


def inner_apply(query: Tensor, weights: Sequence[Tensor], inner: str) -> Tensor:
    """The inner model with its fast weights [B, H, ...], run on query [B, H, Nq, D] -> [B, H, Nq, Dv].

    Raises ConfigError.
    """
    model, named, result = resolve(inner), _by_name(inner, weights), _output_dtype(query)
    with _no_autocast(query):
        dtype = compute_dtype(query, *weights)
        named = {name: weight.to(dtype) for name, weight in named.items()}
        x = query.to(dtype)
        if inner in INNER:  # they broadcast over the leading dimensions: no need for vmap
            return model.apply(named, x).to(result)
        _check_transforms(inner)
        return functional_apply(model, named, x).to(result)


def ttt_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    params: Mapping[str, Tensor],
    config: TTTConfig,
    *,
    prefix: int = 0,
    grid: Sequence[int] | None = None,
    scale: float | None = None,
    mask: Tensor | None = None,
) -> Tensor:
    """What a converted site computes in place of ``F.scaled_dot_product_attention(query, key, value)``.

    params: the inner model's weights by name; unless ``config.dwc`` is None, "dwc_q.weight", "dwc_q.bias",
    "dwc_k.weight", "dwc_k.bias" (a bias may be left away); with ``config.learn_inner_lr``, "inner_lr" [H], which
    takes the place of ``config.inner_lr``. ``scale`` is D^-1/2 by default.
    The mask is for the keys, and for the queries where there are as many (self-attention). Raises
    LayoutError when a convolution has no grid, ConfigError when a parameter is missing, MaskError.
    """
    op = torch.ops.t5fx
    names = weight_names(config.inner_name)
    wanted = [*names, *(["dwc_q.weight", "dwc_k.weight"] if config.dwc is not None else [])]
    wanted += ["inner_lr"] if config.learn_inner_lr else []
    missing = [name for name in wanted if name not in params]
    if missing:
        raise ConfigError(f"ttt_attention needs the parameters {', '.join(missing)}; it got {list(params)}")
    if scale is None:
        scale = query.shape[-1] ** -0.5
    if config.key_norm:
        key = op.key_norm.default(key, config.key_norm_eps, mask)
    if config.dwc is not None:
        if grid is None:
            raise LayoutError(
                f"config.dwc={config.dwc} needs the token grid: pass grid=(h, w), or a config with dwc=None"
            )
        query_mask = mask if query.shape[2] == key.shape[2] else None
        query_bias, key_bias = params.get("dwc_q.bias"), params.get("dwc_k.bias")
        query = op.dwc.default(query, params["dwc_q.weight"], query_bias, prefix, grid, query_mask)
        key = op.dwc.default(key, params["dwc_k.weight"], key_bias, prefix, grid, mask)
    weights = [params[name] for name in names]
    inner = config.inner_name
    lr, head_lr = (1.0, params["inner_lr"]) if config.learn_inner_lr else (config.inner_lr, None)
    fast = op.inner_step.default(key, value, weights, inner, config.loss, scale, lr, mask, head_lr)
    return op.inner_apply.default(query, fast, inner)


def _by_name(inner: str, weights: Sequence[Tensor]) -> dict[str, Tensor]:
    names = weight_names(inner)
    if len(weights) != len(names):
        raise ConfigError(f"inner model {inner} has the weights {list(names)}: got {len(weights)} tensors")
    return dict(zip(names, weights, strict=True))


def _check_transforms(inner: str) -> None:
    # Below autograd torch.func's transforms are switched off, and grad would silently return zeros.
    transforms = torch._C.DispatchKey.FuncTorchDynamicLayerFrontMode
    if torch._C._dispatch_tls_is_dispatch_key_excluded(transforms):
        raise CaptureError(
            f"the custom inner model {inner} can't be decomposed here: its step is derived by torch.func, "
            "which does not work below autograd. ExportedProgram.run_decompositions does this: compile the "
            "module instead, or use a built-in inner model. A dispatch mode under torch.inference_mode does "
            "it too: use torch.no_grad there"
        )


def compute_dtype(*tensors: Tensor) -> torch.dtype:
    """What the operators compute in: float32, or float64 where a tensor is."""
    dtype = torch.float32
    for tensor in tensors:
        dtype = torch.promote_types(dtype, tensor.dtype)
    return dtype


def _autocast_on(x: Tensor) -> bool:
    # The meta device has no autocast, and asking about it is an error.
    device = x.device.type
    return torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)


def _no_autocast(x: Tensor) -> AbstractContextManager:
    return torch.autocast(x.device.type, enabled=False) if _autocast_on(x) else contextlib.nullcontext()


def _output_dtype(query: Tensor) -> torch.dtype:
    # Autocast leaves float64 alone.
    if query.dtype == torch.float64 or not _autocast_on(query):
        return query.dtype
    return torch.get_autocast_dtype(query.device.type)


_SCHEMAS = {
    "key_norm(Tensor key, float eps, Tensor? mask=None) -> Tensor": key_norm,
    "dwc(Tensor x, Tensor weight, Tensor? bias, SymInt prefix, SymInt[] grid, Tensor? mask=None) -> Tensor": dwc,
    "inner_step(Tensor key, Tensor value, Tensor[] weights, str inner, str loss, float scale, float lr, "
    "Tensor? mask=None, Tensor? head_lr=None) -> Tensor[]": inner_step,
    "inner_apply(Tensor query, Tensor[] weights, str inner) -> Tensor": inner_apply,
}

# The definitions live as long as this object does.
_library = torch.library.Library("t5fx", "FRAGMENT")
for _schema, _function in _SCHEMAS.items():
    _library.define(_schema, tags=(torch.Tag.pt2_compliant_tag,))
    _library.impl(_schema.split("(")[0], _function, "CompositeImplicitAutograd")
