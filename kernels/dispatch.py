"""Which kernel serves a site: every candidate says yes, or why not.

The choice is made once, when a graph is compiled, and its name becomes an argument of the fused operator: an
artifact on disk and a run with another switch can't disagree. ``T5FX_KERNEL`` forces one: "triton", "cpu",
"reference" (plain PyTorch) or "none" (leave the operators to Inductor).
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cache
from typing import Any

from ..errors import ConfigError
from .problem import Kernel, Problem, Tensors

#: In the order in which they are asked. "reference" is never chosen unless it is forced.
CANDIDATES = ("triton", "cpu")
SWITCH = "T5FX_KERNEL"


@dataclass(frozen=True)
class Choice:
    """kernel: a name for :func:`kernel`, or None where the four operators stay. reasons: of those that refused."""

    kernel: str | None
    reasons: dict[str, str]

    def __str__(self) -> str:
        if self.kernel is not None:
            return f"fused into the {self.kernel} kernel"
        return "not fused: " + "; ".join(f"{name}: {why}" for name, why in self.reasons.items())


@cache
def kernel(name: str) -> Kernel:
    """The kernel of that name; what follows an "@" is not looked at. Raises ConfigError."""
    found: Any
    name = name.split("@")[0]
    if name == "triton":
        from .triton_launch import TritonKernel as found
    elif name == "cpu":
        from .cpu import CpuKernel as found
    elif name == "reference":
        from .reference import ReferenceKernel as found
    else:
        raise ConfigError(f"no kernel is called {name!r}: use one of {', '.join((*CANDIDATES, 'reference'))}")
    return found()


def choose(problem: Problem, tensors: Tensors, *, forced: str | None = None) -> Choice:
    """The first candidate that takes such a call; the tensors may be fake.

    forced: as T5FX_KERNEL, and before it. A forced kernel that refuses leaves the operators as they are, with its
    reason. Raises ConfigError on a name that no kernel has.
    """
    forced = forced or os.environ.get(SWITCH) or None
    if forced == "none":
        return Choice(None, {"none": f"{SWITCH} says so"})
    reasons: dict[str, str] = {}
    for name in CANDIDATES if forced is None else (forced,):
        try:
            candidate = kernel(name)
        except ImportError as error:  # triton does not come with every build of PyTorch
            reasons[name] = f"can't be imported ({error})"
            continue
        reason = candidate.refuse(problem, tensors)
        if reason is None:
            return Choice(name, reasons)
        reasons[name] = reason
    return Choice(None, reasons)
