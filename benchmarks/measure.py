"""Timing that can be believed: alternated repeats, medians, the machine's state beside the figures.

Competitors are run in turn (a, b, c, a, b, c, ...) so that whatever slows the machine for a while slows all of them,
and the median of each is taken. A large matmul of the same dtype runs in the same rounds: rates are given as a share
of what it reaches.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

#: glibc keeps large blocks instead of giving them back: without, every temporary costs its page faults again.
MALLOC = {
    "MALLOC_MMAP_THRESHOLD_": "1073741824",
    "MALLOC_TRIM_THRESHOLD_": "8589934592",
    "MALLOC_TOP_PAD_": "268435456",
}


def alternate(
    runs: Mapping[str, Callable[[], object]], *, repeats: int = 5, seconds: float = 0.0, warmup: int = 1
) -> dict[str, float]:
    """Median seconds of each, from alternated rounds.

    repeats: rounds. seconds: in a round, run a fast competitor again until it has taken this long, and count the mean.
    """
    for run in runs.values():
        for _ in range(warmup):
            run()
    taken: dict[str, list[float]] = {name: [] for name in runs}
    gc.collect()
    for _ in range(repeats):
        for name, run in runs.items():
            start, times = time.perf_counter(), 0
            while times == 0 or time.perf_counter() - start < seconds:
                run()
                times += 1
            taken[name].append((time.perf_counter() - start) / times)
    return {name: statistics.median(all_) for name, all_ in taken.items()}


def matmul(dtype: torch.dtype, side: int = 2048) -> tuple[Callable[[], object], float]:
    """A square matmul to compare with, and its FLOPs."""
    a, b = (torch.randn(side, side).to(dtype) for _ in range(2))
    out = torch.empty(side, side, dtype=dtype)
    return (lambda: torch.mm(a, b, out=out)), 2.0 * side**3


def peak_above(run: Callable[[], object]) -> int:
    """Bytes by which the resident memory rises above its level before ``run``, at most (Linux, glibc)."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # what is free but still resident would be used again without a rise
    Path("/proc/self/clear_refs").write_text("5")  # sets the high-water mark to what is resident now
    before = _status("VmRSS")
    run()
    return max(0, _status("VmHWM") - before)


def _status(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {field}")


def malloc_setting() -> str:
    """ "kept" where :data:`MALLOC` is in force, else "default"."""
    return "kept" if all(os.environ.get(k) == v for k, v in MALLOC.items()) else "default"


def child(arguments: list[str], malloc: str) -> Any:
    """Run ``python -m benchmarks ARGUMENTS`` under a malloc setting ("kept" or "default"); return the JSON it ends on.

    glibc reads the setting when a process starts, so a setting needs a process.
    """
    env = {k: v for k, v in os.environ.items() if k not in MALLOC}
    env |= MALLOC if malloc == "kept" else {}
    done = subprocess.run([sys.executable, "-m", "benchmarks", *arguments], env=env, stdout=subprocess.PIPE, text=True,
                          check=True)  # fmt: skip
    return json.loads(done.stdout.splitlines()[-1])


def machine() -> str:
    """One line: processor, cores, threads, versions."""
    cpu = platform.processor() or platform.machine()
    for line in Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else ():
        if line.startswith("model name"):
            cpu = line.split(":", 1)[1].strip()
            break
    return (
        f"{cpu}, {os.cpu_count()} cores, {torch.get_num_threads()} threads, torch {torch.__version__}, "
        f"Python {platform.python_version()}, {time.strftime('%Y-%m-%d')}"
    )
