"""One table of launch configurations: which block sizes and warps a kernel takes on which chip.

A row is found by target, dtype and the padded width of the heads; never by a number of tokens, so nothing is tuned at
run time and a compiled kernel serves all resolutions. ``python -m t5fx.kernels.offline`` compiles every row and fails
if one spills registers or takes more shared memory than written here. A group that is missing is a case that is
refused: the site then runs the dissolved operators.

The rows were found by compiling, from large blocks to small, until a kernel with a mask, and with the mse loss where
that matters, held all it needs in registers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

#: Bytes of shared memory that a block of threads may have.
SHARED = {"sm_80": 163 * 1024, "sm_90": 227 * 1024, "sm_100": 227 * 1024, "gfx942": 64 * 1024}

# Chips that run another's rows: the same matrix instructions, less shared memory (refuse asks the device how much).
_FAMILY = {"sm_86": "sm_80", "sm_89": "sm_80"}

_WIDTHS = (16, 32, 64, 128)


@dataclass(frozen=True)
class Config:
    """block: tokens at a time. hidden: hidden units at a time. shared: bytes of shared memory, as compiled.

    convolve: the convolution runs inside the loads (False: ``prepare_tokens`` writes x^ first). registers: a limit for
    the compiler, a thread.
    """

    block: int
    hidden: int
    warps: int
    convolve: bool = False
    shared: int = 0
    registers: int | None = None
    stages: int = 1  # operands pass through arithmetic before a GEMM takes them: there is no copy to overlap


# Memory-bound kernels without GEMMs: a row for all.
_STREAMING = {"part_stats": Config(64, 0, 4, shared=4096), "norm_back": Config(64, 0, 4, shared=4096)}

# The interpreter has no registers; a large block is fewer operations.
_INTERPRETED = Config(64, 128, 4, convolve=True)

# (target, "half" or "fp32", width) -> kernel -> (block, hidden, warps, convolve, shared)
# fmt: off
_TABLE: dict[tuple[str, str, int], dict[str, tuple[int, int, int, bool, int]]] = {
    ("sm_80", "half", 64): {
        "apply_model": (64, 64, 8, True, 32768), "convolve_back": (64, 0, 8, False, 4096),
        "inner_step": (64, 32, 8, True, 45056), "key_pass K": (32, 64, 4, False, 102400),
        "key_pass V": (64, 32, 8, False, 32768), "key_pass VK": (32, 64, 4, False, 110592),
        "key_pass W": (32, 32, 8, False, 53248), "prepare_tokens": (64, 0, 8, False, 0),
        "query_pass T": (64, 64, 8, False, 57344), "query_pass W": (64, 32, 4, False, 28672),
    },
    ("sm_80", "half", 128): {
        "apply_model": (64, 128, 8, False, 114688), "convolve_back": (32, 0, 8, False, 8192),
        "inner_step": (16, 32, 8, False, 40960), "key_pass K": (32, 32, 8, False, 73728),
        "key_pass V": (32, 32, 8, False, 57344), "key_pass VK": (16, 32, 4, False, 65536),
        "key_pass W": (16, 32, 8, False, 81920), "prepare_tokens": (64, 0, 8, False, 0),
        "query_pass T": (64, 32, 8, False, 57344), "query_pass W": (16, 32, 4, False, 32768),
    },
    ("sm_80", "fp32", 64): {
        "apply_model": (32, 32, 8, True, 32768), "convolve_back": (64, 0, 8, False, 2048),
        "inner_step": (32, 32, 8, True, 40960), "key_pass K": (32, 32, 8, False, 73728),
        "key_pass V": (32, 32, 8, False, 57344), "key_pass VK": (32, 32, 8, False, 73728),
        "key_pass W": (32, 32, 8, False, 90112), "prepare_tokens": (64, 0, 8, False, 0),
        "query_pass T": (32, 32, 8, False, 40960), "query_pass W": (32, 32, 8, False, 53248),
    },
    ("sm_80", "fp32", 128): {
        "apply_model": (32, 16, 8, False, 57344), "convolve_back": (32, 0, 8, False, 4096),
        "inner_step": (16, 32, 8, False, 65536), "key_pass K": (16, 16, 8, False, 73728),
        "key_pass V": (16, 16, 8, False, 57344), "key_pass VK": (16, 16, 8, False, 67584),
        "key_pass W": (16, 16, 8, False, 77824), "prepare_tokens": (32, 0, 8, False, 0),
        "query_pass T": (32, 16, 8, False, 57344), "query_pass W": (16, 32, 8, False, 71680),
    },
    ("sm_90", "half", 64): {
        "apply_model": (64, 64, 8, True, 32768), "convolve_back": (64, 0, 8, False, 4096),
        "inner_step": (64, 64, 8, True, 49152), "key_pass K": (32, 64, 4, False, 102400),
        "key_pass V": (64, 32, 8, False, 32768), "key_pass VK": (32, 64, 4, False, 110592),
        "key_pass W": (32, 16, 4, False, 38912), "prepare_tokens": (64, 0, 8, False, 0),
        "query_pass T": (64, 64, 8, False, 40960), "query_pass W": (64, 64, 8, False, 57344),
    },
    ("sm_90", "half", 128): {
        "apply_model": (64, 128, 8, True, 114688), "convolve_back": (16, 0, 4, False, 4096),
        "inner_step": (32, 32, 8, False, 49152), "key_pass K": (32, 32, 8, False, 73728),
        "key_pass V": (32, 32, 8, False, 57344), "key_pass VK": (16, 32, 4, False, 65536),
        "key_pass W": (32, 32, 8, False, 106496), "prepare_tokens": (64, 0, 8, False, 0),
        "query_pass T": (32, 128, 8, False, 180224), "query_pass W": (64, 32, 8, False, 73728),
    },
    ("sm_90", "fp32", 32): {
        "apply_model": (32, 32, 4, True, 16384), "convolve_back": (64, 0, 4, False, 1024),
        "inner_step": (32, 32, 8, True, 24576), "key_pass KW": (32, 32, 8, False, 53248),
        "key_pass V": (32, 32, 8, False, 32768), "key_pass VKW": (32, 32, 8, False, 45056),
        "prepare_tokens": (64, 0, 8, False, 0), "query_pass TW": (32, 32, 8, False, 32768),
    },
    ("sm_90", "fp32", 64): {
        "apply_model": (16, 16, 8, True, 16384), "convolve_back": (64, 0, 8, False, 2048),
        "inner_step": (16, 32, 8, True, 32768), "key_pass K": (16, 16, 4, False, 36864),
        "key_pass V": (32, 32, 8, False, 57344), "key_pass VK": (32, 32, 8, False, 73728),
        "key_pass W": (32, 32, 8, False, 90112), "prepare_tokens": (32, 0, 8, False, 0),
        "query_pass T": (32, 32, 8, False, 40960), "query_pass W": (32, 32, 8, False, 53248),
    },
    ("sm_90", "fp32", 128): {
        "apply_model": (16, 16, 8, False, 32768), "convolve_back": (32, 0, 8, False, 4096),
        "inner_step": (16, 32, 8, False, 65536), "key_pass K": (16, 16, 8, False, 73728),
        "key_pass V": (16, 16, 8, False, 57344), "key_pass VK": (16, 16, 8, False, 67584),
        "key_pass W": (16, 16, 8, False, 77824), "prepare_tokens": (64, 0, 8, False, 0),
        "query_pass T": (32, 16, 8, False, 57344), "query_pass W": (16, 32, 8, False, 71680),
    },
    ("sm_100", "half", 64): {
        "apply_model": (32, 64, 4, True, 28672), "convolve_back": (64, 0, 8, False, 4096),
        "inner_step": (64, 64, 8, True, 50176), "key_pass K": (32, 64, 4, False, 102400),
        "key_pass V": (64, 32, 8, False, 32776), "key_pass VK": (32, 32, 4, False, 81920),
        "key_pass W": (32, 16, 4, False, 38912), "prepare_tokens": (64, 0, 8, False, 0),
        "query_pass T": (64, 64, 8, False, 40968), "query_pass W": (64, 64, 8, False, 57352),
    },
    ("sm_100", "half", 128): {
        "apply_model": (32, 32, 8, False, 32768), "convolve_back": (32, 0, 8, False, 8192),
        "inner_step": (64, 64, 8, False, 90120), "key_pass K": (32, 32, 8, False, 73728),
        "key_pass V": (64, 32, 8, False, 65544), "key_pass VK": (16, 32, 4, False, 65536),
        "key_pass W": (32, 32, 8, False, 106496), "prepare_tokens": (64, 0, 8, False, 0),
        "query_pass T": (32, 128, 8, False, 180224), "query_pass W": (64, 32, 8, False, 73736),
    },
    ("sm_100", "fp32", 64): {
        "apply_model": (32, 32, 8, True, 32768), "convolve_back": (32, 0, 4, False, 1024),
        "inner_step": (32, 32, 8, False, 40960), "key_pass K": (32, 32, 8, False, 73728),
        "key_pass V": (32, 32, 8, False, 57344), "key_pass VK": (32, 32, 8, False, 73728),
        "key_pass W": (32, 32, 8, False, 90112), "prepare_tokens": (16, 0, 4, False, 0),
        "query_pass T": (32, 32, 8, False, 40960), "query_pass W": (32, 32, 8, False, 53248),
    },
    ("sm_100", "fp32", 128): {
        "apply_model": (16, 16, 8, False, 32768), "convolve_back": (32, 0, 8, False, 4096),
        "inner_step": (16, 32, 8, False, 65536), "key_pass K": (16, 16, 8, False, 73728),
        "key_pass V": (16, 16, 8, False, 57344), "key_pass VK": (16, 16, 8, False, 67584),
        "key_pass W": (16, 16, 8, False, 77824), "prepare_tokens": (64, 0, 8, False, 0),
        "query_pass T": (32, 16, 8, False, 57344), "query_pass W": (16, 32, 8, False, 71680),
    },
    ("gfx942", "half", 16): {
        "apply_model": (64, 16, 4, True, 512), "convolve_back": (64, 0, 4, False, 1024),
        "inner_step": (64, 16, 4, True, 2048), "key_pass KW": (64, 16, 4, False, 2048),
        "key_pass V": (64, 16, 4, False, 512), "key_pass VKW": (64, 16, 4, False, 2048),
        "prepare_tokens": (64, 0, 4, False, 0), "query_pass TW": (64, 16, 4, False, 2048),
    },
    ("gfx942", "half", 32): {
        "apply_model": (64, 32, 4, True, 8192), "convolve_back": (64, 0, 4, False, 2048),
        "inner_step": (64, 32, 4, True, 4096), "key_pass KW": (64, 32, 4, False, 4096),
        "key_pass V": (64, 32, 4, False, 8192), "key_pass VKW": (32, 32, 4, False, 4096),
        "prepare_tokens": (64, 0, 4, False, 0), "query_pass TW": (64, 32, 4, False, 4096),
    },
    ("gfx942", "half", 64): {
        "apply_model": (64, 64, 4, True, 8192), "convolve_back": (64, 0, 4, False, 4096),
        "inner_step": (64, 64, 4, False, 8192), "key_pass K": (64, 32, 4, False, 8192),
        "key_pass V": (64, 64, 4, False, 8192), "key_pass VK": (64, 16, 4, False, 8192),
        "key_pass W": (64, 32, 4, False, 8192), "prepare_tokens": (64, 0, 4, False, 0),
        "query_pass T": (64, 64, 4, False, 8192), "query_pass W": (64, 64, 4, False, 8192),
    },
    ("gfx942", "half", 128): {
        "apply_model": (16, 16, 4, True, 4096), "convolve_back": (32, 0, 4, False, 8192),
        "inner_step": (64, 32, 4, False, 16384), "key_pass K": (64, 16, 4, False, 16384),
        "key_pass V": (64, 32, 4, False, 16384), "key_pass VK": (32, 32, 4, False, 8192),
        "key_pass W": (32, 16, 4, False, 8192), "prepare_tokens": (32, 0, 4, False, 0),
        "query_pass T": (64, 32, 4, False, 16384), "query_pass W": (64, 32, 4, False, 16384),
    },
    ("gfx942", "fp32", 64): {
        "apply_model": (32, 32, 4, True, 8192), "convolve_back": (32, 0, 4, False, 2048),
        "inner_step": (32, 32, 4, True, 8192), "key_pass K": (32, 32, 4, False, 8192),
        "key_pass V": (32, 32, 4, False, 8192), "key_pass VK": (16, 32, 4, False, 8192),
        "key_pass W": (16, 32, 4, False, 8192), "prepare_tokens": (32, 0, 4, False, 0),
        "query_pass T": (32, 32, 4, False, 8192), "query_pass W": (32, 32, 4, False, 8192),
    },
    ("gfx942", "fp32", 128): {
        "apply_model": (32, 32, 4, False, 16384), "convolve_back": (16, 0, 4, False, 2048),
        "inner_step": (16, 16, 4, False, 8192), "key_pass K": (16, 16, 4, False, 8192),
        "key_pass V": (16, 16, 4, False, 8192), "key_pass VK": (16, 16, 4, False, 8192),
        "key_pass W": (16, 16, 4, False, 8192), "prepare_tokens": (16, 0, 4, False, 0),
        "query_pass T": (32, 32, 4, False, 16384), "query_pass W": (16, 16, 4, False, 8192),
    },
}  # end of the table
# fmt: on


def config(target: str, kernel: str, dtype: str, width: int) -> Config | None:
    """The row of a kernel ("inner_step", "key_pass VK", ...), or None. dtype: "fp16", "bf16" or "fp32"."""
    if target == "interpreter":
        return _INTERPRETED
    if kernel in _STREAMING:
        return _STREAMING[kernel]
    row = _group(target, dtype, width).get(kernel)
    if row is None:
        return None
    # Left to itself, NVIDIA's compiler gives some of these kernels 32 to 64 registers, and spills with that.
    spilling = _FAMILY.get(target, target) == "sm_80" and kernel in ("prepare_tokens", "convolve_back", "inner_step")
    spilling = spilling or (target.startswith("sm_") and dtype == "fp32" and width > 64)
    return Config(*row, registers=255 if spilling else None)


def backward_launches(target: str, kernel: str, dtype: str, width: int, *, mse: bool = False) -> list[str]:
    """Which gradients each launch of query_pass or key_pass makes: as few launches as the table has rows for.

    With mse all but d value needs the residual's gradient of a launch before.
    """
    found = _group(target, dtype, width)

    def has(makes: str) -> bool:
        return target == "interpreter" or f"{kernel} {makes}" in found

    if kernel == "query_pass":
        return ["TW"] if has("TW") else ["T", "W"]
    if mse:
        return ["V", "KW"] if has("KW") else ["V", "K", "W"]
    if has("VKW"):
        return ["VKW"]
    return ["VK", "W"] if has("VK") else ["V", "K", "W"]


def refuse(target: str, dtype: str, width: int, shared: int | None) -> str | None:
    """Why there is no configuration, or None. shared: bytes a block may have on the device, None to trust the table."""
    if target == "interpreter":
        return None
    found = _group(target, dtype, width)
    if not found:
        known = sorted({row[0] for row in _TABLE} | set(_FAMILY))
        if target not in known:
            return f"there is no table of Triton configurations for {target}, only for {', '.join(known)}"
        return f"there is no Triton configuration for {dtype} heads of {width} channels on {target}"
    most = max(row[4] for row in found.values())
    if shared is not None and most > shared:
        return f"Triton kernels need {most} bytes of shared memory for heads of {width}, {target} has {shared}"
    return None


def of_launch(target: str, name: str, dtype: str, constants: Mapping[str, Any]) -> Config | None:
    """The row that a recorded launch was made with; None for kernels that have none (one block size for all)."""
    width = max(size for key in ("DP", "VP", "HB") if (size := constants.get(key, 0)) is not None)
    return config(target, name.removesuffix("R").strip(), dtype, width) if width else None


def _group(target: str, dtype: str, width: int) -> dict[str, tuple[int, int, int, bool, int]]:
    """The rows for heads of a width, or for the next wider ones: narrower heads need less of everything."""
    kind = "fp32" if dtype == "fp32" else "half"
    groups = (_TABLE.get((_FAMILY.get(target, target), kind, wide)) for wide in _WIDTHS if wide >= width)
    return next((group for group in groups if group), {})
