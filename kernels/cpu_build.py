"""Compiles and loads the fused CPU kernel, ``csrc/``, at first use."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import subprocess
import tempfile
from pathlib import Path

import torch

SOURCES = Path(__file__).parent / "csrc"
_ISA = ("-mavx2", "-mfma", "-mf16c", "-mavx512f", "-mavx512dq", "-mavx512vl", "-mavx512bw")


class BuildError(RuntimeError):
    """The library could not be compiled or loaded; the message is the reason."""


def library() -> ctypes.CDLL:
    """The compiled kernel. Raises BuildError: no AVX-512, no compiler, or what the compiler said.

    It lies in Inductor's cache directory, named by a hash of its sources, torch's version, compiler and flags. Two
    processes that build at once both compile, and each renames its finished file into place.
    """
    outcome = _outcome()
    if isinstance(outcome, BuildError):
        raise outcome
    return outcome


@functools.cache
def _outcome() -> ctypes.CDLL | BuildError:
    # A failure is remembered too: compilers are slow to fail.
    try:
        return _build()
    except BuildError as error:
        return error


def _build() -> ctypes.CDLL:
    capability = torch.backends.cpu.get_cpu_capability()
    if capability != "AVX512":
        raise BuildError(f"it needs AVX-512, and torch runs as {capability} here")
    # Inductor's modules are heavy, and only needed now.
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    try:
        compiler = get_cpp_compiler()
    except Exception as error:
        raise BuildError(f"no C++ compiler was found (set CXX): {error}") from error
    flags = ["-std=c++20", "-O3", "-fno-math-errno", "-fPIC", "-fopenmp", *_ISA]
    if has_bfloat16():
        flags.append("-mavx512bf16")
    key = hashlib.sha256(repr((torch.__version__, torch.version.git_version, compiler, flags)).encode())
    for path in sorted(SOURCES.iterdir()):
        key.update(path.name.encode() + path.read_bytes())
    try:
        folder = Path(cache_dir()) / "t5fx"
        target = folder / f"cpu_{key.hexdigest()[:24]}.so"
        if not target.exists():
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=folder) as work:
                os.replace(_compile(compiler, flags, Path(work)), target)
        return ctypes.CDLL(str(target))
    except OSError as error:
        raise BuildError(f"the compiled library can't be written or loaded: {error}") from error


def has_bfloat16() -> bool:
    """Whether this CPU multiplies bfloat16 (AVX512_BF16)."""
    return bool(torch.cpu._is_avx512_bf16_supported())


def _compile(compiler: str, flags: list[str], work: Path) -> Path:
    """The shared library, made in the folder ``work``: all sources side by side, then linked."""
    from torch.utils.cpp_extension import TORCH_LIB_PATH, include_paths

    includes = [f"-I{path}" for path in include_paths()]
    objects, running = [], []
    for source in sorted(SOURCES.glob("*.cpp")):
        objects.append(str(work / f"{source.stem}.o"))
        command = [compiler, *flags, *includes, "-c", str(source), "-o", objects[-1]]
        running.append(subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True))
    errors = [(process.communicate()[1], process.returncode) for process in running]
    result = work / "cpu.so"
    links = ["-shared", "-fopenmp", "-o", str(result), f"-L{TORCH_LIB_PATH}", "-lc10", "-ltorch_cpu"]
    if not any(code for _, code in errors):
        done = subprocess.run([compiler, *objects, *links], capture_output=True, text=True)
        errors.append((done.stderr, done.returncode))
    for text, code in errors:
        if code:
            raise BuildError(f"{compiler} failed: {text.strip()[-2000:]}")
    return result
