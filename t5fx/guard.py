"""Stop a training run at the first number that is not finite, and say where it came from."""

from __future__ import annotations

import types
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from .converted import by_owner, converted_sites
from .errors import TrainingError
from .transfer import WatchSteps

_MISSING: Any = object()


class TrainingGuard:
    """Watches the loss and the converted sites of a model in training.

        with t5fx.TrainingGuard(model) as guard:
            for images, labels in loader:
                loss = ...
                loss.backward()
                guard.check(loss)          # raises TrainingError
                optimizer.step()

    In each forward pass the fast weights and the outputs of all converted sites are looked at; :meth:`check` reads what
    was found, with one transfer from the device a step, and raises at the first that is not finite: a fast weight, else
    a site's output, else the loss.  Of a compiled model only the loss is watched: its fast weights need never exist as
    tensors.  ``steps`` counts the calls of ``check`` that passed.

    Raises:
        T5fxError: ``model`` is not linearized.
    """

    def __init__(self, model: nn.Module) -> None:
        self.steps = 0
        self._found: list[tuple[str, str, Tensor]] = []
        self._kept: list[tuple[nn.Module, Any]] = []
        self._owners = by_owner(converted_sites(model))
        for sites in self._owners:
            owner = sites[0].owner
            names = [site.name for site in sorted(sites, key=lambda s: s.spec.index)]
            self._kept.append((owner, owner.__dict__.get("forward", _MISSING)))
            owner.__dict__["forward"] = types.MethodType(_watched(names, self, owner.forward), owner)

    def check(self, loss: Tensor | None = None) -> None:
        """Raise if anything since the last call was not finite.

        Raises:
            TrainingError: with ``site``, unless only the loss is at fault.
        """
        found, self._found = self._found, []
        flags = [flag for *_, flag in found]
        if loss is not None:
            flags.append(_finite([loss.detach()]))
        fine = torch.stack([flag.to(flags[0].device) for flag in flags]).tolist() if flags else []
        step = f"in step {self.steps + 1}"
        for (site, what, _), good in zip(found, fine, strict=False):
            if not good:
                raise TrainingError(
                    f"{what} of site {site!r} are not finite {step}. Lower the learning rate of the new parameters "
                    "(t5fx.param_groups(new_lr_scale=...)) or the config's inner_lr, clip gradients, and leave "
                    "key_norm on: without it training diverges (T5, ICML 2026)",
                    site,
                )
        if fine and not fine[-1]:
            raise TrainingError(
                f"the loss is not finite {step}, and no converted site was seen to be at fault: look at the head, the "
                "data and the loss scale, or run a compiled model without torch.compile to watch its sites too"
            )
        self.steps += 1

    def remove(self) -> None:
        """Leave the model as it was."""
        for owner, before in self._kept:
            if before is _MISSING:
                owner.__dict__.pop("forward", None)
            else:
                owner.__dict__["forward"] = before
        self._kept.clear()

    def __enter__(self) -> TrainingGuard:
        return self

    def __exit__(self, *raised: Any) -> None:
        self.remove()

    def saw(self, site: str, what: str, tensors: list[Tensor]) -> None:
        self._found.append((site, what, _finite(tensors)))


def _watched(names: list[str], guard: TrainingGuard, forward: Any) -> Any:
    """An owner's forward, and a look at what it makes.  A function, which Dynamo can follow."""

    def run(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return forward(*args, **kwargs)
        with WatchSteps() as seen:
            output = forward(*args, **kwargs)
        for name, step in zip(names, seen.steps, strict=False):
            guard.saw(name, "the fast weights", list(step.fast))
        guard.saw(names[-1], "the outputs", [x for x in tree_leaves(output) if isinstance(x, Tensor)])
        return output

    return run


@torch.no_grad()
def _finite(tensors: list[Tensor]) -> Tensor:
    """A bool scalar, without waiting for the device."""
    checked = [x.isfinite().all() for x in tensors if x.is_floating_point()]
    return torch.stack(checked).all() if checked else torch.tensor(True)
