"""https://github.com/pytorch/pytorch/issues/100347: export and fx do not decompose nn.MultiheadAttention.

A pass over a traced graph finds no attention in it, only one opaque call.  Here it is opened before it is looked at.
"""

import pytest
import torch
from torch import nn

import t5fx


class Layer(nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.attention = nn.MultiheadAttention(16, 2, **options)

    def forward(self, x):
        return self.attention(x, x, x, need_weights=False)[0]


def by_hand(model, x, **layout):
    attention = model.attention
    joint = nn.functional.linear(x, attention.in_proj_weight, attention.in_proj_bias)
    query, key, value = (y.unflatten(-1, (2, 8)).transpose(1, 2) for y in joint.chunk(3, -1))
    out = t5fx.ops.ttt_attention(query, key, value, dict(attention.ttt.named_parameters()), t5fx.T5, **layout)
    return attention.out_proj(out.transpose(1, 2).flatten(2))


@pytest.mark.parametrize("batch_first", [True, False])
def test_converted(batch_first):
    model = Layer(batch_first=batch_first).double().eval()
    x = torch.randn(2, 12, 16, dtype=torch.float64)
    given = x if batch_first else x.transpose(0, 1)
    t5fx.linearize(model, t5fx.everything, example_inputs=given, layout=t5fx.TokenLayout(grid=(3, 4)))
    out = model(given) if batch_first else model(given).transpose(0, 1)
    torch.testing.assert_close(out, by_hand(model, x, grid=(3, 4)), rtol=1e-9, atol=1e-9)


def test_exported():
    model = Layer(batch_first=True).eval()
    x = torch.randn(2, 9, 16)
    t5fx.linearize(model, t5fx.everything, example_inputs=x)
    program = torch.export.export(model, (x,), strict=False)
    targets = [str(node.target) for node in program.graph.nodes]
    assert sum(target.startswith("t5fx.inner_apply") for target in targets) == 1
    assert not any("multi_head" in target or "scaled_dot_product" in target for target in targets)
    torch.testing.assert_close(program.module()(x), model(x), rtol=1e-5, atol=1e-6)
