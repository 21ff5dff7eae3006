"""The ``torch.compile`` backend "t5".

The four operators of a converted site reach a backend as one node each.  Until kernels serve them this backend hands
the graph to Inductor, under which they dissolve into ATen and are fused as far as Inductor can.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, fx


def t5(
    graph: fx.GraphModule,
    example_inputs: Sequence[Tensor],
    *,
    mode: str | None = None,
    options: dict[str, Any] | None = None,
) -> Callable[..., Any]:
    """Compile ``graph``.  ``mode`` and ``options`` are Inductor's (``torch.compile(mode="max-autotune")``)."""
    from torch._inductor import list_mode_options
    from torch._inductor.compile_fx import compile_fx

    from . import ops  # noqa: F401  (a graph from the cache may name the operators before anyone imported them)

    patches = {**(list_mode_options(mode) if mode and mode != "default" else {}), **(options or {})}
    return compile_fx(graph, list(example_inputs), config_patches=patches or None)
