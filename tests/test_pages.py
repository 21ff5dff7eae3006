"""Huge pages are asked for under large results only, and change nothing but how memory is mapped."""

import re
import sys
from pathlib import Path

import pytest
import torch

from t5fx.kernels import pages

SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def huge_bytes(tensor):
    """AnonHugePages of the mapping that holds the tensor."""
    address, inside = tensor.data_ptr(), False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if found := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            inside = int(found[1], 16) <= address < int(found[2], 16)
        elif inside and line.startswith("AnonHugePages"):
            return int(line.split()[1]) * 1024
    return 0


@pytest.mark.skipif(
    sys.platform != "linux" or not SETTING.exists() or "[madvise]" not in SETTING.read_text(),
    reason="needs a Linux that maps huge pages when asked to, and only then",
)
def test_large_memory_is_mapped_in_huge_pages():
    size = 64 * 2**20
    asked = pages.prefer_huge(torch.empty(size, dtype=torch.uint8)).fill_(1)
    assert huge_bytes(asked) > size // 2
    assert int(asked.sum(dtype=torch.int64)) == size


def test_a_small_or_strided_tensor_is_itself(monkeypatch):
    calls = []
    monkeypatch.setattr(pages, "_libc", lambda: type("C", (), {"madvise": lambda *a: calls.append(a)})())
    small = torch.empty(1000)
    assert pages.prefer_huge(small) is small
    assert not calls
    large = torch.empty(40 * 2**20, dtype=torch.uint8)[5:]
    pages.prefer_huge(large)
    [(_, start, length, _)] = calls
    begin = large.untyped_storage().data_ptr()
    assert start.value % (2 * 2**20) == 0  # the kernel takes whole pages
    assert begin <= start.value
    assert start.value + length.value == begin + 40 * 2**20
