"""Huge pages for large results.

Memory that malloc has just mapped costs a page fault for every 4 KiB that is written first: for an output of 100 MB
more than the kernel's own work on it. Asked to, Linux maps 2 MiB at a time (where
/sys/kernel/mm/transparent_hugepage/enabled says "madvise" or "always"). Where it doesn't, nothing changes.
"""

from __future__ import annotations

import ctypes
import sys
from functools import cache
from typing import Any

from torch import Tensor

_MADV_HUGEPAGE = 14  # linux/mman.h
_HUGE = 2 * 2**20
#: glibc maps blocks above this size anew each time, whatever it learnt (mallopt(3), M_MMAP_THRESHOLD); below it
#: reuses memory that has its pages.
_LEAST = 32 * 2**20


def prefer_huge(tensor: Tensor) -> Tensor:
    """Ask for huge pages under the memory of a large CPU tensor that nobody has written yet; returns it."""
    nbytes = tensor.untyped_storage().nbytes()
    if nbytes >= _LEAST and (libc := _libc()) is not None:
        start = -(-tensor.untyped_storage().data_ptr() // _HUGE) * _HUGE
        end = tensor.untyped_storage().data_ptr() + nbytes
        libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), _MADV_HUGEPAGE)  # a hint: may be refused
    return tensor


@cache
def _libc() -> Any:
    return ctypes.CDLL(None) if sys.platform == "linux" else None
