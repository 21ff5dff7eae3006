"""The Triton kernels against float64 autograd: in Triton's interpreter, and natively where there is a GPU."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

import triton_checks
from triton_checks import CASES, random_case

from t5fx.kernels.problem import Convolution, Problem, Tensors
from t5fx.kernels.triton_launch import TritonKernel

CHECKS = Path(triton_checks.__file__)
gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
PLAIN = Problem("swiglu", "dot", 1.0, 0, (), False)


def interpreted(names):
    """The lines of triton_checks.py for some cases, by name."""
    env = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    command = [sys.executable, str(CHECKS), *map(str, names)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert [line["case"] for line in lines] == [str(name) for name in names]
    return lines


def assert_right(lines):
    for line in lines:
        assert "failure" not in line, line["failure"]
        assert not line["wrong"], f"case {line['case']}: relative errors (error, limit): {line['wrong']}"


@pytest.fixture(scope="module")
def lines():
    """All cases of the normal run in one process: it takes seconds to start."""
    names = [*CASES, *range(6)]
    return dict(zip(map(str, names), interpreted(names), strict=True))


@pytest.mark.parametrize("name", [*CASES, *map(str, range(6))])
def test_interpreted(name, lines):
    assert_right([lines[name]])


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, 100, 10))
def test_interpreted_100(first):
    assert_right(interpreted(range(first, first + 10)))


@pytest.mark.gpu
@gpu
@pytest.mark.parametrize("name", CASES)
def test_native(name):
    triton_checks.check(CASES[name], "cuda")


@pytest.mark.gpu
@gpu
@pytest.mark.parametrize("seed", range(100))
def test_native_random(seed):
    triton_checks.check(random_case(seed), "cuda")


@pytest.mark.gpu
@gpu
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("head_dim", [16, 32, 64, 72, 80, 96, 128])
def test_native_head_sizes(head_dim, dtype):
    case = triton_checks.Case(tokens=1025, prefix=1, grid=(32, 32), sides=(3, 3), head_dim=head_dim, dtype=dtype)
    triton_checks.check(case, "cuda")


@pytest.mark.gpu
@gpu
def test_native_twice_equal():
    case = triton_checks.Case(tokens=4096, heads=4, grid=(64, 64), sides=(3, 3), head_dim=64, dtype="bf16", loss="mse")
    first, again = triton_checks.run(case, "cuda")[0], triton_checks.run(case, "cuda")[0]
    for name, x in first.items():
        assert torch.equal(x, again[name]), f"{name} differs from run to run"


def refusal(problem=PLAIN, dtype=torch.float32, dim=16, conv=None, **changes):
    given = {
        "query": torch.empty(1, 2, 9, dim, dtype=dtype, device="meta"),
        "key": torch.empty(1, 2, 9, dim, dtype=dtype, device="meta"),
        "value": torch.empty(1, 2, 9, dim, dtype=dtype, device="meta"),
        **changes,
    }
    weights = [torch.empty(2, dim, dim, device="meta") for _ in range(3)]
    return TritonKernel().refuse(problem, Tensors(*given.values(), weights, conv, conv, None))


def test_refuses_other_devices():
    assert "CUDA and HIP" in refusal()


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"dtype": torch.float64}, "float64"),
        ({"dim": 8}, "head_dim from 16 to 128, not 8"),
        ({"dim": 160}, "head_dim from 16 to 128, not 160"),
        ({"value": torch.empty(1, 2, 9, 16, dtype=torch.bfloat16, device="meta")}, "different dtypes"),
        ({"problem": Problem("swiglu", "dot", 1.0, 0, (3, 3), False),
          "conv": Convolution(torch.empty(32, 1, 4, 4, device="meta"), None)}, "odd sides"),
        ({"problem": Problem("swiglu", "dot", 1.0, 0, (3, 3), False),
          "conv": Convolution(torch.empty(32, 1, 9, 9, device="meta"), None)}, "at most 49 taps"),
        ({"problem": Problem("custom:Inner@1", "dot", 1.0, 0, (), False)}, "custom:Inner@1"),
    ],
)  # fmt: skip
def test_refuses(changes, reason, monkeypatch):
    # As if on a GPU that has a row for everything: only the call itself is looked at.
    monkeypatch.setattr("t5fx.kernels.triton_launch.target_of", lambda device: "sm_90")
    monkeypatch.setattr("t5fx.kernels.triton_launch._refuse_device", lambda device: None)
    monkeypatch.setattr("t5fx.kernels.triton_launch.shared_memory", lambda device: None)
    assert refusal() is None
    assert reason in refusal(**changes)
