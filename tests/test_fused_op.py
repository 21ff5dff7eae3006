"""The fused operator and its plain kernel: equal to the four operators, and sound for every compiler."""

import itertools

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from t5fx.config import TTTConfig
from t5fx.cost import ttt_flops
from t5fx.errors import ConfigError
from t5fx.kernels import dispatch, flops, op  # noqa: F401  (flops registers)
from t5fx.kernels.reference import ReferenceKernel
from t5fx.ops import ttt_attention

B, H, D, HIDDEN = 2, 2, 6, 5
VARIANTS = list(itertools.product(("swiglu", "mlp"), ("dot", "mse")))


def randn(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def make(inner="swiglu", loss="dot", *, grid=(3, 4), prefix=1, suffix=2, masked=False, dwc=3, bias=True, eps=0.5,
         queries=None, dtype=torch.float64):  # fmt: skip
    """Arguments of the fused operator, and the function that computes the same with the four."""
    tokens = prefix + torch.Size(grid).numel() + suffix
    config = TTTConfig(inner=inner, loss=loss, key_norm=eps is not None, key_norm_eps=eps or 1.0, dwc=dwc)
    into, out = (H, D, HIDDEN), (H, HIDDEN, D)
    shapes = [into, into, out] if inner == "swiglu" else [into, out]
    weights = [0.5 * randn(*s, seed=i, dtype=dtype) for i, s in enumerate(shapes)]
    q, k, v = (
        randn(B, n, H, D, seed=9 + i, dtype=dtype).transpose(1, 2)
        for i, n in enumerate((queries or tokens, tokens, tokens))
    )
    convs = [None] * 4
    if dwc is not None:
        side = (H * D, 1, *[dwc] * len(grid))
        convs = [0.3 * randn(*side, seed=20), randn(H * D, seed=21), 0.3 * randn(*side, seed=22), randn(H * D, seed=23)]
        convs = [c.to(dtype) if bias or c.ndim > 1 else None for c in convs]
    head_lr = randn(H, seed=30, dtype=dtype).abs() + 0.5
    mask = torch.arange(tokens) < torch.tensor([[tokens - 4], [tokens]]) if masked else None
    numbers = (inner, loss, 0.7, eps, prefix, list(grid) if dwc else [], masked and queries is None, "reference")

    def four(q, k, v, weights, head_lr, qw, qb, kw, kb, mask, *_):
        names = [f"w{i + 1}" for i in range(len(weights))]
        params = dict(zip(names, weights, strict=True), inner_lr=head_lr)
        params |= {n: p for n, p in zip(("dwc_q.weight", "dwc_q.bias", "dwc_k.weight", "dwc_k.bias"), (qw, qb, kw, kb),
                                        strict=True) if p is not None}  # fmt: skip
        learned = config.replace(learn_inner_lr=True)
        return ttt_attention(q, k, v, params, learned, prefix=prefix, grid=grid, scale=0.7, mask=mask)

    return (q, k, v, weights, head_lr, *convs, mask, *numbers), four


def leaves(site):
    flat = [*site[:3], *site[3], *site[4:9]]
    return [t for t in flat if t is not None]


def gradients(run, site, cotangent):
    fresh = [
        t.detach().clone().requires_grad_() if isinstance(t, torch.Tensor) and t.is_floating_point() else t
        for t in site
    ]
    fresh[3] = [w.detach().clone().requires_grad_() for w in site[3]]
    out = run(*fresh)
    return out, torch.autograd.grad(out, leaves(fresh), cotangent)


@pytest.mark.parametrize(("inner", "loss"), VARIANTS)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"masked": True},
        {"dwc": None},
        {"eps": None, "bias": False},
        {"grid": (2, 3, 4), "prefix": 0, "suffix": 0},
        {"grid": (7,), "dwc": 5, "masked": True},
        {"grid": (2, 2), "dwc": None, "queries": 3, "masked": True},
    ],
    ids=lambda o: "-".join(o) or "plain",
)
def test_equals_the_four_operators(inner, loss, options):
    site, four = make(inner, loss, **options)
    cotangent = randn(*site[0].shape, seed=40)
    wanted, wanted_grads = gradients(four, site, cotangent)
    found, found_grads = gradients(lambda *s: torch.ops.t5fx.ttt(*s)[0], site, cotangent)
    torch.testing.assert_close(found, wanted, rtol=1e-11, atol=1e-11)
    for a, b in zip(found_grads, wanted_grads, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-11)


def test_masked_tokens_may_hold_nan():
    site, _ = make(masked=True)
    poisoned = [t.clone() for t in site[:3]]
    for t in poisoned[1:]:
        t[0, :, -4:] = float("nan")
    a, b = torch.ops.t5fx.ttt(*site)[0], torch.ops.t5fx.ttt(*poisoned, *site[3:])[0]
    torch.testing.assert_close(a, b)


@pytest.mark.parametrize(("inner", "loss"), VARIANTS)
@pytest.mark.parametrize("masked", [False, True])
def test_opcheck(inner, loss, masked):
    site, _ = make(inner, loss, masked=masked)
    fresh = [t.detach().requires_grad_() if isinstance(t, torch.Tensor) and t.is_floating_point() else t for t in site]
    fresh[3] = [w.detach().requires_grad_() for w in site[3]]
    torch.library.opcheck(torch.ops.t5fx.ttt.default, tuple(fresh))
    out, stats, fast = torch.ops.t5fx.ttt(*site)
    torch.library.opcheck(torch.ops.t5fx.ttt_backward.default, (torch.randn_like(out), stats, fast, *site))


def test_output_is_laid_out_for_the_merge_of_heads():
    site, _ = make(dtype=torch.bfloat16)
    out, stats, fast = torch.ops.t5fx.ttt(*site)
    assert out.dtype == torch.bfloat16
    assert stats.dtype == fast.dtype == torch.float32
    assert out.transpose(1, 2).is_contiguous()


@pytest.mark.parametrize(("inner", "loss"), VARIANTS)
def test_flops(inner, loss):
    site, _ = make(inner, loss)
    tokens = site[0].shape[2]
    with FlopCounterMode(display=False) as counter:
        torch.ops.t5fx.ttt(*site)
    sizes = {"batch": B, "heads": H, "queries": tokens, "keys": tokens, "head_dim": D, "value_dim": D,
             "hidden": HIDDEN, "grid_tokens": 12, "element_size": 4}  # fmt: skip
    expression = ttt_flops(TTTConfig(inner=inner, loss=loss))
    assert counter.get_total_flops() == expression.subs({s: sizes[s.name] for s in expression.free_symbols})

    # Backward: as many as its formula, written in PyTorch, runs. (PyTorch's counter takes the weight gradient of a
    # depthwise convolution for that of a dense one, so without.)
    site, _ = make(inner, loss, dwc=None)
    out, stats, fast = torch.ops.t5fx.ttt(*site)
    with FlopCounterMode(display=False) as told:
        torch.ops.t5fx.ttt_backward(torch.ones_like(out), stats, fast, *site)
    problem, tensors, _ = op._split(site)
    reference = ReferenceKernel()
    rate = op._rate(site)
    _, saved = reference.forward(problem, tensors, rate)
    with FlopCounterMode(display=False) as ran:
        reference.backward(problem, tensors, rate, saved, out)
    assert told.get_total_flops() == ran.get_total_flops()


def test_dispatch_says_why(monkeypatch):
    site, _ = make()
    *call, _ = op._split(site)
    choice = dispatch.choose(*call)  # float64: nobody's
    assert choice.kernel is None
    assert set(choice.reasons) == set(dispatch.CANDIDATES)
    assert str(choice).startswith("not fused: triton: ")
    monkeypatch.setenv(dispatch.SWITCH, "reference")
    assert dispatch.choose(*call).kernel == "reference"
    monkeypatch.setenv(dispatch.SWITCH, "none")
    assert "T5FX_KERNEL says so" in str(dispatch.choose(*call))
    monkeypatch.setenv(dispatch.SWITCH, "fast")
    with pytest.raises(ConfigError, match="no kernel is called 'fast'"):
        dispatch.choose(*call)
