"""The four operators: gradients, masks, precision, errors."""

import pytest
import torch
import torch.nn.functional as F
from ops_cases import B, D, H, a_mask, each_site, make_params, randn

from t5fx.config import TTTConfig
from t5fx.errors import ConfigError, LayoutError, MaskError
from t5fx.inner import weight_names
from t5fx.ops import ttt_attention

op = torch.ops.t5fx


# ---- gradients ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("masked", [False, True])
def test_gradcheck_key_norm(masked):
    key = randn(B, H, 5, D).requires_grad_()
    mask = a_mask(3, 5, tokens=5) if masked else None
    assert torch.autograd.gradcheck(lambda k: op.key_norm(k, 0.5, mask), key)


@pytest.mark.parametrize("grid", [(2, 3), (1, 2, 3)])
@pytest.mark.parametrize("masked", [False, True])
def test_gradcheck_dwc(grid, masked):
    x = randn(B, H, 8, 2).requires_grad_()
    weight, bias = randn(H * 2, 1, *[3] * len(grid)).requires_grad_(), randn(H * 2).requires_grad_()
    mask = a_mask(5, 8, tokens=8) if masked else None
    assert torch.autograd.gradcheck(lambda *a: op.dwc(*a, 1, grid, mask), (x, weight, bias))


@each_site
@pytest.mark.parametrize("masked", [False, True])
def test_gradcheck_inner_step_and_apply(inner, loss, masked):
    config = TTTConfig(inner=inner, loss=loss, dwc=None)
    weights = list(make_params(config, dim=3).values())
    key, value, query = (randn(B, H, n, 3, seed=n).requires_grad_() for n in (4, 4, 2))
    value = value.detach().flip(0).requires_grad_()
    mask = a_mask(3, 4, tokens=4) if masked else None
    name = config.inner_name
    step = lambda k, v, *w: op.inner_step(k, v, w, name, loss, 0.7, 1.2, mask)  # noqa: E731
    assert torch.autograd.gradcheck(step, (key, value, *weights), fast_mode=True)
    fast = [f.detach().requires_grad_() for f in step(key, value, *weights)]
    assert torch.autograd.gradcheck(lambda q, *f: op.inner_apply(q, f, name), (query, *fast), fast_mode=True)


@each_site
@pytest.mark.parametrize("masked", [False, True])
def test_gradcheck_a_rate_for_each_head(inner, loss, masked):
    config = TTTConfig(inner=inner, loss=loss, dwc=None)
    weights = list(make_params(config, dim=3).values())
    key, value = (randn(B, H, 4, 3, seed=n).requires_grad_() for n in (1, 2))
    rates = torch.tensor([0.7, -2.5], dtype=torch.float64, requires_grad=True)
    mask = a_mask(3, 4, tokens=4) if masked else None
    step = lambda r, k, v, *w: op.inner_step(k, v, w, config.inner_name, loss, 0.7, 1.2, mask, r)  # noqa: E731
    assert torch.autograd.gradcheck(step, (rates, key, value, *weights))


# ---- what each operator computes ----------------------------------------------------------------------


def test_key_norm_standardises_over_the_tokens():
    key = 3 + 2 * randn(B, H, 50, D)
    normed = op.key_norm(key, 1e-12)
    torch.testing.assert_close(normed.mean(2), torch.zeros(B, H, D, dtype=torch.float64), rtol=0, atol=1e-12)
    torch.testing.assert_close(normed.var(2, correction=0), torch.ones(B, H, D, dtype=torch.float64))
    by_hand = (key - key.mean(2, keepdim=True)) / (key.var(2, keepdim=True, correction=0) + 1).sqrt()
    torch.testing.assert_close(op.key_norm(key, 1.0), by_hand)


@pytest.mark.parametrize(("grid", "convolution"), [((3, 4), F.conv2d), ((2, 3, 2), F.conv3d), ((12,), F.conv1d)])
@pytest.mark.parametrize("side", [3, 5])
def test_dwc_moves_the_grid_tokens_and_passes_the_others(grid, convolution, side):
    prefix, suffix = 2, 3
    x = randn(B, H, prefix + 12 + suffix, D)
    weight, bias = randn(H * D, 1, *[side] * len(grid)), randn(H * D)
    y = op.dwc(x, weight, bias, prefix, grid)
    assert torch.equal(y[:, :, :prefix], x[:, :, :prefix])
    assert torch.equal(y[:, :, -suffix:], x[:, :, -suffix:])
    inside = x[:, :, prefix:-suffix]
    image = inside.transpose(2, 3).reshape(B, H * D, *grid)
    moved = convolution(image, weight, bias, padding=side // 2, groups=H * D)
    expected = inside + moved.reshape(B, H, D, 12).transpose(2, 3)
    torch.testing.assert_close(y[:, :, prefix:-suffix], expected)
    torch.testing.assert_close(op.dwc(inside, weight, bias, 0, grid), expected)


def test_another_number_of_queries_than_keys():
    config = TTTConfig(dwc=None)
    params = make_params(config)
    key, value, query = randn(B, H, 9, D), randn(B, H, 9, D, seed=1), randn(B, H, 9, D, seed=2)
    whole = ttt_attention(query, key, value, params, config)
    torch.testing.assert_close(ttt_attention(query[:, :, :4], key, value, params, config), whole[:, :, :4])


@each_site
@pytest.mark.parametrize("masked", [False, True])
def test_a_rate_for_each_head_is_that_head_stepped_with_it(inner, loss, masked):
    config = TTTConfig(inner=inner, loss=loss, dwc=None)
    weights, key, value = list(make_params(config).values()), randn(B, H, 5, D), randn(B, H, 5, D, seed=1)
    mask = a_mask(3, 5, tokens=5) if masked else None
    rates = torch.tensor([0.5, 3.0])  # float32 beside float64: promoted
    fast = op.inner_step(key, value, weights, config.inner_name, loss, 0.7, 2.0, mask, rates)
    for head, rate in enumerate(rates.tolist()):
        alone = op.inner_step(key, value, weights, config.inner_name, loss, 0.7, 2.0 * rate, mask)
        for one, other in zip(fast, alone, strict=True):
            torch.testing.assert_close(one[:, head], other[:, head], rtol=0, atol=1e-13)


def test_a_learned_rate_takes_the_place_of_the_number():
    config = TTTConfig(inner_lr=3.0)
    params, qkv = make_params(config), randn(3, B, H, 12, D)
    expected = ttt_attention(*qkv, params, config, grid=(3, 4))
    learned = config.replace(learn_inner_lr=True, inner_lr=99.0)
    rates = torch.full((H,), 3.0, dtype=torch.float64)
    output = ttt_attention(*qkv, {**params, "inner_lr": rates}, learned, grid=(3, 4))
    torch.testing.assert_close(output, expected, rtol=0, atol=1e-13)
    with pytest.raises(ConfigError, match="inner_lr"):
        ttt_attention(*qkv, params, learned, grid=(3, 4))


# ---- masks --------------------------------------------------------------------------------------------


@each_site
@pytest.mark.parametrize("inside_grid", [False, True])
def test_a_masked_padded_batch_is_the_unpadded_one(inside_grid, inner, loss):
    """Padding behind the grid, or the grid's last rows; it holds nan, which nothing may touch."""
    config = TTTConfig(inner=inner, loss=loss)
    params = make_params(config)
    real, padded = 1 + 3 * 4, 1 + 3 * 4 + 8
    long_grid = (5, 4) if inside_grid else (3, 4)
    cotangent = randn(1, H, real, D, seed=9)
    short = randn(3, 1, H, real, D)

    def run(qkv, grid, mask):
        qkv = qkv.clone().requires_grad_()
        output = ttt_attention(*qkv, params, config, prefix=1, grid=grid, mask=mask)[:1, :, :real]
        return output, torch.autograd.grad(output, [qkv, *params.values()], cotangent)

    expected, expected_gradients = run(short, (3, 4), None)
    batch = torch.full((3, 2, H, padded, D), float("nan"), dtype=torch.float64)
    batch[:, :1, :, :real] = short
    batch[:, 1] = randn(3, H, padded, D, seed=3)
    output, gradients = run(batch, long_grid, a_mask(real, padded, tokens=padded))
    torch.testing.assert_close(output, expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(gradients[0][:, :1, :, :real], expected_gradients[0], rtol=0, atol=1e-12)
    assert gradients[0][:, :1, :, real:].abs().max() == 0
    assert gradients[0][:, 1].abs().max() == 0
    for got, want in zip(gradients[1:], expected_gradients[1:], strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=1e-12)


@each_site
def test_a_full_mask_is_no_mask(inner, loss):
    config = TTTConfig(inner=inner, loss=loss)
    params, qkv = make_params(config), randn(3, B, H, 12, D)
    masked = ttt_attention(*qkv, params, config, grid=(3, 4), mask=torch.ones(B, 12, dtype=torch.bool))
    torch.testing.assert_close(masked, ttt_attention(*qkv, params, config, grid=(3, 4)), rtol=0, atol=1e-13)


@each_site
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_row_without_a_token_is_finite(inner, loss, dtype):
    config = TTTConfig(inner=inner, loss=loss)
    params = make_params(config, dtype=dtype)
    qkv = randn(3, B, H, 12, D, dtype=dtype).requires_grad_()
    output = ttt_attention(*qkv, params, config, grid=(3, 4), mask=a_mask(0, 12, tokens=12))
    gradients = torch.autograd.grad(output.float().square().sum(), [qkv, *params.values()])
    assert all(torch.isfinite(t).all() for t in (output, *gradients))


# ---- precision ----------------------------------------------------------------------------------------


@each_site
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_close_to_double(dtype, inner, loss):
    config = TTTConfig(inner=inner, loss=loss)
    params = {n: p.detach() for n, p in make_params(config, dim=16, dtype=dtype).items()}
    qkv = randn(3, B, H, 64, 16, dtype=dtype)
    output = ttt_attention(*qkv, params, config, grid=(8, 8))
    assert output.dtype == dtype
    exact = ttt_attention(*qkv.double(), {n: p.double() for n, p in params.items()}, config, grid=(8, 8))
    assert (output.double() - exact).norm() < 1e-2 * exact.norm()
    fast = op.inner_step(qkv[1], qkv[2], [params[n] for n in weight_names(inner)], config.inner_name, loss, 1.0, 1.0)
    assert {f.dtype for f in fast} == {torch.float32}


def test_tiny_values_do_not_underflow_in_float16():
    """v * scale / N is 1e-8 here, nothing in float16: the step must be that of float64 all the same."""
    tokens, config = 4096, TTTConfig()
    key, value = 1 + 0.1 * randn(1, H, tokens, 16), 2e-4 * (1 + 0.1 * randn(1, H, tokens, 16, seed=1))
    key, value = key.half(), value.half()
    assert (value * 0.25 / tokens).count_nonzero() == 0
    weights = [p.detach() for n, p in make_params(config, dim=16).items() if n.startswith("w")]
    exact = op.inner_step(key.double(), value.double(), weights, "swiglu", "dot", 0.25, 1.0)
    half = op.inner_step(key, value, [w.float() for w in weights], "swiglu", "dot", 0.25, 1.0)
    for w, f, e in zip(weights, half, exact, strict=True):
        assert (e - w).norm() > 0
        assert ((f - w) - (e - w)).norm() < 1e-2 * (e - w).norm()


def test_dtypes_outside_autocast():
    config = TTTConfig()
    for dtype in (torch.float32, torch.float64):
        params, qkv = make_params(config, dtype=dtype), randn(3, B, H, 12, D, dtype=dtype)
        weights = [params[n] for n in ("w1", "w2", "w3")]
        assert op.inner_step(qkv[1], qkv[2], weights, "swiglu", "dot", 0.5, 1.0)[0].dtype == dtype
        assert ttt_attention(*qkv, params, config, grid=(3, 4)).dtype == dtype


@each_site
def test_autocast_takes_mixed_dtypes_and_rounds_only_the_result(inner, loss):
    config = TTTConfig(inner=inner, loss=loss)
    params = make_params(config, dtype=torch.float32)
    query, key, value = randn(3, B, H, 12, D, dtype=torch.float32)
    value = value.bfloat16()
    plain = ttt_attention(query, key, value, params, config, grid=(3, 4))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = ttt_attention(query, key, value, params, config, grid=(3, 4))
        # As F.scaled_dot_product_attention does under autocast:
        assert output.dtype == F.scaled_dot_product_attention(query, key, value).dtype == torch.bfloat16
        double = ttt_attention(query.double(), key, value, params, config, grid=(3, 4))
    assert plain.dtype == torch.float32
    assert double.dtype == torch.float64
    assert torch.equal(output, plain.bfloat16())
    (gradient,) = torch.autograd.grad(output.float().sum(), params[weight_names(inner)[0]])
    assert gradient.dtype == torch.float32


# ---- errors -------------------------------------------------------------------------------------------


def test_a_grid_that_does_not_fit_is_refused():
    x, weight = randn(B, H, 12, D), randn(H * D, 1, 3, 3)
    with pytest.raises(LayoutError, match=r"3 x 4.*prefix of 1.*12 tokens"):
        op.dwc(x, weight, None, 1, (3, 4))
    with pytest.raises(LayoutError, match="-1"):
        op.dwc(x, weight, None, -1, (3, 4))
    with pytest.raises(LayoutError, match="one to three axes"):
        op.dwc(x, weight, None, 0, ())
    with pytest.raises(ConfigError, match=r"2 heads of 4.*\[8, 1, k, k\].*\[16, 1, 3, 3\]"):
        op.dwc(x, randn(16, 1, 3, 3), None, 0, (3, 4))
    with pytest.raises(ConfigError, match="3-axis"):
        op.dwc(x, weight, None, 0, (3, 2, 2))
    with pytest.raises(LayoutError, match=r"grid=\(h, w\)"):
        ttt_attention(x, x, x, make_params(TTTConfig()), TTTConfig())


def test_weights_that_do_not_fit_are_refused():
    x = randn(B, H, 12, D)
    weights = [p for n, p in make_params(TTTConfig()).items() if n.startswith("w")]
    with pytest.raises(ConfigError, match=r"swiglu.*w3.*2 tensors"):
        op.inner_step(x, x, weights[:2], "swiglu", "dot", 1.0, 1.0)
    with pytest.raises(ConfigError, match=r"2 heads, key has 4"):
        op.inner_step(randn(B, 4, 12, D), randn(B, 4, 12, D), weights, "swiglu", "dot", 1.0, 1.0)
    with pytest.raises(ConfigError, match=r"no inner model.*gru"):
        op.inner_apply(x, weights, "gru")
    with pytest.raises(ConfigError, match="huber"):
        op.inner_step(x, x, weights, "swiglu", "huber", 1.0, 1.0)
    for rates in (torch.ones(H + 1), torch.ones(H, 1)):
        with pytest.raises(ConfigError, match=r"head_lr.*one number a head, \[2\]"):
            op.inner_step(x, x, weights, "swiglu", "dot", 1.0, 1.0, None, rates)
    with pytest.raises(ConfigError, match=r"dwc_q\.weight"):
        ttt_attention(
            x,
            x,
            x,
            dict(zip(("w1", "w2", "w3"), weights, strict=True)),
            TTTConfig(),
            grid=(3, 4),
        )


@pytest.mark.parametrize(
    "mask",
    [torch.ones(B, 12), torch.ones(B, 1, 1, 12, dtype=torch.bool), torch.ones(B, 11, dtype=torch.bool)],
)
def test_a_mask_of_another_kind_is_refused(mask):
    x, weights = randn(B, H, 12, D), list(make_params(TTTConfig(dwc=None)).values())
    for call in (
        lambda: op.key_norm(x, 1.0, mask),
        lambda: op.dwc(x, randn(H * D, 1, 3, 3), None, 0, (3, 4), mask),
        lambda: op.inner_step(x, x, weights, "swiglu", "dot", 1.0, 1.0, mask),
    ):
        with pytest.raises(MaskError, match=r"\[batch, tokens\]"):
            call()
