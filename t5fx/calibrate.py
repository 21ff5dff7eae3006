"""Calibration: the new weights of each converted site learn to reproduce the softmax attention that was there.

Attention transfer, without labels and without a second model: :mod:`t5fx.transfer` runs the model as it was and gives
the error of each site on the exact inputs of the softmax model; only the new weights move.  Sites that see what
converted sites before them made instead are no use: the errors compound.
"""

from __future__ import annotations

import contextlib
import io
import math
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console, Group
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from .capture.inputs import normalize
from .converted import converted_sites
from .errors import ConfigError, InputError
from .stepping import SiteTraining
from .transfer import Transfer

_BAR_AFTER = 3.0  # seconds: a shorter calibration shows no progress bar


@dataclass(frozen=True)
class Calibration:
    """What calibration did.  ``errors[step][i]`` is the relative squared error of site ``sites[i]`` before that step.

    1.0 is as bad as a constant output, 0 is exact; see :func:`t5fx.transfer.relative_error`.  A site that a batch did
    not reach has nan there.
    """

    sites: tuple[str, ...]
    errors: tuple[tuple[float, ...], ...]

    def history(self, site: str) -> list[float]:
        """The errors of one site, step by step."""
        return [row[self.sites.index(site)] for row in self.errors]

    @property
    def first(self) -> dict[str, float]:
        """Each site's mean error over the first tenth of the steps."""
        return self._mean(self.errors[: self._tenth])

    @property
    def last(self) -> dict[str, float]:
        """Each site's mean error over the last tenth of the steps."""
        return self._mean(self.errors[-self._tenth :])

    @property
    def mean(self) -> float:
        """Mean of ``last`` over the sites."""
        return sum(self.last.values()) / len(self.sites)

    @property
    def _tenth(self) -> int:
        return max(1, len(self.errors) // 10)

    def _mean(self, rows: Sequence[Sequence[float]]) -> dict[str, float]:
        means = {}
        for site, column in zip(self.sites, zip(*rows, strict=True), strict=True):
            seen = [x for x in column if not math.isnan(x)]
            means[site] = sum(seen) / len(seen) if seen else math.nan
        return means

    def to_dict(self) -> dict[str, Any]:
        """JSON-able."""
        return {"sites": list(self.sites), "errors": [list(row) for row in self.errors]}

    def __rich__(self) -> Group:
        title = (
            f"calibrated {len(self.sites)} sites in {len(self.errors)} steps; relative squared error {self.mean:.3f}"
        )
        table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold underline")
        table.add_column("site", overflow="fold")
        for name in ("first", "last"):
            table.add_column(name, justify="right")
        table.add_column("over time", no_wrap=True)
        first, last = self.first, self.last
        for site in self.sites:
            table.add_row(site, f"{first[site]:.3f}", f"{last[site]:.3f}", _curve(self.history(site)))
        return Group(Text(title), table)

    def __str__(self) -> str:
        buffer = io.StringIO()
        Console(file=buffer, width=120, color_system=None).print(self)
        return buffer.getvalue().rstrip()


def _curve(values: Sequence[float], width: int = 24) -> str:
    """A line of bars; the highest is the highest value."""
    seen = [v for v in values if math.isfinite(v)]
    if not seen or max(seen) <= 0:
        return ""
    width = min(width, len(seen))
    groups = [seen[len(seen) * i // width : len(seen) * (i + 1) // width] for i in range(width)]
    means = [sum(group) / len(group) for group in groups]
    return "".join("▁▂▃▄▅▆▇█"[min(7, int(8 * m / max(means)))] for m in means)


def calibrate(
    model: nn.Module,
    batches: Iterable[Any],
    *,
    steps: int,
    lr: float = 1e-2,
    warm_up: float = 0.05,
    progress: bool = True,
) -> Calibration:
    """Teach each converted site the softmax output that the same inputs would give there; inherited weights stay.

    Adam with a linear warm-up and cosine decay to zero, on float32 copies of the new weights (float64 for float64).
    Everything runs as in eval mode.  What a batch trains and what flows on: see :mod:`t5fx.transfer`.  Works inside
    ``torch.autocast`` (with a gradient scaler of its own for float16), and on models wrapped by DDP or accelerate or
    sharded by FSDP2: gradients and errors are then averaged over the processes, which must all call this.

    Args:
        model: linearized; its ``requires_grad`` flags, modes, gradients and hooks are afterwards as before, also after
            an error or Ctrl-C.  Then the new weights are those of the last whole step.
        batches: an iterable of what the model takes: tensors, tuples, dicts of keywords, or ``(args, kwargs)``.  Fewer
            than ``steps``: begun again, where it can be (a list, a DataLoader).  Every token is an example, so small
            batches do: in equal time 400 steps of 32 images recover more than 120 of 128 (docs/results.md).
        steps: how many steps to make.
        lr: peak learning rate.
        warm_up: share of the steps in which it rises.
        progress: show a progress bar, once it has taken a few seconds.

    Returns:
        The relative errors of all sites over time; prints as a table.

    Raises:
        T5fxError: ``model`` is not linearized.
        ConfigError: a number makes no sense.
        InputError: ``batches`` are not batches, or ended too early.
        TrainingError: an error or a gradient is not finite; names the site.
    """
    _check(steps=steps, lr=lr, warm_up=warm_up)
    sites = converted_sites(model)
    training = SiteTraining(model, sites, lr)
    rows: list[tuple[float, ...]] = []
    with contextlib.ExitStack() as stack:
        stack.enter_context(_undisturbed(model, training.parameters))
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        stack.enter_context(Transfer(sites, training.site))
        bar = stack.enter_context(_bar(steps, progress))
        feed = _feed(model, batches, steps)
        for step in range(steps):
            args, kwargs = next(feed)
            with torch.no_grad():
                model(*args, **kwargs)
            rows.append(training.step(_rate((step + 1) / (steps + 1), warm_up)))
            bar(step + 1, rows[-1])
    return Calibration(tuple(site.name for site in sites), tuple(rows))


def _rate(done: float, warm_up: float) -> float:
    """Factor on the learning rate when the share ``done`` of the steps is reached."""
    if done < warm_up:
        return done / warm_up
    return 0.5 + 0.5 * math.cos(math.pi * (done - warm_up) / (1 - warm_up))


@contextlib.contextmanager
def _undisturbed(model: nn.Module, trained: Sequence[Sequence[nn.Parameter]]) -> Iterator[None]:
    """Eval mode, and gradients for ``trained`` only; both as before afterwards."""
    modes = [(module, module.training) for module in model.modules()]
    flags = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    mine = {id(p) for group in trained for p in group}
    try:
        model.eval()
        for parameter, _ in flags:
            parameter.requires_grad_(id(parameter) in mine)
        yield
    finally:
        for module, mode in modes:
            module.training = mode
        for parameter, flag in flags:
            parameter.requires_grad_(flag)


def _feed(model: nn.Module, batches: Iterable[Any], steps: int) -> Iterator[tuple[tuple, dict[str, Any]]]:
    """``(args, kwargs)`` for ever, on the model's device."""
    if isinstance(batches, (Tensor, dict, str)) or not isinstance(batches, Iterable):
        raise InputError(
            f"batches is a {type(batches).__name__}; pass an iterable of batches, each what the model takes: [images]"
        )
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    made, again = 0, True
    while again:
        iterator = iter(batches)
        again = iterator is not batches
        before = made
        for batch in iterator:
            args, kwargs = normalize(model, batch)
            made += 1
            yield tree_map(lambda x: x.to(device) if isinstance(x, Tensor) else x, (args, kwargs))
        if made == before and again:
            raise InputError("batches is empty" if not made else "batches gave nothing when it was read again")
    raise InputError(
        f"batches ended after {made} of {steps} steps, and an iterator can't be read again: pass a list or a "
        "DataLoader, or fewer steps"
    )


@contextlib.contextmanager
def _bar(steps: int, wanted: bool) -> Iterator[Any]:
    """``tick(done, errors)`` moves a progress bar, which appears when a few seconds have passed."""
    wanted = wanted and not (dist.is_available() and dist.is_initialized() and dist.get_rank())
    columns = (TextColumn("calibrate"), BarColumn(), MofNCompleteColumn(), TextColumn("error {task.fields[error]:.3f}"),
               TimeElapsedColumn(), TimeRemainingColumn())  # fmt: skip
    progress = Progress(*columns, console=Console(stderr=True))
    task = progress.add_task("calibrate", total=steps, error=math.nan)
    start = time.monotonic()
    shown = False

    def tick(done: int, errors: Sequence[float]) -> None:
        nonlocal shown
        seen = [e for e in errors if not math.isnan(e)]
        progress.update(task, completed=done, error=sum(seen) / len(seen) if seen else math.nan)
        if wanted and not shown and time.monotonic() - start > _BAR_AFTER:
            progress.start()
            shown = True

    try:
        yield tick
    finally:
        if shown:
            progress.stop()


def _check(*, steps: Any, lr: Any, warm_up: Any) -> None:
    if not isinstance(steps, int) or isinstance(steps, bool) or steps < 1:
        raise ConfigError(f"calibrate: steps must be a whole number of at least 1, not {steps!r}")
    if not isinstance(lr, (int, float)) or not (math.isfinite(lr) and lr > 0):
        raise ConfigError(f"calibrate: lr must be a finite number above 0, not {lr!r}")
    if not isinstance(warm_up, (int, float)) or not 0 <= warm_up < 1:
        raise ConfigError(f"calibrate: warm_up is a share of the steps, from 0 to below 1, not {warm_up!r}")
