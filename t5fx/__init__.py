"""t5fx: turn a pretrained softmax vision transformer into a linear-complexity one.

model = t5fx.linearize(model, select=t5fx.every_other)
model = torch.compile(model, backend="t5")
"""

from . import ops, passes
from .api import code, inspect, linearize, report, revert
from .calibrate import Calibration, calibrate
from .config import CALIBRATED, DIT5_TTT, T5, TTTConfig
from .distill import distill_loss
from .errors import (
    CaptureError,
    ConfigError,
    InputError,
    LayoutError,
    MaskError,
    RecipeError,
    SelectionError,
    T5fxError,
    TrainingError,
)
from .explain import explain
from .grid import grid
from .guard import TrainingGuard
from .inner import InnerModel
from .io import load, save
from .report import Report
from .select import (
    Selector,
    budget,
    cheaper,
    easiest,
    every,
    every_other,
    everything,
    first,
    fraction,
    last,
    min_tokens,
    names,
)
from .sensitivity import Sensitivity, sensitivity
from .site import Refusal, Site, TokenLayout
from .train import param_groups

__version__ = "0.1.0"

__all__ = [
    "CALIBRATED",
    "DIT5_TTT",
    "T5",
    "Calibration",
    "CaptureError",
    "ConfigError",
    "InnerModel",
    "InputError",
    "LayoutError",
    "MaskError",
    "RecipeError",
    "Refusal",
    "Report",
    "SelectionError",
    "Selector",
    "Sensitivity",
    "Site",
    "T5fxError",
    "TTTConfig",
    "TokenLayout",
    "TrainingError",
    "TrainingGuard",
    "budget",
    "calibrate",
    "cheaper",
    "code",
    "distill_loss",
    "easiest",
    "every",
    "every_other",
    "everything",
    "explain",
    "first",
    "fraction",
    "grid",
    "inspect",
    "last",
    "linearize",
    "load",
    "min_tokens",
    "names",
    "ops",
    "param_groups",
    "passes",
    "report",
    "revert",
    "save",
    "sensitivity",
]
