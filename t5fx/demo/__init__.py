"""``t5fx demo``: train a small vision transformer, linearize it, bring the quality back, and look at the result.

Importing this module is cheap; what the demo needs beyond t5fx (timm, scikit-learn, matplotlib) is imported by
:func:`run`, and an error names the command to install it.
"""

from __future__ import annotations

import argparse
import importlib.util
from pathlib import Path

from ..errors import T5fxError

_NEEDED = {"timm": "timm", "sklearn": "scikit-learn", "matplotlib": "matplotlib", "PIL": "pillow"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``t5fx demo`` to ``parser``."""
    parser.add_argument("--out", type=Path, default=Path("demo"), help="folder for report.html and the saved model")
    parser.add_argument(
        "--weights",
        type=Path,
        help="safetensors file of timm's vit_small_patch14_dinov2 (default: in ../shared/weights)",
    )
    parser.add_argument("--seed", type=int, default=0, help="of initial weights, batches and augmentation")
    parser.add_argument("--threads", type=int, default=1, help="torch's threads (default 1: the model is small)")
    parser.add_argument("--quick", action="store_true", help="a few epochs only: shows that it runs, proves nothing")


def run(options: argparse.Namespace | None = None) -> int:
    """Run the demo: prints tables, writes ``report.html``, ``results.json`` and the saved model to ``options.out``.

    Args:
        options: as :func:`add_arguments` makes them; None for the defaults.

    Returns:
        The exit status, 0.

    Raises:
        T5fxError: a package that the demo needs is missing, or a reloaded model differs from the saved one.
    """
    missing = [package for module, package in _NEEDED.items() if importlib.util.find_spec(module) is None]
    if missing:
        raise T5fxError(f"the demo needs {', '.join(missing)}: pip install t5fx[demo]")
    if options is None:
        parser = argparse.ArgumentParser()
        add_arguments(parser)
        options = parser.parse_args([])
    from .script import play

    play(options)
    return 0
