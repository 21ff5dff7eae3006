"""Compilation for GPUs that are not here, the table of configurations, and the roofline."""

from collections import Counter

import pytest

pytest.importorskip("triton")

from t5fx.kernels import configs, offline, roofline
from t5fx.kernels.triton_inspect import Compiled, compile_launch
from t5fx.kernels.triton_record import Call, launches

GROUPS = sorted(configs._TABLE)
COMPILED = {"inner_step", "apply_model", "query_pass W", "key_pass W"}


@pytest.mark.parametrize("target", ["sm_90", "gfx942"])
def test_compiles(target):
    found = [launch for launch in launches(target, Call(dtype="bf16", head_dim=64)) if launch.name in COMPILED]
    assert {launch.name for launch in found} == COMPILED
    for launch in found:
        compiled = compile_launch(launch, target)
        assert offline.judge(launch, compiled, target, "bf16") == [], launch.name
        assert compiled.registers > 32  # a trap stub has none worth the name


def launch_of(name, dtype="bf16"):
    return next(launch for launch in launches("sm_90", Call(dtype=dtype)) if launch.name == name)


@pytest.mark.parametrize(
    ("compiled", "problem"),
    [
        (Compiled(registers=200, shared=1024, matrix=Counter(HGMMA=3)), None),
        (Compiled(registers=200, shared=1024), "no matrix instructions"),
        (Compiled(registers=255, spills=2, stack=8, matrix=Counter(HGMMA=3)), "2 spills"),
        (Compiled(registers=255, shared=300_000, matrix=Counter(HGMMA=3)), "300000 bytes of shared memory of 232448"),
        (Compiled(registers=255, shared=230_000, matrix=Counter(HGMMA=3)), "the table says"),
        (Compiled(failure="CompilationError: no"), "CompilationError"),
    ],
)
def test_judges(compiled, problem):
    problems = offline.judge(launch_of("inner_step"), compiled, "sm_90", "bf16")
    assert (problems == []) if problem is None else (problem in problems[0])


def test_exact_float32_needs_no_matrix_instructions():
    launch = launch_of("inner_step", "fp32")
    assert offline.judge(launch, Compiled(registers=99, multiplies=100), "sm_90", "fp32") == []
    assert offline.judge(launch, Compiled(registers=99), "sm_90", "fp32") == ["no multiplications"]


def test_compiler_failure_is_a_result():
    launch = launch_of("inner_step")
    launch.constexprs["BLOCK"] = 48  # no power of two
    assert "CompilationError" in compile_launch(launch, "sm_90").failure


@pytest.mark.parametrize("group", GROUPS, ids=str)
def test_table_is_whole(group):
    target, kind, width = group
    dtype = "fp32" if kind == "fp32" else "bf16"
    kernels = ["inner_step", "apply_model", "prepare_tokens", "convolve_back"]
    for mse in (False, True):
        kernels += [
            f"key_pass {makes}" for makes in configs.backward_launches(target, "key_pass", dtype, width, mse=mse)
        ]
    kernels += [f"query_pass {makes}" for makes in configs.backward_launches(target, "query_pass", dtype, width)]
    for kernel in kernels:
        row = configs.config(target, kernel, dtype, width)
        assert row is not None, kernel
        assert row.shared <= configs.SHARED[target]
        makes = kernel.partition(" ")[2]
        if "W" in makes and makes != "W":  # tokens need all hidden units in one program
            assert row.hidden >= width, kernel


def test_head_sizes_that_must_hold():
    for target in configs.SHARED:
        for dtype in ("bf16", "fp16"):
            for dim in (64, 128):
                assert offline.refused(target, dtype, dim) is None


def test_refusals_of_the_table():
    assert "no table of Triton configurations for gfx1100" in configs.refuse("gfx1100", "bf16", 64, None)
    assert "no Triton configuration for bf16 heads of 256" in configs.refuse("sm_90", "bf16", 256, None)
    assert configs.refuse("sm_90", "bf16", 64, 227 * 1024) is None
    assert "shared memory" in configs.refuse("sm_90", "bf16", 64, 48 * 1024)


def test_no_token_count_in_a_kernel():
    """Another resolution, batch or number of heads must not compile anew."""
    one = {launch.key for launch in launches("sm_90", Call(tokens=4096))}
    assert {launch.key for launch in launches("sm_90", Call(tokens=65536, batch=3))} == one


def test_splits_come_from_shapes():
    call = Call(tokens=16384)
    grids = [{launch.name: launch.grid for launch in launches(target, call)} for target in ("sm_90", "gfx942")]
    splits = {grid[name][1] for grid in grids for name in ("part_stats", "inner_step", "key_pass W", "query_pass W")}
    assert splits == {19}  # 48 rows and heads, at most 1,024 programs, splits of 128 tokens or a multiple


def test_roofline():
    shape = roofline.Shape(16384)
    assert shape.array == 24 * 16384 * 64 * 2
    forward = roofline.forward_phases(shape, fused=True)
    assert sum(p.bytes for p in forward) == 5 * shape.array  # keys twice, values, queries, output
    assert sum(p.matrix for p in forward) == 9 * 2 * 24 * 16384 * 64 * 64
    apart = roofline.forward_phases(shape, fused=False)
    assert sum(p.bytes for p in apart) == 9 * shape.array
    h100, h200 = roofline.CHIPS
    step = next(p for p in forward if p.name == "inner step")
    assert step.seconds(h100) == max(step.bytes / 3.35e12, step.matrix / 989e12, step.vector / 67e12)
    assert step.seconds(h200) <= step.seconds(h100)
    assert roofline.table((4096,)).count("\n") > 10


def test_marks(tmp_path):
    page = tmp_path / "page.md"
    marks = ("summary", "detail", "refused", "roofline", "convolution")
    page.write_text("".join(f"<!-- {name} -->\nOUTDATED\n<!-- end -->\n" for name in marks))
    passed = Compiled(registers=168, matrix=Counter(HGMMA=4))
    offline.write_markdown(
        page, [offline.Result("sm_90", "bf16", 64, "swiglu dot", "inner_step", passed, [])], ["sm_90"]
    )
    assert "| sm_90 | bf16 | 64 | 1 | 168 |" in page.read_text()
    assert "OUTDATED" not in page.read_text()
    page.write_text("nothing")
    with pytest.raises(SystemExit, match="summary"):
        offline.write_markdown(page, [], ["sm_90"])
