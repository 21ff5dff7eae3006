"""Which sites can be converted most easily: measured, not guessed.

The score of a site is how much its output suffers when it alone is converted and calibrated.  In calibration every
site sees the inputs of the softmax model, so one run of a model with all of its sites converted scores them all.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

from .api import linearize, revert
from .calibrate import calibrate
from .capture.install import is_linearized
from .config import T5, TTTConfig
from .errors import T5fxError
from .layout import UserLayout
from .select import everything


@dataclass(frozen=True)
class Sensitivity(Mapping[str, float]):
    """The relative squared error of each site's output, by the site's name; 1 is as bad as a constant output.

    Behaves as a dict; prints as a table, the easiest site first.
    """

    scores: dict[str, float]

    def __getitem__(self, site: str) -> float:
        return self.scores[site]

    def __iter__(self) -> Iterator[str]:
        return iter(self.scores)

    def __len__(self) -> int:
        return len(self.scores)

    def __rich__(self) -> Table:
        table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold underline")
        table.add_column("site", overflow="fold")
        table.add_column("relative\nerror", justify="right")
        for site, score in sorted(self.scores.items(), key=lambda item: item[1]):
            table.add_row(site, f"{score:.4f}")
        return table

    def __str__(self) -> str:
        buffer = io.StringIO()
        Console(file=buffer, width=120, color_system=None).print(self)
        return buffer.getvalue().rstrip()


def sensitivity(
    model: nn.Module,
    batches: Iterable[Any],
    *,
    steps: int = 100,
    lr: float = 1e-2,
    config: TTTConfig = T5,
    example_inputs: Any = None,
    layout: UserLayout = None,
    progress: bool = True,
) -> Sensitivity:
    """Score every site of a softmax model that can be converted.  The model is afterwards as it was.

    All sites are converted in place, calibrated on ``batches`` for ``steps``, and reverted; no second copy of the model
    is made, no random numbers are drawn from the caller's generator.  Sites of a model with few ``steps`` compare well
    enough: their order settles long before their errors do.

    Args:
        batches, steps, lr, progress: as in :func:`t5fx.calibrate`.
        config, example_inputs, layout: as in :func:`t5fx.linearize`; the example is the first batch, where
            ``batches`` can be read again.

    Raises:
        T5fxError: the model is linearized already.
        InputError, LayoutError, SelectionError, TrainingError: as in :func:`t5fx.linearize` and :func:`t5fx.calibrate`.
    """
    if any(map(is_linearized, model.modules())):
        raise T5fxError(
            f"{type(model).__name__} is linearized: sensitivity is asked of the softmax model (t5fx.revert)"
        )
    if example_inputs is None and isinstance(batches, Iterable) and iter(batches) is not batches:
        example_inputs = next(iter(batches), None)
    devices = sorted({p.device.index or 0 for p in model.parameters() if p.device.type == "cuda"})
    with torch.random.fork_rng(devices):
        linearize(model, everything, config=config, example_inputs=example_inputs, layout=layout)
        try:
            result = calibrate(model, batches, steps=steps, lr=lr, progress=progress)
        finally:
            revert(model)
    return Sensitivity(result.last)
