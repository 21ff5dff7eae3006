"""Run a linearized model as the softmax model it was, and see at each converted site how far TTT is from it.

Inside :class:`Transfer` every converted owner runs its original forward, and that output is what flows on.  Beside it
the owner runs once more for each of its sites, on the same inputs, with that one site converted; the relative error of
this second output goes to a callback, with a gradient to the site's new weights.  So every site sees the inputs that
it would see in the softmax model, and one forward pass serves all sites.

The callback runs while the site's activations are alive and they go when it returns: memory is that of one site.
"""

from __future__ import annotations

import contextlib
import copy
import math
import types
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

from .capture.dryrun import clear_fake_caches, new_fake_mode, to_fake
from .capture.owner import Conversion, base_class, rewrite_owner, trace_graph
from .converted import ConvertedSite, by_owner
from .errors import CaptureError

OnSite = Callable[[ConvertedSite, Tensor, list[nn.Parameter]], None]
_MISSING: Any = object()


class Transfer(contextlib.AbstractContextManager):
    """Install the two runs in the owners of ``sites``; leaving takes them out again, whatever happened.

    on_site: called with a site, its relative error (a float32 or float64 scalar; see :func:`relative_error`) and the
    parameters of the site's new weights as they are at that moment, which the error depends on.
    """

    def __init__(self, sites: Sequence[ConvertedSite], on_site: OnSite) -> None:
        self._owners = [_Owner(group, self) for group in by_owner(sites)]
        self.on_site = on_site
        self.beside = False  # within the second run of an owner
        self._kept: list[tuple[nn.Module, str, Any]] = []

    def __enter__(self) -> Transfer:
        for owner in self._owners:
            module = owner.module
            # accelerate's hooks replace forward on the instance and call what was there under another name.
            name = "_old_forward" if "_old_forward" in module.__dict__ else "forward"
            self._kept.append((module, name, module.__dict__.get(name, _MISSING)))
            module.__dict__[name] = types.MethodType(owner, module)
        return self

    def __exit__(self, *raised: Any) -> None:
        for module, name, before in self._kept:
            if before is _MISSING:
                module.__dict__.pop(name, None)
            else:
                module.__dict__[name] = before
        self._kept.clear()


class _Owner:
    """Stands in for an owner's forward."""

    def __init__(self, sites: Sequence[ConvertedSite], transfer: Transfer) -> None:
        self.module, self.sites, self.transfer = sites[0].owner, sites, transfer
        self._runs: dict[str, Callable[..., Any]] = {}
        self._original: fx.GraphModule | None = None

    def __call__(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if self.transfer.beside:  # another owner around this one runs for its own site
            return self._softmax(args, kwargs)
        with torch.no_grad():
            wanted = self._softmax(args, kwargs)
        inputs = tree_map(lambda x: x.detach() if isinstance(x, Tensor) else x, (args, kwargs))
        for site in self.sites:
            self.transfer.beside = True
            try:
                with torch.enable_grad(), WatchSteps() as seen:
                    got = self._alone(site, *inputs)
                    error = relative_error(got, wanted, next((step.mask for step in seen.steps), None), seen.grid)
                    self.transfer.on_site(site, error, list(site.weights.parameters()))
            finally:
                self.transfer.beside = False
        return wanted

    def _softmax(self, args: tuple, kwargs: dict[str, Any]) -> Any:
        if isinstance(self.module, fx.GraphModule):
            return self._graph()(*args, **kwargs)
        return base_class(self.module).forward(self.module, *args, **kwargs)

    def _graph(self) -> fx.GraphModule:
        assert isinstance(self.module, fx.GraphModule)
        if self._original is None:
            graph = self.sites[0].conversion.original_graph
            if graph is None:
                raise CaptureError(
                    "an unpickled GraphModule does not remember its original graph: calibrate a live one"
                )
            self._original = fx.GraphModule(self.module, copy.deepcopy(graph))
        return self._original

    def _alone(self, site: ConvertedSite, args: tuple, kwargs: dict[str, Any]) -> Any:
        """The owner's output with this one of its sites converted."""
        conversion = site.conversion
        if len(conversion.sites) == 1:
            return type(self.module).forward(self.module, *args, **kwargs)
        if site.name not in self._runs:
            only = Conversion(conversion.name, (site.spec,), conversion.attention_calls, processor=conversion.processor)
            self._runs[site.name] = self._run_of(only, args, kwargs)
        return self._runs[site.name](*args, **kwargs)

    def _run_of(self, only: Conversion, args: tuple, kwargs: dict[str, Any]) -> Callable[..., Any]:
        module = self.module
        if isinstance(module, fx.GraphModule):
            original = self._graph()
            mode = new_fake_mode()
            fake_args, fake_kwargs = to_fake((args, kwargs), mode)
            graph = rewrite_owner(trace_graph(original, fake_args, fake_kwargs, mode), only, module)
            clear_fake_caches()
            return fx.GraphModule(module, graph)

        def run(*args: Any, **kwargs: Any) -> Any:
            whole = module.__dict__["_t5fx_owner"]
            module.__dict__["_t5fx_owner"] = only
            try:
                return type(module).forward(module, *args, **kwargs)
            finally:
                module.__dict__["_t5fx_owner"] = whole

        return run


class Grid(NamedTuple):
    """Of ``tokens`` tokens, those from ``first`` up to ``end`` are on the grid."""

    tokens: int
    first: int
    end: int


def relative_error(got: Any, wanted: Any, mask: Tensor | None = None, grid: Grid | None = None) -> Tensor:
    """Mean squared difference over the variance of ``wanted``, in float32 (float64 for float64): a scalar.

    got, wanted: an owner's outputs, a tensor or any nesting of them.  Tensors of ``got`` that need no gradient do not
    depend on the site and are left out; of several that do, the mean is taken.  mask: bool [B, N]; in outputs of shape
    [B, N, ...] only tokens where it is True count.  grid: in outputs of shape [B, tokens, ...] the tokens on the grid
    and those beside it are two tensors.  So a class token, which may be all that a head reads, counts as much as all
    patches, and text beside an image as much as where it is an output of its own.
    """
    errors = []
    for one, other in zip(tree_leaves(got), tree_leaves(wanted), strict=True):
        if not isinstance(one, Tensor) or not one.requires_grad:
            continue
        dtype = torch.promote_types(one.dtype, torch.float32)
        one, other = one.to(dtype), other.detach().to(dtype)
        inside = mask.to(one.device) if mask is not None and one.shape[:2] == mask.shape else None
        if grid is None or one.ndim < 3 or one.shape[1] != grid.tokens or grid.end - grid.first == grid.tokens:
            errors.append(_error(one, other, inside))
            continue
        for part in (_on_grid, _beside_grid):
            errors.append(_error(part(one, grid), part(other, grid), None if inside is None else part(inside, grid)))
    if not errors:
        raise CaptureError("the owner's output does not depend on its converted site, so the site can't be calibrated")
    return torch.stack(errors).mean()


def _on_grid(x: Tensor, grid: Grid) -> Tensor:
    return x[:, grid.first : grid.end]


def _beside_grid(x: Tensor, grid: Grid) -> Tensor:
    return torch.cat([x[:, : grid.first], x[:, grid.end :]], dim=1)


def _error(one: Tensor, other: Tensor, inside: Tensor | None) -> Tensor:
    if inside is None:
        difference, variance = (one - other).square().mean(), other.var(correction=0)
    else:
        inside = inside.view(*inside.shape, *[1] * (one.ndim - 2))
        count = inside.sum().clamp(min=1) * (one[0, 0].numel())
        one, other = one.masked_fill(~inside, 0), other.masked_fill(~inside, 0)
        difference = (one - other).square().sum() / count
        variance = (other - other.sum() / count).masked_fill(~inside, 0).square().sum() / count
    return difference / variance.clamp(min=torch.finfo(one.dtype).tiny)


class Step:
    """What a call of the inner step was given and made."""

    def __init__(self, mask: Tensor | None, fast: Sequence[Tensor]) -> None:
        self.mask, self.fast = mask, fast


class WatchSteps(TorchFunctionMode):
    """Sees the inner steps that run within: ``steps``, in order; and where the tokens' ``grid`` is, if it matters."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[Step] = []
        self.grid: Grid | None = None

    def __torch_function__(self, function: Any, kinds: Any, args: tuple = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if function is torch.ops.t5fx.inner_step.default:
            self.steps.append(Step(args[7] if len(args) > 7 else (kwargs or {}).get("mask"), result))
        elif function is torch.ops.t5fx.dwc.default:  # keys and queries of a site are on one grid
            x, _, _, prefix, sides = args[:5]
            self.grid = Grid(x.shape[2], prefix, prefix + math.prod(sides))
        return result
