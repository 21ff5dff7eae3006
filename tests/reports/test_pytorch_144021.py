"""https://github.com/pytorch/pytorch/issues/144021: NaN from compiled attention of 2980 bfloat16 tokens, dynamic=True.

The report's shapes.  The softmax scale became NaN there, computed from a symbolic head size; here it is a number in
the graph, or stays a node of it.
"""

import torch
from torch import nn
from torch.nn import functional as F

import t5fx


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(32, 3 * 2 * 128)

    def heads_of(self, x):
        return self.qkv(x).unflatten(-1, (3, 2, 128)).permute(2, 0, 3, 1, 4)

    def forward(self, x):
        return F.scaled_dot_product_attention(*self.heads_of(x))


def test_bfloat16_2980_tokens_dynamic():
    model, x = Model().bfloat16().eval(), torch.randn(1, 2980, 32, dtype=torch.bfloat16)
    t5fx.linearize(model, t5fx.everything, example_inputs=x, layout=t5fx.TokenLayout(grid=(10, 298)))
    with torch.no_grad():
        compiled = torch.compile(model, backend="aot_eager", dynamic=True, fullgraph=True)
        out, eager = compiled(x), model(x)
        params = {name: parameter.double() for name, parameter in model.ttt.named_parameters()}
        qkv = (y.double() for y in model.heads_of(x))
        exact = t5fx.ops.ttt_attention(*qkv, params, t5fx.T5, grid=(10, 298))
    assert out.dtype == torch.bfloat16
    assert torch.isfinite(out).all()
    torch.testing.assert_close(out, eager, rtol=0.02, atol=1e-3 * float(eager.abs().max()))
    assert (out.double() - exact).norm() < 0.03 * exact.norm()
