"""The optimizer of a calibration: gradients of single sites in, one step of all new weights out.

It works on whole copies of the new weights in float32, because those of the model may be of a lower precision, or this
process's shards.  Of several processes each makes the same step, with the mean of their gradients.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .converted import ConvertedSite
from .errors import TrainingError

BETAS = (0.9, 0.99)


class SiteTraining:
    """The optimizer's side: gradients of one forward pass are gathered, then make one step.

    The optimizer works on whole, plain copies: the model's own parameters may be of a lower precision, or shards.
    """

    def __init__(self, model: nn.Module, sites: Sequence[ConvertedSite], lr: float) -> None:
        self.sites, self.lr = sites, lr
        self.shared = _is_distributed(model)
        self.parameters = [list(site.weights.parameters()) for site in sites]
        self.masters = [[_whole(p) for p in group] for group in self.parameters]
        flat = [p for group in self.masters for p in group]
        self.optimizer = torch.optim.Adam(flat, lr=lr, betas=BETAS)
        device = flat[0].device.type
        self.scaler = torch.amp.GradScaler(device, enabled=_is_float16(self.parameters, device))
        self._at = {site.name: i for i, site in enumerate(sites)}
        self._begin()

    def _begin(self) -> None:
        self.errors: list[list[Tensor]] = [[] for _ in self.sites]
        self.gradients = [[torch.zeros_like(m) for m in group] for group in self.masters]

    def site(self, site: ConvertedSite, error: Tensor, parameters: list[nn.Parameter]) -> None:
        """Called in the forward pass: the gradient is taken at once, while the activations are there."""
        at = self._at[site.name]
        self.errors[at].append(error.detach())
        for total, gradient in zip(
            self.gradients[at], torch.autograd.grad(self.scaler.scale(error), parameters), strict=True
        ):
            total += gradient

    def step(self, factor: float) -> tuple[float, ...]:
        """One step of the optimizer; returns each site's error, nan where the batch did not reach it."""
        zero = torch.zeros((), dtype=torch.float64, device=self.masters[0][0].device)
        sums = torch.stack([sum((e.double() for e in seen), zero) for seen in self.errors])
        counts = torch.tensor([len(seen) for seen in self.errors], dtype=sums.dtype, device=sums.device)
        gradients = [g for group in self.gradients for g in group]
        if self.shared:
            _add_up(sums, counts, *gradients)
            for gradient in gradients:
                gradient /= dist.get_world_size()
        reached, errors = counts.tolist(), (sums / counts).tolist()
        self._check(reached, errors)
        for master, gradient in zip((m for group in self.masters for m in group), gradients, strict=True):
            master.grad = gradient
        for options in self.optimizer.param_groups:
            options["lr"] = self.lr * factor
        self.scaler.step(self.optimizer)
        self.scaler.update()
        with torch.no_grad():
            for group, masters in zip(self.parameters, self.masters, strict=True):
                for parameter, master in zip(group, masters, strict=True):
                    parameter.copy_(_like(master, parameter))
        self._begin()
        return tuple(errors)

    def _check(self, reached: Sequence[float], errors: Sequence[float]) -> None:
        for site, times, error, gradients in zip(self.sites, reached, errors, self.gradients, strict=True):
            what = "error" if times and not math.isfinite(error) else None
            # A gradient too large for float16 is no accident: the scaler leaves the step out and lowers the scale.
            if what is None and not self.scaler.is_enabled() and not all(bool(g.isfinite().all()) for g in gradients):
                what = "gradient"
            if what is not None:
                raise TrainingError(
                    f"calibration stopped: the {what} of site {site.name!r} is not finite. The weights are those of "
                    f"the step before. Lower lr (it is {self.lr:g}) or the config's inner_lr, and leave key_norm on",
                    site.name,
                )


def _is_distributed(model: nn.Module) -> bool:
    if not (dist.is_available() and dist.is_initialized()):
        return False
    wrapped = any(isinstance(m, nn.parallel.DistributedDataParallel) for m in model.modules())
    return wrapped or any(_is_sharded(p) for p in model.parameters())


def _is_sharded(parameter: Tensor) -> bool:
    return hasattr(parameter, "full_tensor")  # a DTensor


def _whole(parameter: nn.Parameter) -> Tensor:
    """A plain copy of all of it, in float32 at least."""
    tensor: Any = parameter.detach()
    tensor = tensor.full_tensor() if _is_sharded(parameter) else tensor
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32), copy=True)


def _like(master: Tensor, parameter: Any) -> Tensor:
    """``master`` in the form of ``parameter``: this process's shard of it where that is one."""
    if not _is_sharded(parameter):
        return master
    from torch.distributed.tensor import distribute_tensor

    # Every process has all of it: nothing to send.
    return distribute_tensor(master, parameter.device_mesh, parameter.placements, src_data_rank=None)


def _add_up(*tensors: Tensor) -> None:
    """All-reduce in place, in one message."""
    flat = torch.cat([t.double().reshape(-1) for t in tensors])
    dist.all_reduce(flat)
    for tensor, piece in zip(tensors, flat.split([t.numel() for t in tensors]), strict=True):
        tensor.copy_(piece.view_as(tensor))


def _is_float16(parameters: Sequence[Sequence[nn.Parameter]], device: str) -> bool:
    on = torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)
    return (on and torch.get_autocast_dtype(device) == torch.float16) or any(
        p.dtype == torch.float16 for group in parameters for p in group
    )
