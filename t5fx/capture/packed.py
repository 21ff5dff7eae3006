"""The grid of packed latents: image tokens that the caller lays in a row, and says elsewhere where they lie.

Flux takes ``img_ids``, the coordinates of every token; Qwen-Image takes ``img_shapes``, their height and width.  No
name is looked for: an input whose rows count through a grid in raster order, or a tuple of two or three sizes whose
product is the number of tokens, is the grid of that token axis, and is read again in every call.
"""

from __future__ import annotations

import inspect
import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import keystr, tree_flatten_with_path

Grid = tuple[int, ...]


def named_inputs(model: nn.Module, args: tuple, kwargs: dict[str, Any]) -> dict[str, Any]:
    """The inputs by the names of the forward's parameters, however they were passed."""
    forward = getattr(type(model), "_t5fx_base", type(model)).forward
    try:
        return dict(inspect.signature(forward).bind(model, *args, **kwargs).arguments)
    except TypeError:
        return dict(kwargs)


def grid_of_ids(ids: Tensor, tokens: int) -> Grid | None:
    """(height, width) or (frames, height, width) if the rows of ``ids`` [.., tokens, k] count through such a grid."""
    if ids.dim() not in (2, 3) or ids.shape[-2] != tokens or not 2 <= ids.shape[-1] <= 4 or ids.device.type == "meta":
        return None
    rows = ids.detach().reshape(-1, *ids.shape[-2:])[0].to("cpu", torch.float64)
    columns = [c - c[0] for c in rows.unbind(-1)]
    columns = [c for c in columns if c.any()]
    if not columns or len(columns) > 3:
        return None
    sizes = []
    for column in columns:
        step = column[column > 0].min() if (column > 0).any() else None
        if step is None or (column < 0).any():
            return None
        sizes.append(int((column.max() / step).round()) + 1)
    if math.prod(sizes) != tokens:
        return None
    axes = [torch.arange(n, dtype=torch.float64) for n in sizes]
    wanted = torch.stack([g.flatten() for g in torch.meshgrid(*axes, indexing="ij")])
    steps = torch.stack([c / c[c > 0].min() for c in columns])
    if not torch.allclose(steps, wanted):
        return None
    return tuple(sizes) if len(sizes) > 1 else (1, sizes[0])


def _tuples(tree: Any, path: str) -> list[tuple[str, Grid]]:
    """All tuples of two or three whole numbers in nested lists and tuples, with the way to them."""
    if not isinstance(tree, (list, tuple)):
        return []
    if len(tree) in (2, 3) and all(isinstance(n, int) and not isinstance(n, bool) for n in tree):
        return [(path, tuple(tree))]
    return [found for i, part in enumerate(tree) for found in _tuples(part, f"{path}[{i}]")]


def find(model: nn.Module, args: tuple, kwargs: dict[str, Any], tokens: int) -> tuple[str, Grid] | None:
    """The input that says how ``tokens`` tokens lie, as (path to it, grid); :func:`read` reads it again."""
    inputs = named_inputs(model, args, kwargs)
    for path, leaf in tree_flatten_with_path(inputs)[0]:
        if isinstance(leaf, Tensor):
            grid = grid_of_ids(leaf, tokens)
            if grid is not None:
                return keystr(path), grid
    for name, value in inputs.items():
        for way, sizes in _tuples(value, f"['{name}']"):
            if math.prod(sizes) == tokens:
                return way, sizes[1:] if len(sizes) == 3 and sizes[0] == 1 else sizes
    return None


def read(model: nn.Module, args: tuple, kwargs: dict[str, Any], path: str) -> Grid | None:
    """What the input at ``path`` says in this call; None if there is none, or it is no grid."""
    inputs = named_inputs(model, args, kwargs)
    for where, leaf in tree_flatten_with_path(inputs)[0]:
        if isinstance(leaf, Tensor) and keystr(where) == path:
            return grid_of_ids(leaf, leaf.shape[-2])
    for name, value in inputs.items():
        for way, sizes in _tuples(value, f"['{name}']"):
            if way == path:
                return sizes[1:] if len(sizes) == 3 and sizes[0] == 1 else sizes
    return None
