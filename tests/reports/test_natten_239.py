"""https://github.com/SHI-Labs/NATTEN/issues/239: no backend on a CPU for a head size of 16."""

import pytest
import torch
from toys import ViT, by_hand, images, louder

import t5fx


@pytest.mark.parametrize("head_dim", [8, 16, 24])
def test_small_heads_on_a_cpu(head_dim):
    model = ViT(dim=2 * head_dim, heads=2).double().eval()
    x = images(16, 16)
    louder(t5fx.linearize(model, t5fx.everything, example_inputs=x))
    tokens = torch.randn(2, 17, 2 * head_dim, dtype=torch.float64)
    with torch.no_grad(), t5fx.grid(model, (4, 4)):
        attention = model.blocks[0].attn
        torch.testing.assert_close(attention(tokens), by_hand(attention, tokens, prefix=1, grid=(4, 4)))
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
        torch.testing.assert_close(compiled(x), model(x))
