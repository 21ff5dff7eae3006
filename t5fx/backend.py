"""The ``torch.compile`` backend "t5".

The four operators of a converted site reach a backend as one node each.  Until kernels serve them this backend hands
the graph to Inductor, under which they dissolve into ATen and are fused as far as Inductor can.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import torch
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

    from . import ops  # noqa: F401  (a graph may name the operators before anyone imported t5fx)

    patches = {**(list_mode_options(mode) if mode and mode != "default" else {}), **(options or {})}
    settings: Any = torch.compiler.config
    with settings.patch(cache_key_tag=f"{settings.cache_key_tag}t5fx-{source_hash()}"):
        return cast(Callable[..., Any], compile_fx(graph, list(example_inputs), config_patches=patches or None))


@functools.cache
def source_hash() -> str:
    """Hash of the files that define what the operators compute.

    PyTorch's caches know an operator by its name; an artifact must not outlive a change of what is behind it.
    """
    here = Path(__file__).parent
    files = [here / name for name in ("ops.py", "inner.py", "backend.py")]
    return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()[:16]
