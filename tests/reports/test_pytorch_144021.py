"""https://github.com/pytorch/pytorch/issues/144021: NaN from compiled attention of 2980 bfloat16 tokens, dynamic=True.

The report's shapes.  The softmax scale became NaN there, computed from a symbolic head size; here it is a number in
the graph, or stays a node of it.
"""

import torch
from torch import nn
from torch.nn import functional as F

import t5fx


class Model(nn.Module):
    def forward(self, q, k, v):
        return F.scaled_dot_product_attention(q, k, v)


def test_bfloat16_2980_tokens_dynamic():
    def tokens():
        return torch.randn(1, 2, 2980, 128, dtype=torch.bfloat16)

    model = Model().eval()
    example = (tokens(), tokens(), tokens())
    layout = t5fx.TokenLayout(grid=(10, 298))
    t5fx.linearize(model, t5fx.every, example_inputs=example, layout=layout)
    with torch.no_grad():
        model.ttt.bfloat16()
        compiled = torch.compile(model, backend="aot_eager", dynamic=True, fullgraph=True)
        out, eager = compiled(*example), model(*example)
        params = dict(model.ttt.named_parameters())
        exact = t5fx.ops.ttt_attention(
            *(x.double() for x in example), {n: p.double() for n, p in params.items()}, t5fx.T5, grid=(10, 298)
        )
    assert out.dtype == torch.bfloat16
    assert torch.isfinite(out).all()
    torch.testing.assert_close(out, eager, rtol=0.02, atol=1e-3 * float(eager.abs().max()))
    assert (out.double() - exact).norm() < 0.02 * exact.norm()
