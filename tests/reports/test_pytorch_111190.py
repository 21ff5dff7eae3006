"""https://github.com/pytorch/pytorch/issues/111190: with dynamic shapes the attention pattern is no longer matched.

Sizes become nodes of the graph, and a pattern of constants misses them.  Here the sites are rewritten before the
compiler looks, and one dynamic graph serves all sizes.
"""

import torch
from torch._dynamo.testing import CompileCounterWithBackend
from toys import Attention, Block, by_hand, images, vit

import t5fx


@torch._dynamo.config.patch(specialize_float=True)  # else Dynamo starts its one compile anew at the first float
def test_one_dynamic_graph_with_every_site():
    model = vit()
    t5fx.linearize(model, t5fx.everything, example_inputs=images())
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, backend=counter, dynamic=True, fullgraph=True)
    with torch.no_grad():
        inputs = [images(*size) for size in ((8, 20), (12, 28), (16, 24))]
        found = [compiled(x) for x in inputs]
        assert counter.frame_count == 1
        for x, out in zip(inputs, found, strict=True):
            torch.testing.assert_close(out, model(x), rtol=1e-9, atol=1e-9)
    applied = [n for n in counter.graphs[0].graph.nodes if str(n.target).startswith("t5fx.inner_apply")]
    assert len(applied) == 2


def test_sizes_in_the_scale_and_the_reshapes():
    """The report's spelling: sizes are read from the tensors, not known beforehand."""

    class Spelled(Attention):
        def forward(self, x, mask=None):
            query, key, value = self.heads_of(x)
            scores = query @ key.transpose(-1, -2) / key.size(-1) ** 0.5
            out = scores.softmax(-1) @ value
            return self.proj(out.transpose(1, 2).reshape(x.size(0), x.size(1), -1))

    model = vit()
    for block in model.blocks:
        assert isinstance(block, Block)
        block.attn.__class__ = Spelled
    t5fx.linearize(model, t5fx.everything, example_inputs=images())
    compiled = torch.compile(model, backend="aot_eager", dynamic=True, fullgraph=True)
    with torch.no_grad():
        for size in ((8, 20), (16, 24)):
            x = images(*size)
            torch.testing.assert_close(compiled(x), model(x), rtol=1e-9, atol=1e-9)
        tokens = torch.randn(2, 7, 16, dtype=torch.float64)
        with t5fx.grid(model, (2, 3)):
            got = model.blocks[0].attn(tokens)
        want = by_hand(model.blocks[0].attn, tokens, prefix=1, grid=(2, 3))
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9)
