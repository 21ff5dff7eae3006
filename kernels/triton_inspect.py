"""Compiling a launch for a chip that is not here, and reading from the machine code what it would use."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from .triton_record import Launch

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}

# Matrix instructions by the names that cuobjdump and LLVM print.
_MATRIX = re.compile(r"\b(HGMMA|HMMA|UTCHMMA|UTCQMMA|UTCMMA|UTCOMMA|QGMMA|v_mfma_[a-z0-9_]+)\b")


@dataclass
class Compiled:
    """What one kernel uses. spills: stores and loads (nvidia) or registers (amd) that went to memory.

    stack: bytes of local memory a thread. shared: bytes a block. matrix: matrix instructions by name. multiplies: fused
    multiply-adds of the vector units. failure: why there is no machine code.
    """

    registers: int = 0
    spills: int = 0
    stack: int = 0
    shared: int = 0
    matrix: Counter[str] = field(default_factory=Counter)
    multiplies: int = 0
    failure: str | None = None


def compile_launch(launch: Launch, target: str) -> Compiled:
    """Compile for a target of :data:`TARGETS` and read the machine code; what the compiler refuses is a failure."""
    source = ASTSource(launch.kernel, launch.signature, launch.constexprs, launch.attrs)
    try:
        made = triton.compile(source, target=TARGETS[target], options=dict(launch.options))
    except Exception as error:
        lines = str(error).strip().splitlines() or [""]
        return Compiled(failure=f"{type(error).__name__}: {lines[0][:200]}")
    shared = int(made.metadata.shared)
    return _read_amd(made.asm["amdgcn"], shared) if target == "gfx942" else _read_nvidia(made.asm["cubin"], shared)


def _read_nvidia(cubin: bytes, shared: int) -> Compiled:
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage, code = (
            subprocess.run([tool, option, file.name], capture_output=True, text=True, check=True).stdout
            for option in ("--dump-resource-usage", "-sass")
        )
    numbers = re.search(r"REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)", usage)
    if numbers is None:
        return Compiled(failure="the cubin holds no kernel")
    registers, stack, fixed, local = map(int, numbers.groups())
    return Compiled(
        registers=registers,
        spills=len(re.findall(r"\b(?:STL|LDL)\b", code)),
        stack=stack + local,
        shared=max(shared, fixed),
        matrix=Counter(_MATRIX.findall(code)),
        multiplies=len(re.findall(r"\bFFMA2?\b", code)),
    )


def _read_amd(assembly: str, shared: int) -> Compiled:
    def number(name: str) -> int:
        found = re.search(rf"\.{name}:\s*(\d+)", assembly)
        return int(found.group(1)) if found else 0

    matrix = Counter("MFMA" for _ in re.findall(r"\bv_mfma_\w+", assembly))
    return Compiled(
        registers=number("vgpr_count"),  # AGPRs are among them
        spills=number("vgpr_spill_count") + number("sgpr_spill_count"),
        stack=number("private_segment_fixed_size"),
        shared=max(shared, number("group_segment_fixed_size")),
        matrix=matrix,
        multiplies=len(re.findall(r"\bv_(?:pk_)?fma(?:c|_f32)\w*", assembly)),
    )
