"""``python -m t5fx.kernels.offline``: compile every Triton kernel for every GPU target, on a machine without a GPU.

For each target, dtype and head size, the launches of a forward and a backward pass are compiled with the configurations
that the table would choose (:mod:`.configs`), and the machine code is read: registers, spills, shared memory, matrix
instructions. A kernel fails that does not compile, spills, has no matrix instructions where it multiplies matrices
(float32 is multiplied exactly, on the vector units of NVIDIA chips), or takes more shared memory than the chip has or
the table says. What the table has no row for is listed as refused: there, a site runs the dissolved operators.

``--markdown FILE`` writes the tables between the marks of that file (docs/kernels-gpu.md). ``--quick`` compiles bf16 at
head size 64 for sm_90 and gfx942. Exit status 1 if a kernel fails.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from . import configs, roofline
from .triton_inspect import TARGETS, Compiled, compile_launch
from .triton_record import Call, Launch, launches
from .triton_site import padded

DTYPES = ("fp16", "bf16", "fp32")
HEAD_DIMS = (16, 32, 64, 72, 80, 96, 128)
MULTIPLYING = ("inner_step", "apply_model", "query_pass", "key_pass")

# Beside the published model (SwiGLU, dot, no mask), at the head sizes that must hold.
VARIANTS = (("swiglu", "mse", True), ("mlp", "dot", False), ("mlp", "mse", True))
VARIED = (64, 128)


@dataclass
class Result:
    """One kernel, for one target, dtype, head size and variant; ``problems`` is empty where it passed."""

    target: str
    dtype: str
    head_dim: int
    variant: str
    kernel: str
    compiled: Compiled
    problems: list[str]


def calls(
    quick: bool, targets: Iterable[str], dtypes: Iterable[str], head_dims: Iterable[int], plain: bool = False
) -> list[tuple[str, Call]]:
    """What to compile: (target, call), all of them served by the table."""
    if quick:
        return [(target, Call(dtype="bf16", head_dim=64)) for target in ("sm_90", "gfx942")]
    found = []
    for target in targets:
        for dtype in dtypes:
            for dim in head_dims:
                if refused(target, dtype, dim):
                    continue
                found.append((target, Call(dtype=dtype, head_dim=dim)))
                if dim in VARIED and not plain:
                    found += [(target, Call(inner, loss, dtype, dim, mask)) for inner, loss, mask in VARIANTS]
    return found


def refused(target: str, dtype: str, head_dim: int) -> str | None:
    """Why the table can't serve a head size on a target, or None."""
    return configs.refuse(target, dtype, padded(head_dim), None)


def judge(launch: Launch, compiled: Compiled, target: str, dtype: str) -> list[str]:
    """What is wrong with a compiled kernel."""
    if compiled.failure:
        return [compiled.failure]
    problems = []
    if compiled.spills or compiled.stack:
        problems.append(f"{compiled.spills} spills, {compiled.stack} bytes of stack")
    row = configs.of_launch(target, launch.name, dtype, launch.constexprs)
    limit = configs.SHARED[target]
    if compiled.shared > limit:
        problems.append(f"{compiled.shared} bytes of shared memory of {limit}")
    elif row is not None and compiled.shared > row.shared:
        problems.append(f"{compiled.shared} bytes of shared memory, the table says {row.shared}")
    exact = dtype == "fp32" and target != "gfx942"
    if launch.kernel.__name__ in MULTIPLYING:
        if exact and not compiled.multiplies:
            problems.append("no multiplications")
        if not exact and not compiled.matrix:
            problems.append("no matrix instructions")
    return problems


def compile_call(job: tuple[str, Call]) -> list[Result]:
    """All kernels of one call."""
    target, call = job
    variant = f"{call.inner} {call.loss}" + (" mask" if call.mask else "")
    results = []
    for launch in launches(target, call):
        compiled = compile_launch(launch, target)
        problems = judge(launch, compiled, target, call.dtype)
        results.append(Result(target, call.dtype, call.head_dim, variant, launch.name, compiled, problems))
    return results


def instructions(compiled: Compiled, dtype: str, target: str) -> str:
    if compiled.matrix:
        return ", ".join(f"{count} {name}" for name, count in sorted(compiled.matrix.items()))
    return f"{compiled.multiplies} FFMA" if dtype == "fp32" and target != "gfx942" else "-"


def detail_rows(results: Iterable[Result]) -> list[list[str]]:
    """One line a kernel."""
    return [
        [
            r.target, r.dtype, str(r.head_dim), r.variant, r.kernel, str(r.compiled.registers),
            f"{r.compiled.spills} / {r.compiled.stack}", f"{r.compiled.shared / 1024:.0f}",
            instructions(r.compiled, r.dtype, r.target), "; ".join(r.problems) or "pass",
        ]
        for r in results
    ]  # fmt: skip


DETAIL = ["target", "dtype", "D", "variant", "kernel", "registers", "spills / stack", "shared, KB", "matrix", "verdict"]
SUMMARY = ["target", "dtype", "D", "kernels", "most registers", "spills", "most shared, KB", "matrix", "verdict"]


def summary_rows(results: list[Result]) -> list[list[str]]:
    """One line a target, dtype and head size, over all kernels and variants."""
    groups: dict[tuple[str, str, int], list[Result]] = {}
    for result in results:
        groups.setdefault((result.target, result.dtype, result.head_dim), []).append(result)
    rows = []
    for (target, dtype, dim), group in groups.items():
        compiled = [r.compiled for r in group]
        matrix: Counter[str] = sum((c.matrix for c in compiled), Counter())
        multiplies = sum(
            c.multiplies for r, c in zip(group, compiled, strict=True) if r.kernel.split()[0] in MULTIPLYING
        )
        failed = sum(bool(r.problems) for r in group)
        together = Compiled(matrix=matrix, multiplies=multiplies)
        rows.append([
            target, dtype, str(dim), str(len(group)), str(max(c.registers for c in compiled)),
            str(sum(c.spills for c in compiled)), f"{max(c.shared for c in compiled) / 1024:.0f}",
            instructions(together, dtype, target), f"{failed} fail" if failed else "pass",
        ])  # fmt: skip
    return rows


def refused_rows(targets: Iterable[str]) -> list[list[str]]:
    """What the table serves not at all."""
    rows = []
    for target in targets:
        for dtype in DTYPES:
            for dim in HEAD_DIMS:
                reason = refused(target, dtype, dim)
                if reason:
                    rows.append([target, dtype, str(dim), reason])
    return rows


def markdown(head: list[str], rows: list[list[str]]) -> str:
    return "\n".join("| " + " | ".join(row) + " |" for row in (head, ["---"] * len(head), *rows))


def write_markdown(path: Path, results: list[Result], targets: list[str]) -> None:
    """Put the tables between ``<!-- name -->`` and ``<!-- end -->`` of a file."""
    shown = [r for r in results if r.variant == "swiglu dot" and r.head_dim in VARIED and r.dtype in ("bf16", "fp32")]
    gone = refused_rows(targets)
    parts = {
        "summary": markdown(SUMMARY, summary_rows(results)),
        "detail": markdown(DETAIL, detail_rows(shown)),
        "refused": markdown(["target", "dtype", "D", "reason"], gone) if gone else "None: every row above is served.",
        "roofline": roofline.table(),
        "convolution": roofline.convolution_table(),
    }
    text = path.read_text()
    for name, body in parts.items():
        before, mark, rest = text.partition(f"<!-- {name} -->\n")
        _, end, after = rest.partition("<!-- end -->")
        if not (mark and end):
            raise SystemExit(f"{path} has no place for a table: it needs <!-- {name} --> and then <!-- end -->")
        text = f"{before}{mark}\n{body}\n\n{end}{after}"
    path.write_text(text)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m t5fx.kernels.offline", description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="bf16, head size 64, sm_90 and gfx942 only")
    parser.add_argument("--targets", nargs="+", default=list(configs.SHARED), choices=list(TARGETS))
    parser.add_argument("--dtypes", nargs="+", default=list(DTYPES), choices=DTYPES)
    parser.add_argument("--head-dims", nargs="+", type=int, default=list(HEAD_DIMS))
    parser.add_argument("--plain", action="store_true", help="SwiGLU with the dot loss and no mask only")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--markdown", type=Path, help="file with marks to write the tables between")
    arguments = parser.parse_args(argv)
    console = Console()
    jobs = calls(arguments.quick, arguments.targets, arguments.dtypes, arguments.head_dims, arguments.plain)
    results: list[Result] = []
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress, ProcessPoolExecutor(arguments.jobs) as pool:
        bar = progress.add_task("compiling", total=len(jobs))
        for (target, call), found in zip(jobs, pool.map(compile_call, jobs), strict=True):
            results += found
            progress.update(bar, advance=1, description=f"{target} {call.dtype} {call.head_dim}")
    failed = [r for r in results if r.problems]
    tables = []
    if not arguments.quick:
        tables.append((f"{len(results)} kernels by target", SUMMARY, summary_rows(results)))
    if arguments.quick or failed:
        tables.append(
            ("all" if arguments.quick else "failed", DETAIL, detail_rows(results if arguments.quick else failed))
        )
    for title, head, rows in tables:
        table = Table(*head, title=title)
        for row in rows:
            table.add_row(*row)
        console.print(table)
    if arguments.markdown:
        write_markdown(arguments.markdown, results, arguments.targets)
    console.print(f"{len(results) - len(failed)} kernels pass, {len(failed)} fail")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
