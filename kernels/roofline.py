"""The least time a phase can take: its bytes over the memory's bandwidth, its FLOPs over the peak rates.

Predictions, not measurements: nothing here has run. A phase is one kernel of :mod:`.triton_phases` or
:mod:`.triton_gradient`. Bytes are those of each tensor once a launch, as if caches caught all other reads (the taps of
the convolution, the weights). A phase takes the longest of its three times, since they overlap.

Peaks are of the vendor's data sheets for the SXM modules: 989 TFLOP/s dense bf16 and 67 TFLOP/s fp32 for both,
3.35 TB/s (H100) and 4.8 TB/s (H200).
"""

from __future__ import annotations

from dataclasses import dataclass

from .configs import backward_launches, config


@dataclass(frozen=True)
class Chip:
    name: str
    matrix: float  # FLOP/s of bf16 matrix units
    vector: float  # FLOP/s of fp32 vector units
    bandwidth: float  # bytes/s


CHIPS = (Chip("H100", 989e12, 67e12, 3.35e12), Chip("H200", 989e12, 67e12, 4.8e12))


@dataclass(frozen=True)
class Phase:
    """bytes: to and from memory; matrix, vector: FLOPs of either unit. For all rows and heads."""

    name: str
    bytes: float
    matrix: float
    vector: float

    def seconds(self, chip: Chip) -> float:
        return max(self.bytes / chip.bandwidth, self.matrix / chip.matrix, self.vector / chip.vector)


@dataclass(frozen=True)
class Shape:
    """Self-attention of SwiGLU with dot loss, head_dim = value_dim = hidden, 3x3 convolutions, key norm."""

    tokens: int
    batch: int = 1
    heads: int = 24
    head_dim: int = 64
    itemsize: int = 2
    taps: int = 9

    @property
    def array(self) -> float:
        """Bytes of one [B, H, N, D]."""
        return float(self.batch * self.heads * self.tokens * self.head_dim * self.itemsize)

    @property
    def gemm(self) -> float:
        """FLOPs of one N x D x D product over all rows and heads."""
        return 2.0 * self.batch * self.heads * self.tokens * self.head_dim**2

    def convolution(self, walks: int = 1) -> float:
        """Vector FLOPs: normalise every tap (2), weigh it and add it (2)."""
        elements = self.batch * self.heads * self.tokens * self.head_dim
        return 4.0 * self.taps * elements * walks


def forward_phases(shape: Shape, *, fused: bool) -> list[Phase]:
    """Forward with the convolution inside the loads, or by a kernel of its own that writes query^ and key^."""
    one, gemm = shape.array, shape.gemm
    conv = shape.convolution()
    phases = [Phase("key statistics", one, 0, 4 * shape.array / shape.itemsize)]
    if not fused:
        phases.append(Phase("convolution of keys", 2 * one, 0, conv))
    phases.append(Phase("inner step", 2 * one, 6 * gemm, conv if fused else 0))
    if not fused:
        phases.append(Phase("convolution of queries", 2 * one, 0, conv))
    phases.append(Phase("inner model on queries", 2 * one, 3 * gemm, conv if fused else 0))
    return phases


# GEMMs of key_pass: five or six make what the results share, then two for each of them or, for the keys, four.
_KEY_GEMMS = {"V": 4 + 2, "VK": 6 + 2 + 4, "K": 6 + 4, "W": 6 + 3, "KW": 6 + 4 + 3, "VKW": 6 + 2 + 4 + 3}
_QUERY_GEMMS = {"T": 3 + 2, "W": 3 + 3, "TW": 3 + 2 + 3}


def backward_phases(shape: Shape, target: str = "sm_90", dtype: str = "bf16") -> list[Phase]:
    """Backward, with the launches that the table of configurations makes of the two passes."""
    one, gemm = shape.array, shape.gemm
    phases = [Phase("query^ and key^", 4 * one, 0, shape.convolution(2))]
    for makes in backward_launches(target, "query_pass", dtype, shape.head_dim):
        phases.append(Phase(f"query pass {makes}", (2 + ("T" in makes)) * one, _QUERY_GEMMS[makes] * gemm, 0))
    for makes in backward_launches(target, "key_pass", dtype, shape.head_dim):
        written = ("V" in makes) + ("K" in makes)
        phases.append(Phase(f"key pass {makes}", (2 + written) * one, _KEY_GEMMS[makes] * gemm, 0))
    phases.append(Phase("convolutions back", 6 * one, 0, shape.convolution(4)))
    phases.append(Phase("key norm back", 3 * one, 0, 6 * one / shape.itemsize))
    return phases


def table(tokens: tuple[int, ...] = (4096, 16384, 65536)) -> str:
    """Markdown: SD3.5 shapes (B = 1, H = 24, D = 64, bf16), every phase on every chip."""
    chosen = config("sm_90", "inner_step", "bf16", 64)
    fused = chosen is not None and chosen.convolve
    head = "| tokens | phase | MB | matrix GFLOP | vector GFLOP | " + " | ".join(f"{c.name}, µs" for c in CHIPS) + " |"
    lines = [head, "|" + "---|" * (5 + len(CHIPS))]
    for count in tokens:
        shape = Shape(count)
        for title, phases in (
            ("**forward**", forward_phases(shape, fused=fused)),
            ("**backward**", backward_phases(shape)),
        ):
            lines += [_line(count, phase) for phase in phases]
            lines.append(_line(count, _sum(title, phases), phases))
    return "\n".join(lines)


def convolution_table(tokens: tuple[int, ...] = (4096, 16384, 65536)) -> str:
    """Markdown: bytes of the forward pass with the convolution inside the loads, and as a kernel of its own."""
    lines = ["| tokens | convolution | MB | H100, µs | H200, µs |", "|---|---|---|---|---|"]
    for count in tokens:
        for name, fused in (("inside the loads", True), ("own kernel", False)):
            phases = forward_phases(Shape(count), fused=fused)
            times = " | ".join(f"{1e6 * sum(p.seconds(chip) for p in phases):.0f}" for chip in CHIPS)
            lines.append(f"| {count:,} | {name} | {sum(p.bytes for p in phases) / 1e6:.0f} | {times} |")
    return "\n".join(lines)


def _sum(name: str, phases: list[Phase]) -> Phase:
    return Phase(name, sum(p.bytes for p in phases), sum(p.matrix for p in phases), sum(p.vector for p in phases))


def _line(tokens: int, phase: Phase, parts: list[Phase] | None = None) -> str:
    """Phases follow each other, so a sum's time is the sum of times."""
    times = " | ".join(f"{1e6 * sum(p.seconds(chip) for p in parts or [phase]):.1f}" for chip in CHIPS)
    numbers = f"{phase.bytes / 1e6:.0f} | {phase.matrix / 1e9:.1f} | {phase.vector / 1e9:.1f}"
    return f"| {tokens:,} | {phase.name} | {numbers} | {times} |"
