"""What ``torch.compile(model, backend="t5")`` would do with each converted site, without compiling."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from .capture.inputs import normalize
from .passes.fuse import Fusion, fuse


@dataclass(frozen=True)
class Explanation:
    """sites: one :class:`~t5fx.passes.fuse.Fusion` a converted site that ran, in order. graphs: that Dynamo made."""

    sites: list[Fusion]
    graphs: int

    def __str__(self) -> str:
        if not self.sites:
            return "no converted site ran: see t5fx.linearize"
        width = max(len(fusion.site) for fusion in self.sites)
        lines = [f"{fusion.site:<{width}}  {fusion.choice}" for fusion in self.sites]
        graphs = "one graph" if self.graphs == 1 else f"{self.graphs} graphs"
        return "\n".join([*lines, f"{len(self.sites)} sites in {graphs}"])


def explain(model: nn.Module, example_inputs: Any = None, *, kernel: str | None = None) -> Explanation:
    """Run ``model`` once through Dynamo and say which kernel each converted site would get, or why none.

    Args:
        example_inputs: a tensor, a tuple of positional arguments, a mapping of keyword arguments, or both as
            ``(args, kwargs)``, on the device and in the dtypes (and the autocast) that count. As for
            :func:`t5fx.linearize` they may be left away for models of known libraries.
        kernel: as the backend's option ``t5fx.kernel``.
    """
    args, kwargs = normalize(model, example_inputs)
    sites: list[Fusion] = []
    graphs = 0

    def look(graph: fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
        nonlocal graphs
        graphs += 1
        copy = fx.Graph()
        copy.output(copy.graph_copy(graph.graph, {}))
        sites.extend(fuse(fx.GraphModule(graph, copy), kernel=kernel))
        return graph.forward

    torch._dynamo.reset()
    try:
        with torch.no_grad():
            torch.compile(model, backend=look)(*args, **kwargs)
    finally:
        torch._dynamo.reset()
    return Explanation(sites, graphs)
