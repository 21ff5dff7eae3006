"""Sites for the tests of the operators: inner models, parameters that matter, masks."""

import pytest
import torch
from torch import nn

from t5fx.inner import resolve

B, H, D = 2, 2, 4


class Gated:
    """A custom inner model whose output at a zero key is not zero: masks must not rely on that."""

    def init(self, heads, head_dim, value_dim, hidden, *, std, device=None, dtype=None, generator=None):
        shapes = {"a": (heads, head_dim, value_dim), "bias": (heads, value_dim)}
        return {
            name: nn.init.trunc_normal_(torch.empty(s, device=device, dtype=dtype), std=std, generator=generator)
            for name, s in shapes.items()
        }

    def apply(self, weights, x):
        return torch.tanh(x @ weights["a"] + weights["bias"])


GATED = Gated()
SITES = [(inner, loss) for inner in ("swiglu", "mlp", GATED) for loss in ("dot", "mse")]
each_site = pytest.mark.parametrize(("inner", "loss"), SITES, ids=lambda s: s if isinstance(s, str) else "custom")


def randn(*shape, dtype=torch.float64, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def make_params(config, *, heads=H, dim=D, axes=2, dtype=torch.float64):
    """Random parameters of a site, large enough that every one of them matters."""
    generator = torch.Generator().manual_seed(5)
    hidden = config.hidden(dim)
    params = resolve(config.inner).init(heads, dim, dim, hidden, std=0.4, dtype=torch.float64, generator=generator)
    if config.dwc is not None:
        for seed, name in enumerate(("dwc_q", "dwc_k")):
            params[f"{name}.weight"] = 0.2 * randn(heads * dim, 1, *[config.dwc] * axes, seed=seed)
            params[f"{name}.bias"] = 0.2 * randn(heads * dim, seed=seed + 7)
    return {name: p.to(dtype).requires_grad_() for name, p in params.items()}


def a_mask(*lengths, tokens):
    return torch.arange(tokens) < torch.tensor(lengths)[:, None]
