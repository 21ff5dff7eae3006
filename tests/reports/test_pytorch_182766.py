"""https://github.com/pytorch/pytorch/issues/182766: trouble with a head size of 33, no multiple of anything."""

import pytest
import torch
from toys import ViT, by_hand, images, louder

import t5fx


@pytest.mark.parametrize("heads", [1, 3])
def test_head_size_33(heads):
    model = ViT(dim=33 * heads, heads=heads).double().eval()
    x = images()
    assert [site.head_dim for site in t5fx.inspect(model, x)] == [33, 33]
    louder(t5fx.linearize(model, t5fx.everything, example_inputs=x))
    tokens = torch.randn(2, 11, 33 * heads, dtype=torch.float64)
    with torch.no_grad(), t5fx.grid(model, (2, 5)):
        got = model.blocks[0].attn(tokens)
        torch.testing.assert_close(got, by_hand(model.blocks[0].attn, tokens, prefix=1, grid=(2, 5)))
    model(x).square().sum().backward()
    assert all(torch.isfinite(p.grad).all() for p in model.parameters())


def test_head_size_33_compiled():
    model = ViT(dim=33, heads=1).eval()
    x = images().float()
    t5fx.linearize(model, t5fx.everything, example_inputs=x)
    with torch.no_grad():
        torch.testing.assert_close(torch.compile(model, backend="aot_eager", fullgraph=True)(x), model(x))
