"""The fused CPU kernel against the operators in float64: outputs, all gradients, and what it declines."""

import contextlib
import math
import os
import random
import subprocess
import sys
from dataclasses import dataclass, field

import pytest
import torch

from t5fx import ops
from t5fx.config import TTTConfig
from t5fx.inner import weight_names
from t5fx.kernels import cpu_build
from t5fx.kernels.cpu import CpuKernel
from t5fx.kernels.problem import Convolution, Problem, Tensors

KERNEL = CpuKernel()
if torch.backends.cpu.get_cpu_capability() != "AVX512":
    pytest.skip("the CPU kernel needs AVX-512", allow_module_level=True)

FLOATS = [torch.float32, *([torch.bfloat16] if cpu_build.has_bfloat16() else []), torch.float16]
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 1e-2}


@dataclass
class Case:
    """One random problem: everything that a call takes, and its reference in float64."""

    inner: str = "swiglu"
    loss: str = "dot"
    eps: float | None = 1.0
    batch: int = 2
    heads: int = 3
    tokens: int = 70
    queries: int | None = None
    dim: int = 16
    value_dim: int = 16
    hidden: int = 16
    prefix: int = 0
    grid: tuple[int, ...] = ()
    side: int = 3
    bias: bool = True
    masked: bool = False
    dtype: torch.dtype = torch.float32
    weight_dtype: torch.dtype = torch.float32
    layout: str = "packed"
    seed: int = 0
    problem: Problem = field(init=False)

    def __post_init__(self):
        torch.manual_seed(self.seed)
        self.queries = self.tokens if self.queries is None else self.queries
        self.problem = Problem(
            self.inner, self.loss, self.eps, self.prefix, self.grid, mask_query=self.queries == self.tokens
        )
        sizes = [(self.queries, self.dim), (self.tokens, self.dim), (self.tokens, self.value_dim)]
        self.query, self.key, self.value = (self._tokens(*size) for size in sizes)
        into, out = (self.heads, self.dim, self.hidden), (self.heads, self.hidden, self.value_dim)
        shapes = [into] * (len(weight_names(self.inner)) - 1) + [out]
        self.weights = [(torch.randn(shape) * 0.7 * shape[1] ** -0.5).to(self.weight_dtype) for shape in shapes]
        self.rate = (torch.rand(self.heads) + 0.5) * self.dim**-0.5
        self.conv_query = self.conv_key = None
        if self.grid:
            self.conv_query, self.conv_key = self._convolution(), self._convolution()
        self.mask = None
        if self.masked:
            self.mask = torch.rand(self.batch, self.tokens) < 0.7
            padding = ~self.mask[:, None, :, None]
            # Padding may hold anything.
            self.key = self.key.masked_fill(padding, math.nan)
            self.value = self.value.masked_fill(padding, math.inf)

    def _tokens(self, count, dim):
        if self.layout == "packed":  # as a qkv projection leaves them
            x = torch.randn(self.batch, count, 3, self.heads, dim)[:, :, 1].transpose(1, 2)
        elif self.layout == "heads":
            x = torch.randn(self.batch, self.heads, count, dim)
        elif self.layout == "channels first":
            x = torch.randn(self.heads, self.batch, dim, count).permute(1, 0, 3, 2)
        else:  # rows with gaps, one batch row for all
            x = torch.randn(1, count, self.heads, dim + 5)[..., 2:-3].transpose(1, 2)
            x = x.expand(self.batch, -1, -1, -1)
        return (x * 1.5 + torch.randn(dim)).to(self.dtype) if self.layout == "heads" else x.to(self.dtype)

    def _convolution(self):
        shape = (self.heads * self.dim, 1, *[self.side] * len(self.grid))
        weight = torch.randn(shape) * 0.5 * self.side ** (-len(self.grid) / 2)
        bias = torch.randn(shape[0]) * 0.3 if self.bias else None
        return Convolution(weight.to(self.weight_dtype), None if bias is None else bias.to(self.weight_dtype))

    @property
    def inputs(self):
        tensors = (self.query, self.key, self.value, self.weights, self.conv_query, self.conv_key, self.mask)
        return Tensors(*tensors), self.rate

    def refusal(self):
        return KERNEL.refuse(self.problem, self.inputs[0])

    def leaves(self):
        named = {"query": self.query, "key": self.key, "value": self.value, "rate": self.rate}
        named.update({f"w{i}": weight for i, weight in enumerate(self.weights)})
        for name, conv in (("conv_query", self.conv_query), ("conv_key", self.conv_key)):
            if conv is not None:
                named[f"{name}.weight"] = conv.weight
                if conv.bias is not None:
                    named[f"{name}.bias"] = conv.bias
        return named

    def reference(self):
        """Output, cotangent and gradients, through the operators and autograd. The rate is one a head here."""
        x = {name: tensor.detach().double().requires_grad_() for name, tensor in self.leaves().items()}
        query, key, (prefix, grid) = x["query"], x["key"], (self.prefix, self.grid)
        if self.eps is not None:
            key = ops.key_norm(key, self.eps, self.mask)
        if grid:
            query_mask = self.mask if self.problem.mask_query else None
            query = ops.dwc(query, x["conv_query.weight"], x.get("conv_query.bias"), prefix, grid, query_mask)
            key = ops.dwc(key, x["conv_key.weight"], x.get("conv_key.bias"), prefix, grid, self.mask)
        weights = [x[f"w{i}"] for i in range(len(self.weights))]
        steps = ops.inner_step(key, x["value"], weights, self.inner, self.loss, 1.0, 1.0, self.mask)
        pairs = list(zip(weights, steps, strict=True))
        fast = [weight + x["rate"][:, None, None] * (step - weight) for weight, step in pairs]
        output = ops.inner_apply(query, fast, self.inner)
        # Along the change that the step makes: else d rate is a sum of both signs that cancels, and any dtype's
        # rounding is large beside it.
        change = output.detach() - ops.inner_apply(query, weights, self.inner).detach()
        cotangent = torch.randn_like(output) + 2 * change / change.square().mean().sqrt().clamp(min=1e-9)
        cotangent = cotangent.to(self.dtype)
        names = list(x)
        gradients = torch.autograd.grad(output, list(x.values()), cotangent.double())
        return output.detach(), cotangent, dict(zip(names, gradients, strict=True))

    def kernel(self, cotangent):
        output, saved = KERNEL.forward(self.problem, *self.inputs)
        found = KERNEL.backward(self.problem, *self.inputs, saved, cotangent)
        named = {"query": found.query, "key": found.key, "value": found.value, "rate": found.rate}
        named.update({f"w{i}": gradient for i, gradient in enumerate(found.weights)})
        for name in ("conv_query", "conv_key"):
            conv = getattr(found, name)
            if conv is not None:
                named[f"{name}.weight"] = conv.weight
                if conv.bias is not None:
                    named[f"{name}.bias"] = conv.bias
        return output, named


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


class TestRefusals:
    def test_none_on_fake_tensors(self):
        from torch._subclasses import FakeTensorMode

        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            case = Case(grid=(7, 10))
            case.query, case.key, case.value = (mode.from_tensor(t) for t in (case.query, case.key, case.value))
            assert case.refusal() is None

    def test_float64(self):
        assert "float64" in Case(dtype=torch.float64).refusal()
        assert "float64" in Case(weight_dtype=torch.float64).refusal()

    def test_dtypes_that_differ(self):
        case = Case()
        case.value = case.value.bfloat16()
        assert "differ in dtype" in case.refusal()

    def test_other_devices(self):
        case = Case()
        case.key = case.key.to("meta")
        assert "key is on meta" in case.refusal()

    def test_custom_inner_model(self):
        case = Case()
        case.problem = Problem("mine:Model@0", "dot", 1.0, 0, (), True)
        assert "mine:Model" in case.refusal()

    def test_large_heads(self):
        assert "head_dim 1024" in Case(dim=1024).refusal()

    def test_no_keys(self):
        assert "no keys" in Case(tokens=0).refusal()

    def test_no_bfloat16_instructions(self, monkeypatch):
        monkeypatch.setattr("t5fx.kernels.cpu.has_bfloat16", lambda: False)
        assert "AVX512_BF16" in Case(dtype=torch.bfloat16).refusal()
        assert Case().refusal() is None

    def test_another_cpu(self, monkeypatch, fresh_build):
        monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
        assert "AVX-512" in Case().refusal()

    def test_no_compiler(self, monkeypatch, fresh_build):
        def none():
            raise RuntimeError("nothing here")

        monkeypatch.setattr("torch._inductor.cpp_builder.get_cpp_compiler", none)
        assert "no C++ compiler was found (set CXX): nothing here" in Case().refusal()

    def test_a_compiler_that_fails(self, monkeypatch, fresh_build):
        monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(fresh_build))
        monkeypatch.setattr("torch._inductor.cpp_builder.get_cpp_compiler", lambda: "false")
        assert "false failed" in Case().refusal()
        assert not list(fresh_build.rglob("*.so"))

    def test_a_folder_that_can_not_be_written(self, monkeypatch, fresh_build):
        (fresh_build / "t5fx").write_text("in the way")
        monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(fresh_build))
        assert "can't be written or loaded" in Case().refusal()


@pytest.fixture
def fresh_build(tmp_path):
    cpu_build._outcome.cache_clear()
    yield tmp_path
    cpu_build._outcome.cache_clear()


def test_two_processes_build_at_once(tmp_path):
    code = "import torch\nfrom t5fx.kernels.cpu_build import library\nprint('built', bool(library().t5fx_forward))\n"
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-c", code]
    running = [subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    assert all("built True" in process.communicate()[0] for process in running)
    assert len(list(tmp_path.rglob("*.so"))) == 1
    assert [path.name for path in tmp_path.glob("t5fx/*") if path.suffix != ".so"] == []
