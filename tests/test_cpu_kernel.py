"""The fused CPU kernel against the operators in float64: outputs, all gradients, bits and memory."""

import contextlib
import math
import random

import pytest
import torch
from cpu_cases import FLOATS, KERNEL, TOLERANCE, Case

from t5fx import ops
from t5fx.config import TTTConfig
from t5fx.inner import weight_names


@pytest.fixture(autouse=True)
def _poison():
    """Every new tensor starts as nan: what a kernel does not write shows."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    yield
    torch.use_deterministic_algorithms(before)


def check(case, tolerance=None):
    assert case.refusal() is None
    tolerance = tolerance or TOLERANCE[case.dtype]
    if case.dtype == torch.bfloat16 and case.tokens < 64:
        tolerance *= 2  # too few tokens to average the roundings of 8 bits
    expected, cotangent, gradients = case.reference()
    output, found = case.kernel(cotangent)
    assert output.dtype == case.dtype
    assert output.transpose(1, 2).is_contiguous()
    assert_near("output", output, expected, tolerance)
    leaves = case.leaves()
    assert found.keys() == gradients.keys()
    for name, gradient in gradients.items():
        assert found[name].dtype == (torch.float32 if name == "rate" else leaves[name].dtype), name
        assert_near(name, found[name], gradient, tolerance)


def assert_near(name, found, expected, tolerance):
    assert found.shape == expected.shape, name
    error = (found.double() - expected).abs().max() / expected.abs().max().clamp(min=1e-30)
    assert error < tolerance, f"{name}: relative error {error:.1e}"  # a nan fails too


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("loss", ["dot", "mse"])
@pytest.mark.parametrize("inner", ["swiglu", "mlp"])
class TestEveryModel:
    def test_bare(self, inner, loss, dtype):
        check(Case(inner, loss, eps=None, dtype=dtype))

    def test_norm(self, inner, loss, dtype):
        check(Case(inner, loss, tokens=1100, dtype=dtype))

    def test_grid(self, inner, loss, dtype):
        check(Case(inner, loss, tokens=81, grid=(9, 9), dim=64, value_dim=64, hidden=64, heads=2, dtype=dtype))

    def test_everything_at_once(self, inner, loss, dtype):
        sizes = {"dim": 24, "value_dim": 40, "hidden": 33}
        check(Case(inner, loss, tokens=203, prefix=2, grid=(13, 15), masked=True, dtype=dtype, **sizes))


@pytest.mark.parametrize("dtype", FLOATS[:2], ids=str)
@pytest.mark.parametrize(
    "settings",
    [
        {"grid": (70,)},
        {"grid": (61,), "prefix": 4, "side": 7},
        {"grid": (5, 14), "side": 5, "bias": False},
        {"grid": (1, 70)},
        {"grid": (70, 1)},
        {"grid": (3, 4, 5), "prefix": 7},
        {"grid": (3, 4, 5), "prefix": 7, "side": 5, "masked": True},
        {"grid": (2, 2), "prefix": 66, "side": 9},
        {"grid": (8, 8), "prefix": 1, "queries": 65, "masked": True},
        {"queries": 5},
        {"queries": 200, "masked": True},
        {"tokens": 1},
        {"tokens": 1, "grid": (1, 1)},
        {"tokens": 2100, "grid": (40, 50), "prefix": 77, "batch": 1, "masked": True},
        {"dim": 128, "value_dim": 128, "hidden": 128, "heads": 1},
        {"dim": 72, "value_dim": 80, "hidden": 144},
        {"dim": 8, "value_dim": 8, "hidden": 32},
        {"dim": 1, "value_dim": 3, "hidden": 5, "tokens": 40},
    ],
    ids=str,
)
def test_shapes(settings, dtype):
    check(Case(**settings, dtype=dtype))


def test_gradients_in_the_weights_own_dtype():
    check(Case(grid=(7, 10), weight_dtype=torch.bfloat16), tolerance=5e-3)


@pytest.mark.parametrize("seed", range(100))
def test_random_shapes(seed):
    choose = random.Random(seed)
    axes = choose.choice([0, 1, 2, 2, 3])
    grid = tuple(choose.randint(1, {1: 150, 2: 16, 3: 7}[axes]) for _ in range(axes))
    prefix, suffix = choose.choice([(0, 0), (1, 0), (5, 3), (0, 20)])
    tokens = prefix + math.prod(grid) + suffix if grid else choose.randint(2, 300)
    check(
        Case(
            inner=choose.choice(["swiglu", "mlp"]),
            loss=choose.choice(["dot", "mse"]),
            eps=choose.choice([None, 1.0, 0.01]) if tokens > 8 else 1.0,
            batch=choose.randint(1, 3),
            heads=choose.randint(2, 5),
            tokens=tokens,
            queries=None if grid or choose.random() < 0.7 else choose.randint(1, 300),
            dim=choose.choice([8, 16, 24, 32, 48, 64, 72]),
            value_dim=choose.choice([8, 16, 20, 64]),
            hidden=choose.choice([8, 16, 36, 64, 100]),
            prefix=prefix,
            grid=grid,
            side=choose.choice([3, 3, 5, 7]),
            bias=choose.random() < 0.8,
            masked=choose.random() < 0.3 and tokens > 8,
            layout=choose.choice(["packed", "heads", "channels first", "gaps"]),
            dtype=choose.choice(FLOATS[:2]),
            seed=seed,
        )
    )


def test_whole_site_as_the_operators_compose_it():
    case = Case(tokens=37, prefix=1, grid=(6, 6), masked=True)
    config = TTTConfig(inner_lr=2.0)
    params = dict(zip(weight_names("swiglu"), case.weights, strict=True))
    for name, conv in (("dwc_q", case.conv_query), ("dwc_k", case.conv_key)):
        params.update({f"{name}.weight": conv.weight, f"{name}.bias": conv.bias})
    params = {name: tensor.double() for name, tensor in params.items()}
    tokens = (case.query.double(), case.key.double(), case.value.double())
    expected = ops.ttt_attention(*tokens, params, config, prefix=1, grid=(6, 6), mask=case.mask)
    case.rate = torch.full((case.heads,), case.dim**-0.5 * config.inner_lr)
    output, _ = KERNEL.forward(case.problem, *case.inputs)
    assert_near("output", output, expected, 1e-5)


def test_a_row_without_a_token_divides_by_one():
    case = Case(tokens=16, grid=(4, 4), masked=True)
    case.mask[1] = False
    check(case)


def test_a_rate_of_zero_has_a_gradient():
    case = Case(tokens=50)
    case.rate[0] = 0
    check(case)


def test_keys_far_from_zero():
    case = Case(tokens=2000, eps=1e-5)
    case.key = (case.key.double() * 0.01 + 100).float()
    _, saved = KERNEL.forward(case.problem, *case.inputs)
    var, mean = torch.var_mean(case.key.double(), dim=2, correction=0)
    expected = torch.stack([mean, torch.rsqrt(var + 1e-5)], dim=2)
    for found, want in zip(saved.stats.unbind(2), expected.unbind(2), strict=True):
        assert_near("stats", found, want, 1e-5)


def test_saturated_activations_stay_finite():
    case = Case(tokens=64)
    case.query = case.query * 1e4
    check(case, tolerance=1e-4)


def test_expanded_cotangent():
    case = Case(tokens=30)
    output, saved = KERNEL.forward(case.problem, *case.inputs)
    one = torch.ones(()).expand(output.shape)
    found = KERNEL.backward(case.problem, *case.inputs, saved, one)
    same = KERNEL.backward(case.problem, *case.inputs, saved, torch.ones(output.shape))
    assert torch.equal(found.key, same.key)


@contextlib.contextmanager
def threads(count):
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", FLOATS[:2], ids=str)
def test_same_bits_on_any_number_of_threads_and_every_time(dtype):
    case = Case(tokens=3000, grid=(50, 60), heads=2, batch=1, dtype=dtype)
    _, cotangent, _ = case.reference()

    def run(count):
        with threads(count):
            output, gradients = case.kernel(cotangent)
        return [output, *gradients.values()]

    first = run(1)
    for count in (1, 2, 2, 3):
        assert all(torch.equal(a, b) for a, b in zip(first, run(count), strict=True))


def test_forward_keeps_no_tokens():
    # What forward allocates beyond its results, next to its inputs and outputs.
    case = Case(tokens=4096, grid=(64, 64), heads=4, batch=1, dim=64, value_dim=64, hidden=64)
    torch.use_deterministic_algorithms(False)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        output, saved = KERNEL.forward(case.problem, *case.inputs)
    allocated = sum(max(0, event.cpu_memory_usage) for event in profile.events() if event.cpu_parent is None)
    results = sum(t.numel() * t.element_size() for t in (output, saved.stats, *saved.fast))
    tokens = sum(t.numel() * t.element_size() for t in (case.query, case.key, case.value, output))
    assert allocated >= results  # the profiler saw them
    assert allocated - results < 0.15 * tokens
