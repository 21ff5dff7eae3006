"""Cases for the Triton kernels, and what is checked of each: the output and every gradient against float64 autograd.

Run as a script, under TRITON_INTERPRET=1 and on the CPU, it prints one line of JSON a case; tests/test_triton.py does
so in another process, since Triton reads that variable when it is imported. On a GPU the tests call :func:`check`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import random
import sys
from dataclasses import dataclass

import torch

from t5fx import TTTConfig, ops
from t5fx.inner import INNER
from t5fx.kernels.problem import Convolution, Problem, Tensors

LIMITS = {torch.float32: 1e-5, torch.float16: 1e-2, torch.bfloat16: 1e-2}
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Case:
    """One call. sides: of the convolutions, empty for none. parameters: dtype of weights, None for the inputs'.

    padding: what masked keys and values hold. configuration: changes to every row of the table (block, hidden,
    convolve), so that the interpreter goes through slices and prepared tokens at small sizes. launches: of the backward
    passes.
    """

    inner: str = "swiglu"
    loss: str = "dot"
    dtype: str = "fp32"
    batch: int = 1
    heads: int = 2
    queries: int | None = None
    tokens: int = 30
    head_dim: int = 16
    value_dim: int | None = None
    hidden: int | None = None
    eps: float | None = 1.0
    prefix: int = 0
    grid: tuple[int, ...] = ()
    sides: tuple[int, ...] = ()
    bias: bool = True
    mask: bool = False
    padding: float = float("nan")
    rate: float = 0.5
    parameters: str | None = None
    configuration: dict[str, int] = dataclasses.field(default_factory=dict)
    launches: dict[str, list[str]] = dataclasses.field(default_factory=dict)
    split_tokens: int = 256
    seed: int = 0


CASES = {
    "plain": Case(),
    "mlp": Case(inner="mlp", loss="mse", tokens=33, head_dim=24, value_dim=16, hidden=40, prefix=2, grid=(5, 6),
                sides=(3, 3), configuration={"hidden": 16, "block": 32},
                launches={"query_pass": ["T", "W"], "key_pass": ["V", "K", "W"]}),
    "mse": Case(loss="mse", tokens=40, head_dim=16, value_dim=32, hidden=24, grid=(5, 8), sides=(3, 3), mask=True,
                launches={"query_pass": ["T", "W"], "key_pass": ["V", "K", "W"]}),
    "masked": Case(batch=2, tokens=50, value_dim=20, hidden=32, prefix=1, grid=(6, 8), sides=(3, 3), mask=True,
                   split_tokens=16, launches={"query_pass": ["T", "W"], "key_pass": ["VK", "W"]},
                   configuration={"hidden": 16, "convolve": False}),
    "video": Case(inner="mlp", loss="dot", tokens=29, grid=(2, 3, 4), prefix=3, sides=(3, 1, 3), bias=False, eps=None),
    "line": Case(tokens=20, grid=(18,), prefix=1, sides=(5,), eps=None, mask=True),
    "bare": Case(loss="mse", eps=None, tokens=1),
    "cross": Case(queries=7, tokens=31, mask=True, inner="mlp", eps=1e-5, rate=4.0),
    "bf16": Case(dtype="bf16", tokens=48, grid=(6, 8), sides=(3, 3), parameters="fp32", configuration={"block": 64}),
    "fp16": Case(dtype="fp16", loss="mse", tokens=40, grid=(6, 6), prefix=2, sides=(3, 3), mask=True),
}  # fmt: skip


def random_case(seed: int) -> Case:
    """A case by its number: small, since the interpreter needs about 0.1 ms an operation."""
    rng = random.Random(seed)
    sides = rng.choice([(), (), (3, 3), (3, 3), (5, 5), (3, 3, 3), (3,)])
    grid = tuple(rng.randint(1, 6 if len(sides) < 3 else 3) for _ in sides)
    cells = 1
    for side in grid:
        cells *= side
    prefix = rng.randint(0, 3)
    tokens = prefix + cells + rng.randint(0, 3) if sides else rng.randint(1, 60)
    one_slice = rng.random() < 0.5
    launches = {"query_pass": ["T", "W"], "key_pass": ["V", "K", "W"]}
    if one_slice:  # only then can a launch make the gradients of tokens and of weights
        launches = {"query_pass": ["TW"], "key_pass": ["V", "KW"]}
    return Case(
        inner=rng.choice(["swiglu", "mlp"]),
        loss=rng.choice(["dot", "mse"]),
        dtype=rng.choice(["fp32", "fp32", "fp16", "bf16"]),
        batch=rng.randint(1, 2),
        heads=rng.randint(1, 3),
        queries=None if sides or rng.random() < 0.5 else rng.randint(1, 40),
        tokens=tokens,
        head_dim=rng.choice([16, 17, 24, 32, 40, 64, 72, 80]),
        value_dim=rng.choice([None, None, 16, 19, 48]),
        hidden=rng.choice([None, None, 16, 21, 64, 96]),
        eps=rng.choice([1.0, 1.0, 1e-5 if tokens > 8 else 1.0, None]),
        prefix=prefix,
        grid=grid,
        sides=sides,
        bias=rng.random() < 0.7,
        mask=rng.random() < 0.5,
        rate=rng.choice([0.125, 1.0, 0.0]),
        parameters=rng.choice([None, "fp32"]),
        configuration={"hidden": 128 if one_slice else rng.choice([16, 32]), "block": rng.choice([16, 32, 64]),
                       "convolve": rng.random() < 0.5},
        launches=launches,
        split_tokens=rng.choice([16, 256]),
        seed=seed,
    )  # fmt: skip


def scattered(shape: tuple[int, ...], dtype: torch.dtype, rng: random.Random, device: str) -> torch.Tensor:
    """Random numbers with the axes in memory in any order and gaps between them; channels next to each other."""
    order = [*rng.sample(range(3), 3), 3]
    gaps = [*(rng.randint(0, 2) for _ in range(3)), rng.choice([0, 8, 24, 3])]  # one that makes the kernels copy
    memory = torch.randn([shape[axis] + gap for axis, gap in zip(order, gaps, strict=True)], dtype=torch.float64)
    for place, axis in enumerate(order):
        memory = memory.narrow(place, 0, shape[axis])
    # The gaps stay gaps on the device: empty_strided keeps what is between the numbers.
    view = memory.permute(*(order.index(axis) for axis in range(4)))
    placed = torch.empty_strided(view.shape, view.stride(), dtype=dtype, device=device)
    return placed.copy_(view)


def make(case: Case, device: str) -> tuple[Problem, dict[str, torch.Tensor | None], torch.Tensor]:
    """The problem, its tensors by name, and the gradient of the output."""
    rng = random.Random(case.seed)
    torch.manual_seed(case.seed)
    dtype = DTYPES[case.dtype]
    parameters = DTYPES[case.parameters or case.dtype]
    queries = case.tokens if case.queries is None else case.queries
    value_dim, hidden = case.value_dim or case.head_dim, case.hidden or case.head_dim
    lead = (case.batch, case.heads)
    names = INNER[case.inner].init(case.heads, case.head_dim, value_dim, hidden, std=0.15, dtype=torch.float64)
    tensors: dict[str, torch.Tensor | None] = {
        "query": scattered((*lead, queries, case.head_dim), dtype, rng, device),
        "key": scattered((*lead, case.tokens, case.head_dim), dtype, rng, device),
        "value": scattered((*lead, case.tokens, value_dim), dtype, rng, device),
        **{name: weight.to(parameters).to(device) for name, weight in names.items()},
    }
    assert tensors["key"] is not None
    assert tensors["value"] is not None
    if case.eps is not None:
        tensors["key"] += 2.0  # a mean that a naive variance would trip over
    if case.sides:
        for name in ("dwc_q", "dwc_k"):
            channels = case.heads * case.head_dim
            tensors[f"{name}.weight"] = (0.3 * torch.randn(channels, 1, *case.sides)).to(parameters).to(device)
            if case.bias:
                tensors[f"{name}.bias"] = (0.1 * torch.randn(channels)).to(parameters).to(device)
    mask = None
    if case.mask:
        mask = torch.rand(case.batch, case.tokens) < 0.7
        mask[0, 0] = True
        mask = mask.to(device)
        for name in ("key", "value"):
            tensors[name].masked_fill_(~mask[:, None, :, None], case.padding)
    tensors["mask"] = mask
    grad = scattered((*lead, queries, value_dim), dtype, rng, device)
    problem = Problem(
        case.inner, case.loss, case.eps, case.prefix, case.grid, mask is not None and queries == case.tokens
    )
    return problem, tensors, grad


def reference(
    case: Case, tensors: dict[str, torch.Tensor | None], grad: torch.Tensor
) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
    """Output and gradients by autograd through :func:`t5fx.ops.ttt_attention`, float64 on the CPU; their sizes.

    The rate is no tensor there. Its gradient is taken from the operators with rate 1, of which the fast weights are
    ``w + rate * (step - w)``.
    """
    mask = None if tensors["mask"] is None else tensors["mask"].cpu()
    tensors = {name: x.cpu().double() if x is not None and name != "mask" else mask for name, x in tensors.items()}
    output, found = operators(case, tensors, grad.cpu().double())
    query, key, value = (tensors[name] for name in ("query", "key", "value"))
    params = {name: x for name, x in tensors.items() if name not in ("query", "key", "value", "mask")}

    rate = torch.full((case.heads,), case.rate, dtype=torch.float64, requires_grad=True)
    with torch.no_grad():
        if case.eps is not None:
            key = ops.key_norm(key, case.eps, mask)
        if case.sides:
            both = mask if query.shape[2] == key.shape[2] else None
            query = ops.dwc(query, params["dwc_q.weight"], params.get("dwc_q.bias"), case.prefix, case.grid, both)
            key = ops.dwc(key, params["dwc_k.weight"], params.get("dwc_k.bias"), case.prefix, case.grid, mask)
        weights = [x for name, x in params.items() if not name.startswith("dwc")]
        steps = ops.inner_step(key, value, weights, case.inner, case.loss, 1.0, 1.0, mask)
    fast = [w + rate[:, None, None] * (s - w) for w, s in zip(weights, steps, strict=True)]
    again = ops.inner_apply(query, fast, case.inner)
    torch.testing.assert_close(again, output)
    *slopes, found["rate"] = torch.autograd.grad(again, [*fast, rate], grad.cpu().double())
    sizes = {name: x.abs().max().item() for name, x in found.items()}
    if case.dtype != "fp32":
        # One number is left of thousands of both signs: with rounded operands it is as good as they are large.
        terms = [(d * (s - w)).abs().sum((0, 2, 3)) for d, s, w in zip(slopes, steps, weights, strict=True)]
        sizes["rate"] = sum(terms).max().item()
    sizes["output"] = output.abs().max().item()
    return {"output": output, **found}, sizes


def operators(
    case: Case, tensors: dict[str, torch.Tensor | None], grad: torch.Tensor
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Output and gradients by autograd through :func:`t5fx.ops.ttt_attention`, in the dtypes that the tensors have."""
    leaves = {name: x.detach().requires_grad_() for name, x in tensors.items() if x is not None and name != "mask"}
    config = TTTConfig(
        inner=case.inner, loss=case.loss, key_norm=case.eps is not None, key_norm_eps=case.eps or 1.0,
        dwc=3 if case.sides else None,
    )  # fmt: skip
    params = {name: x for name, x in leaves.items() if name not in ("query", "key", "value")}
    inputs = (leaves[name] for name in ("query", "key", "value"))
    site = {"prefix": case.prefix, "grid": case.grid or None, "mask": tensors["mask"]}
    output = ops.ttt_attention(*inputs, params, config, scale=case.rate, **site)
    gradients = torch.autograd.grad(output, list(leaves.values()), grad)
    return output.detach(), dict(zip(leaves, gradients, strict=True))


@contextlib.contextmanager
def configured(case: Case):
    """The case's changes to the table of configurations, and its splits."""
    from t5fx.kernels import configs, triton_gradient, triton_phases, triton_site

    plain, launches = configs.config, configs.backward_launches

    def config(*row):
        found = plain(*row)
        changes = {name: value for name, value in case.configuration.items() if name in ("hidden", "block", "convolve")}
        return found and dataclasses.replace(found, **changes)

    def backward_launches(target, kernel, *args, **kwargs):
        return case.launches.get(kernel) or launches(target, kernel, *args, **kwargs)

    before = triton_site.SPLIT_TOKENS
    triton_phases.config, triton_gradient.backward_launches = config, backward_launches
    triton_site.SPLIT_TOKENS = case.split_tokens
    torch.use_deterministic_algorithms(True)  # fills new memory with nan
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)
        triton_phases.config, triton_gradient.backward_launches = plain, launches
        triton_site.SPLIT_TOKENS = before


def run(case: Case, device: str = "cpu") -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], dict[str, float]]:
    """What the kernels make of a case, the reference, and what errors are measured against."""
    from t5fx.kernels.triton_launch import TritonKernel

    problem, tensors, grad = make(case, device)
    names = [name for name in tensors if name in ("w1", "w2", "w3")]
    weights = [tensors[name] for name in names]
    rate = torch.full((case.heads,), case.rate, device=device)
    conv_query, conv_key = (
        Convolution(tensors[f"{name}.weight"], tensors.get(f"{name}.bias")) if case.sides else None
        for name in ("dwc_q", "dwc_k")
    )
    inputs = [tensors[name] for name in ("query", "key", "value")]
    given = Tensors(*inputs, weights, conv_query, conv_key, tensors["mask"])
    kernel = TritonKernel()
    with configured(case):
        reason = kernel.refuse(problem, given)
        assert reason is None, reason
        output, saved = kernel.forward(problem, given, rate)
        gradients = kernel.backward(problem, given, rate, saved, grad)
    assert output.transpose(1, 2).is_contiguous(), "the output does not lie as [B, Nq, H, Dv]"
    found = {"output": output, "query": gradients.query, "key": gradients.key, "value": gradients.value}
    found |= dict(zip(names, gradients.weights, strict=True))
    for name in ("dwc_q", "dwc_k"):
        convolution = gradients.conv_query if name == "dwc_q" else gradients.conv_key
        assert (convolution is None) == (not case.sides)
        if convolution is not None:
            found[f"{name}.weight"] = convolution.weight
            if convolution.bias is not None:
                found[f"{name}.bias"] = convolution.bias
    for name, x in found.items():
        if name != "output":
            assert x.dtype == tensors[name].dtype, f"d {name} is {x.dtype}, {name} is {tensors[name].dtype}"
            assert x.shape == tensors[name].shape
    found["rate"] = gradients.rate
    return found, *reference(case, tensors, grad)


def errors(case: Case, device: str = "cpu") -> dict[str, float]:
    """max |x - reference| / max |reference| of the output and each gradient; nan stays nan."""
    found, expected, sizes = run(case, device)
    assert found.keys() == expected.keys(), (found.keys(), expected.keys())
    return {name: _apart(x, expected[name], sizes[name]) for name, x in found.items()}


def _apart(x: torch.Tensor, expected: torch.Tensor, size: float) -> float:
    apart = (x.detach().cpu().double() - expected).abs().max().item()
    return apart / size if size > 0 else apart


def limits(case: Case) -> dict[str, float]:
    """What errors must stay below: :data:`LIMITS`. On a handful of tokens rounding does not average out, and the
    operators themselves, in the same dtype, can be further off than that. They keep float32 between the GEMMs of a
    step, the kernels round operands to the inputs' dtype as tensor cores take them: then three times their error."""
    limit = LIMITS[DTYPES[case.dtype]]
    _, tensors, grad = make(case, "cpu")
    expected, sizes = reference(case, tensors, grad)
    if case.dtype == "fp32":
        return dict.fromkeys(expected, limit)
    output, gradients = operators(case, tensors, grad)
    own = {"output": output, **gradients}
    return {
        name: max(limit, 3 * _apart(own[name], expected[name], sizes[name])) if name in own else limit
        for name in expected
    }


def wrong(case: Case, device: str = "cpu") -> dict[str, tuple[float, float]]:
    """What is further off than its limit: name -> (error, limit)."""
    allowed = limits(case)
    return {name: (error, allowed[name]) for name, error in errors(case, device).items() if not error < allowed[name]}


def check(case: Case, device: str = "cpu") -> None:
    found = wrong(case, device)
    assert not found, f"relative errors (error, limit): {found} in {case}"


def main(names: list[str]) -> None:
    for name in names:
        case = random_case(int(name)) if name.isdigit() else CASES[name]
        line: dict[str, object] = {"case": name, "dtype": case.dtype}
        try:
            line["wrong"] = wrong(case)
        except Exception as error:
            line["failure"] = f"{type(error).__name__}: {error} in {case}"
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
