"""The ``torch.compile`` backend "t5": fuse the sites, give the rest to Inductor.

The four operators of a converted site reach a backend as one node each. :mod:`t5fx.passes.fuse` makes one operator of
them where a kernel takes the site; where none does they stay, and dissolve into ATen under Inductor.

What became of each site is logged under ``t5fx.backend`` (``TORCH_LOGS="+t5fx.backend"``), and :func:`t5fx.explain`
tells without compiling.
"""

from __future__ import annotations

import functools
import hashlib
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, fx

from .errors import ConfigError

log = logging.getLogger(__name__)

_OPTIONS = ("t5fx.kernel",)
_said: set[str] = set()


def t5(
    graph: fx.GraphModule,
    example_inputs: Sequence[Tensor],
    *,
    mode: str | None = None,
    options: dict[str, Any] | None = None,
) -> Callable[..., Any]:
    """Compile ``graph``.  ``mode`` and ``options`` are Inductor's (``torch.compile(mode="max-autotune")``).

    Of our own is the option ``t5fx.kernel``: force a kernel, as the variable T5FX_KERNEL does.  Raises ConfigError on
    an option or a kernel that does not exist.
    """
    from torch._inductor import list_mode_options
    from torch._inductor.compile_fx import compile_fx

    from . import ops  # noqa: F401  (a graph may name the operators before anyone imported t5fx)

    ours = {name: value for name, value in (options or {}).items() if name.startswith("t5fx.")}
    theirs = {name: value for name, value in (options or {}).items() if name not in ours}
    if unknown := set(ours) - set(_OPTIONS):
        raise ConfigError(f"backend t5 has no option {', '.join(sorted(unknown))}: it has {', '.join(_OPTIONS)}")
    patches = {**(list_mode_options(mode) if mode and mode != "default" else {}), **theirs}

    if _holds_site(graph):
        from .passes.fuse import fuse

        for fusion in fuse(graph, kernel=ours.get("t5fx.kernel"), tag=source_hash()):
            log.info("%s", fusion)
            if fusion.choice.kernel is None and str(fusion.choice) not in _said:
                _said.add(str(fusion.choice))
                log.warning("%s (said once; such sites run as compiled by Inductor)", fusion)
    settings: Any = torch.compiler.config
    with settings.patch(cache_key_tag=f"{settings.cache_key_tag}t5fx-{source_hash()}"):
        return cast(Callable[..., Any], compile_fx(graph, list(example_inputs), config_patches=patches or None))


def _holds_site(graph: fx.GraphModule) -> bool:
    return any("t5fx" in str(node.target) for node in graph.graph.nodes if node.op == "call_function")


@functools.cache
def source_hash() -> str:
    """Hash of the files that define what the operators compute, and in what layout.

    PyTorch's caches know an operator by its name; an artifact must not outlive a change of what is behind it.
    """
    from . import kernels, passes

    here = Path(__file__).parent
    files = [here / name for name in ("ops.py", "inner.py", "backend.py")]
    files += [Path(passes.__path__[0], "fuse.py"), *sorted(Path(kernels.__path__[0]).rglob("*.*"))]
    sources = (path for path in files if path.suffix in (".py", ".cpp", ".h"))
    return hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()[:16]
