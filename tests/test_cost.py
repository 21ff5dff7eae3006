"""The cost expressions count what torch's FLOP counter counts on the operators themselves."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

from t5fx.config import DIT5_TTT, T5, TTTConfig
from t5fx.cost import (
    DV,
    HIDDEN,
    NQ,
    B,
    BreakEven,
    D,
    H,
    N,
    Sizes,
    break_even,
    site_cost,
    softmax_flops,
    ttt_bytes,
    ttt_flops,
)
from t5fx.errors import ConfigError
from t5fx.inner import resolve
from t5fx.ops import ttt_attention


class Factored:
    """A custom inner model with a matmul of weights alone: FLOPs that do not grow with the tokens."""

    def init(self, heads, head_dim, value_dim, hidden, *, std, device=None, dtype=None, generator=None):
        shapes = {"a": (heads, head_dim, hidden), "b": (heads, hidden, value_dim)}
        return {n: torch.randn(s, device=device, dtype=dtype, generator=generator) * std for n, s in shapes.items()}

    def apply(self, weights, x):
        return x @ torch.tanh(weights["a"] @ weights["b"])


class Quadratic(Factored):
    """No inner model at all: attention inside."""

    def apply(self, weights, x):
        return torch.softmax(x @ x.mT, -1) @ super().apply(weights, x)


def counted(run):
    with FlopCounterMode(display=False) as counter:
        run()
    return counter.get_total_flops()


def count_ttt(config, batch, heads, queries, keys, head_dim, value_dim, grid, prefix):
    """FLOPs that the counter sees in ttt_attention on the meta device."""
    meta = lambda *shape: torch.empty(*shape, device="meta")  # noqa: E731
    params = resolve(config.inner).init(
        heads, head_dim, value_dim, config.hidden(head_dim), std=0.02, device="meta", dtype=torch.float32
    )
    if config.dwc:
        for name in ("dwc_q", "dwc_k"):
            params[f"{name}.weight"] = meta(heads * head_dim, 1, *[config.dwc] * len(grid))
            params[f"{name}.bias"] = meta(heads * head_dim)
    query, key = meta(batch, heads, queries, head_dim), meta(batch, heads, keys, head_dim)
    value = meta(batch, heads, keys, value_dim)
    return counted(lambda: ttt_attention(query, key, value, params, config, grid=grid, prefix=prefix))


CONFIGS = [
    TTTConfig(inner=inner, loss=loss, dwc=dwc, hidden_ratio=ratio)
    for inner, loss, dwc, ratio in itertools.product(
        ("swiglu", "mlp", Factored()), ("dot", "mse"), (None, 3, 5), (1, 0.5)
    )
]


@pytest.mark.parametrize(
    "config", CONFIGS, ids=lambda c: f"{c.inner_name.split('@')[0]}-{c.loss}-{c.dwc}-{c.hidden_ratio}"
)
def test_flops_agree_with_the_counter(config):
    shapes = [
        # batch, heads, queries, keys, head_dim, value_dim, grid, prefix
        (1, 1, 16, 16, 8, 8, (4, 4), 0),
        (2, 3, 65, 65, 16, 16, (8, 8), 1),
        (3, 2, 40, 77, 12, 20, (5, 6), 4),
        (1, 4, 60, 60, 24, 8, (3, 4, 5), 0),
    ]
    for batch, heads, queries, keys, head_dim, value_dim, grid, prefix in shapes:
        cost = site_cost(
            batch=batch, heads=heads, queries=queries, keys=keys, head_dim=head_dim, value_dim=value_dim,
            config=config, grid_tokens=torch.Size(grid).numel(), grid_axes=len(grid),
        )  # fmt: skip
        assert cost.ttt_flops == count_ttt(config, batch, heads, queries, keys, head_dim, value_dim, grid, prefix)
        q, k, v = (
            torch.empty(batch, heads, n, d, device="meta")
            for n, d in ((queries, head_dim), (keys, head_dim), (keys, value_dim))
        )
        assert cost.softmax_flops == counted(lambda q=q, k=k, v=v: F.scaled_dot_product_attention(q, k, v))


def test_softmax_flops_agree_with_what_the_counter_takes_fused_kernels_for():
    """The counter's formula for every fused kernel it knows (it counts 0 for the CPU's, in torch 2.14)."""
    sizes = {B: 2, H: 3, NQ: 50, N: 70, D: 16, DV: 24}
    assert softmax_flops().subs(sizes) == sdpa_flop_count((2, 3, 50, 16), (2, 3, 70, 16), (2, 3, 70, 24))


@pytest.mark.parametrize("config", [T5, DIT5_TTT, TTTConfig(inner=Factored(), dwc=None)], ids=["t5", "dit5", "custom"])
@pytest.mark.parametrize(("head_dim", "value_dim"), [(16, 16), (64, 64), (72, 24)])
def test_break_even_is_where_the_costs_cross(config, head_dim, value_dim):
    def flops(tokens):
        c = site_cost(
            batch=2, heads=3, queries=tokens, keys=tokens, head_dim=head_dim, value_dim=value_dim,
            config=config, grid_tokens=tokens,
        )  # fmt: skip
        return c.softmax_flops, c.ttt_flops, c.break_even_tokens

    found = break_even(config, head_dim=head_dim, value_dim=value_dim, batch=2, heads=3)
    softmax, ttt, tokens = flops(found.tokens)
    assert tokens == found.tokens
    assert ttt < softmax
    softmax, ttt, _ = flops(found.tokens - 1)
    assert ttt >= softmax


def test_break_even_of_t5_is_an_expression():
    """By hand, hidden = value_dim = D: TTT 2 * 9 * D^2 + 2 * 2 * 9 * D a token, softmax 4 * D * N."""
    found = break_even(T5, head_dim=64)
    assert isinstance(found, BreakEven)
    assert found.solution.free_symbols == {D, DV, HIDDEN}
    assert found.solution.subs({D: 64, DV: 64, HIDDEN: 64}) == (18 * 64**2 + 36 * 64) // (4 * 64) == 297
    assert found.tokens == 298  # equal at 297


def test_bytes_by_hand():
    cost = site_cost(
        batch=2,
        heads=3,
        queries=10,
        keys=20,
        head_dim=4,
        value_dim=6,
        config=T5,
        grid_tokens=9,
        element_size=4,
    )
    moved = 2 * 3 * (10 * 4 + 20 * 4 + 20 * 6 + 10 * 6)
    parameters = 3 * (2 * 4 * 4 + 4 * 6) + 2 * (3 * 4 * 9 + 3 * 4)
    assert cost.softmax_bytes == 4 * moved
    assert cost.ttt_bytes == 4 * (moved + parameters)
    custom = TTTConfig(inner=Factored(), dwc=None)
    cost = site_cost(batch=2, heads=3, queries=10, keys=20, head_dim=4, value_dim=6, config=custom, grid_tokens=0)
    assert cost.ttt_bytes == 2 * (moved + 3 * (4 * 4 + 4 * 6))


def test_what_cant_be_counted_is_refused():
    custom = TTTConfig(inner=Factored())
    for function in (ttt_flops, ttt_bytes):
        with pytest.raises(ConfigError, match=r"Factored.*sizes"):
            function(custom)
    with pytest.raises(ConfigError, match=r"Quadratic.*linearly"):
        ttt_flops(TTTConfig(inner=Quadratic()), sizes=Sizes(1, 2, 8, 8, 8))


def test_counting_works_under_inference_mode():
    class Fresh(Factored):
        pass

    with torch.inference_mode():
        assert ttt_flops(TTTConfig(inner=Fresh(), dwc=None), sizes=Sizes(1, 2, 8, 8, 8)) != 0


def test_a_table_of_sites_is_cheap():
    """Counted, not timed: a second identical table asks sympy for nothing."""

    def table():
        return [
            site_cost(batch=1, heads=6, queries=n, keys=n, head_dim=64, value_dim=64, config=T5, grid_tokens=n)
            for n in range(100, 160)
        ]

    first = table()
    before = site_cost.cache_info()
    assert table() == first
    after = site_cost.cache_info()
    assert after.hits - before.hits == 60
    assert after.misses == before.misses
