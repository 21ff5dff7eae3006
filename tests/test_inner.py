"""Inner models: the closed forms are the gradient of the loss, and any model can be brought."""

import pytest
import torch
from torch import nn

from t5fx.config import TTTConfig
from t5fx.errors import ConfigError
from t5fx.inner import (
    INNER,
    InnerModel,
    functional_apply,
    functional_step,
    op_name,
    resolve,
    validate_inner,
    weight_names,
)

B, H, N, D, DV, HIDDEN = 2, 3, 7, 4, 5, 6


class Gated:
    """A custom inner model with a bias and two layers: what no closed form here covers."""

    def init(self, heads, head_dim, value_dim, hidden, *, std, device=None, dtype=None, generator=None):
        shapes = {"a": (heads, head_dim, hidden), "bias": (heads, hidden), "b": (heads, hidden, value_dim)}
        return {
            name: nn.init.trunc_normal_(torch.empty(s, device=device, dtype=dtype), std=std, generator=generator)
            for name, s in shapes.items()
        }

    def apply(self, weights, x):
        return torch.tanh(x @ weights["a"] + weights["bias"]) @ weights["b"]


def inputs(inner, seed=0):
    generator = torch.Generator().manual_seed(seed)
    make = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)  # noqa: E731
    weights = inner.init(H, D, DV, HIDDEN, std=0.5, dtype=torch.float64, generator=generator)
    mask = torch.ones(B, N, dtype=torch.bool)
    mask[0, 2] = mask[1, 5:] = False
    return weights, make(B, H, N, D), make(B, H, N, DV), mask


def written_out(inner, weights, key, value, loss, scale, lr, mask):
    """One gradient step by plain autograd, a row and a head at a time, on only the tokens that take part."""
    fast = {name: torch.empty(B, *w.shape, dtype=w.dtype) for name, w in weights.items()}
    for b in range(B):
        keep = slice(None) if mask is None else mask[b]
        for h in range(H):
            leaves = {name: w[h].clone().requires_grad_() for name, w in weights.items()}
            y, v = inner.apply(leaves, key[b, h][keep]), value[b, h][keep]
            n = len(v)
            total = -scale / n * (y * v).sum() if loss == "dot" else scale / (2 * n) * ((y - v) ** 2).sum()
            for name, g in zip(leaves, torch.autograd.grad(total, list(leaves.values())), strict=True):
                fast[name][b, h] = weights[name][h] - lr * g
    return fast


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("loss", ["dot", "mse"])
@pytest.mark.parametrize("inner", [*INNER.values(), Gated()], ids=lambda m: type(m).__name__)
def test_the_step_is_the_gradient_of_the_loss(inner, loss, masked):
    weights, key, value, mask = inputs(inner)
    mask = mask if masked else None
    options = {"loss": loss, "scale": 0.7, "lr": 1.3, "mask": mask}
    expected = written_out(inner, weights, key, value, loss, 0.7, 1.3, mask)
    steps = [lambda *a, **k: functional_step(inner, *a, **k)]
    if inner in INNER.values():
        steps.append(inner.step)
    for step in steps:
        fast = step(weights, key, value, **options)
        assert fast.keys() == weights.keys()
        for name in weights:
            assert (expected[name] - weights[name]).abs().max() > 1e-3  # it moved
            torch.testing.assert_close(fast[name], expected[name], rtol=0, atol=1e-12)


@pytest.mark.parametrize("inner", [*INNER.values(), Gated()], ids=lambda m: type(m).__name__)
def test_apply_runs_each_head_with_its_own_fast_weights(inner):
    weights, _, _, _ = inputs(inner)
    fast = {name: torch.stack([w, 2 * w]) for name, w in weights.items()}
    query = torch.randn(B, H, 9, D, dtype=torch.float64)
    output = functional_apply(inner, fast, query)
    assert output.shape == (B, H, 9, DV)
    for b in range(B):
        for h in range(H):
            one = inner.apply({name: w[b, h] for name, w in fast.items()}, query[b, h])
            torch.testing.assert_close(output[b, h], one, rtol=0, atol=1e-14)


def test_init_shapes_scale_and_reproducibility():
    for inner, names in ((INNER["swiglu"], ("w1", "w2", "w3")), (INNER["mlp"], ("w1", "w2"))):
        assert isinstance(inner, InnerModel)
        weights, again = (
            inner.init(8, 32, 48, 64, std=0.02, generator=torch.Generator().manual_seed(1)) for _ in range(2)
        )
        assert tuple(weights) == names == weight_names(inner)
        assert weights["w1"].shape == (8, 32, 64)
        assert weights[names[-1]].shape == (8, 64, 48)
        assert abs(weights["w1"].std().item() - 0.02) < 1e-3
        assert all(torch.equal(a, b) for a, b in zip(weights.values(), again.values(), strict=True))
        meta = inner.init(8, 32, 48, 64, std=0.02, device="meta", dtype=torch.bfloat16)
        assert meta["w1"].is_meta
        assert meta["w1"].dtype == torch.bfloat16


@pytest.mark.parametrize("masked", [False, True])
def test_a_custom_model_compiles_into_one_graph_directly(masked):
    """torch.func.grad and vmap are traced by Dynamo: no operator of ours is needed for that."""
    inner = Gated()
    weights, key, value, mask = inputs(inner)
    key.requires_grad_()

    def attention(key, value, weights, mask):
        fast = functional_step(inner, weights, key, value, loss="mse", scale=0.5, lr=1.0, mask=mask)
        return functional_apply(inner, fast, key)

    arguments = (key, value, weights, mask if masked else None)
    torch._dynamo.reset()
    compiled = torch.compile(attention, fullgraph=True, backend="aot_eager")(*arguments)
    eager = attention(*arguments)
    torch.testing.assert_close(compiled, eager, rtol=0, atol=1e-13)
    gradient = [torch.autograd.grad(y.square().sum(), key)[0] for y in (compiled, eager)]
    torch.testing.assert_close(*gradient, rtol=0, atol=1e-12)


class NoHeads(Gated):
    def init(self, *args, **options):
        return {name: w[0] for name, w in super().init(*args, **options).items()}


class WrongOutput(Gated):
    def apply(self, weights, x):
        return super().apply(weights, x)[:, :2]


class Crashes(Gated):
    def apply(self, weights, x):
        return x @ weights["c"]


class Nothing(Gated):
    def init(self, *args, **options):
        return {}


class OnlyInit:
    init = Gated.init


@pytest.mark.parametrize(
    ("inner", "message"),
    [
        (NoHeads(), r"NoHeads.*'a'.*3 heads"),
        (WrongOutput(), r"WrongOutput.*apply must map.*\(5, 2\)"),
        (Crashes(), r"Crashes.*KeyError"),
        (Nothing(), r"Nothing.*dict of tensors"),
        (OnlyInit(), r"OnlyInit.*init and apply"),
        (Gated, r"Gated.*with \(\)"),
    ],
)
def test_a_wrong_custom_model_is_refused_by_class(inner, message):
    with pytest.raises(ConfigError, match=message):
        validate_inner(inner)
    with pytest.raises(ConfigError, match=message):
        TTTConfig(inner=inner)


def test_validation_draws_no_random_numbers():
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    assert validate_inner(Gated()) == ("a", "bias", "b")
    assert torch.equal(torch.rand(4), expected)


def test_names_find_their_models():
    inner = Gated()
    name = op_name(inner)
    assert resolve(name) is resolve(op_name(Gated()))  # equal state, equal class: the same model
    assert type(resolve(name)) is Gated
    assert resolve("mlp") is INNER["mlp"]
    assert weight_names(inner) == weight_names(name) == ("a", "bias", "b")
    with pytest.raises(ConfigError, match=r"gru.*mlp.*swiglu"):
        resolve("gru")


def test_two_classes_from_one_source_have_two_names():
    def make(power):
        class Power(Gated):
            def apply(self, weights, x):
                return super().apply(weights, x) ** power

        return Power()

    cube, square = make(3), make(2)
    assert op_name(cube) != op_name(square)
    assert resolve(op_name(square)) is square
    assert resolve(op_name(cube)) is cube
