"""The numbers of one call, worked out once: sizes, padded sizes, splits, and the arguments that kernels share."""

from __future__ import annotations

import contextlib
import functools
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import Tensor

from .problem import Convolution, Problem, Tensors

NARROWEST, WIDEST = 16, 128  # tl.dot takes no less than 16; three float32 sums of more do not fit a chip's registers

DTYPES = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}

#: A split has about so many tokens or more, and there are at most so many programs a launch unless rows and heads alone
#: are more. Neither asks the chip, so the order of additions is the same on all of them.
SPLIT_TOKENS, PROGRAMS = 256, 1024


def interpreting() -> bool:
    """Whether Triton's kernels run in its interpreter: TRITON_INTERPRET=1, read when triton was imported."""
    import triton

    return bool(triton.knobs.runtime.interpret)


@functools.cache
def target_of(device: torch.device) -> str:
    """The row of :mod:`.configs` for a device: "sm_90", "gfx942", ... or "interpreter"."""
    if device.type == "cpu":
        return "interpreter"
    if torch.version.hip:
        return torch.cuda.get_device_properties(device).gcnArchName.split(":")[0]
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}"


@functools.cache
def shared_memory(device: torch.device) -> int | None:
    """Bytes of shared memory that one block of threads can have; None where nothing limits it."""
    if device.type != "cuda":
        return None
    properties = torch.cuda.get_device_properties(device)
    return int(getattr(properties, "shared_memory_per_block_optin", properties.shared_memory_per_block))


def padded(size: int) -> int:
    """The power of two, 16 or more, that holds ``size``."""
    return max(16, 1 << (size - 1).bit_length())


@dataclass(frozen=True)
class Site:
    """One call's sizes. ``mask`` [B, N] as int8, contiguous, or None."""

    problem: Problem
    batch: int
    heads: int
    queries: int
    tokens: int
    head_dim: int
    value_dim: int
    hidden: int
    dtype: torch.dtype
    device: torch.device
    mask: Tensor | None

    @staticmethod
    def of(problem: Problem, tensors: Tensors) -> Site:
        query, key, value, weights, _, _, mask = tensors
        if mask is not None:
            mask = mask.contiguous().view(torch.int8)
        batch, heads, tokens, dim = key.shape
        return Site(
            problem, batch, heads, query.shape[2], tokens, dim, value.shape[3], weights[0].shape[2],
            key.dtype, key.device, mask,
        )  # fmt: skip

    @property
    def rows(self) -> int:
        """Pairs of a batch row and a head: nothing is shared between their fast weights."""
        return self.batch * self.heads

    @property
    def width(self) -> int:
        """The padded size of the widest matrix side: what configurations go by."""
        return max(padded(self.head_dim), padded(self.value_dim), padded(self.hidden))

    @property
    def swiglu(self) -> bool:
        return self.problem.inner == "swiglu"

    @property
    def precision(self) -> str:
        """How float32 matrices are multiplied: as torch does. AMD chips have exact matrix instructions for them."""
        if self.device.type != "cuda" or torch.version.hip:
            return "ieee"
        return "tf32" if torch.backends.cuda.matmul.fp32_precision == "tf32" else "ieee"

    def token_counts(self) -> Tensor | int:
        """``n_b``: the tokens that take part in each row, at least 1; float32 [B, 1] under a mask."""
        if self.mask is None:
            return self.tokens
        return self.mask.sum(-1, dtype=torch.float32, keepdim=True).clamp(min=1)

    def chunks(self, tokens: int) -> tuple[int, int]:
        """(tokens a split, splits): from shapes alone."""
        splits = max(1, min(-(-tokens // SPLIT_TOKENS), PROGRAMS // self.rows))
        chunk = -(-tokens // splits)
        chunk = -(-chunk // 128) * 128 if splits > 1 else chunk
        return chunk, -(-tokens // chunk)

    def sizes(self) -> dict[str, int]:
        """The constants of a matrix kernel."""
        return {
            "D": self.head_dim,
            "DP": padded(self.head_dim),
            "V": self.value_dim,
            "VP": padded(self.value_dim),
            "F": self.hidden,
        }

    def slices(self, hidden_block: int) -> dict[str, int]:
        block = min(hidden_block, padded(self.hidden))
        return {"HB": block, "SLICES": -(-self.hidden // block)}

    def on_device(self) -> AbstractContextManager:
        return torch.cuda.device(self.device) if self.device.type == "cuda" else contextlib.nullcontext()


def rows_of(x: Tensor) -> Tensor:
    """x as the kernels read it: channels next to each other, and tokens at multiples of 8 where head_dim is one.

    That is x itself. Only a tensor cut out of a wider one at an odd place, which no projection makes, is copied.
    """
    unit = 8 if x.shape[3] % 8 == 0 else 1
    steps = [stride for stride, size in zip(x.stride(), x.shape, strict=True) if size > 1]
    if (x.shape[3] == 1 or x.stride(3) == 1) and all(step % unit == 0 for step in steps[:-1]):
        return x
    return x.contiguous()


def strides(x: Tensor) -> tuple[int, int, int]:
    return x.stride(0), x.stride(1), x.stride(2)


def taps(problem: Problem, convolution: Convolution | None) -> dict[str, int]:
    """Grid and sides of a convolution on three axes, whatever it has; KT = 0 says that there is none."""
    if convolution is None:
        return {"grid_t": 1, "grid_h": 1, "grid_w": 1, "prefix": 0, "KT": 0, "KH": 0, "KW": 0}
    grid = (1, 1, *problem.grid)[-3:]
    sides = (1, 1, *convolution.weight.shape[2:])[-3:]
    numbers = dict(zip(("grid_t", "grid_h", "grid_w"), grid, strict=True))
    return {**numbers, "prefix": problem.prefix, **dict(zip(("KT", "KH", "KW"), sides, strict=True))}
