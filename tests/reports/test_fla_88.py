"""https://github.com/fla-org/flash-linear-attention/issues/88: sequences of 8 tokens or fewer fail to compile."""

import pytest
import torch
from toys import by_hand, images, louder, vit

import t5fx


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return louder(t5fx.linearize(vit(), t5fx.everything, example_inputs=images()))


@pytest.mark.parametrize("grid", [(1, 1), (1, 2), (2, 1), (1, 5), (2, 2), (2, 3), (2, 4)])
def test_few_tokens(model, grid):
    height, width = grid
    image = images(4 * height, 4 * width).requires_grad_()
    out = model(image)
    model.zero_grad()
    out.square().sum().backward()
    assert image.grad.any()
    assert all(torch.isfinite(p.grad).all() for p in model.parameters())
    tokens = torch.randn(2, 1 + height * width, 16, dtype=torch.float64)
    attention = model.blocks[0].attn
    with torch.no_grad():  # the grid of the forward pass above
        torch.testing.assert_close(attention(tokens), by_hand(attention, tokens, prefix=1, grid=grid))


@pytest.mark.parametrize("grid", [(2, 2), (2, 3), (2, 4)])
def test_converted_on_few_tokens(grid):
    model = vit()
    x = images(4 * grid[0], 4 * grid[1])
    assert t5fx.inspect(model, x)[0].layout == t5fx.TokenLayout(1, grid)
    louder(t5fx.linearize(model, t5fx.everything, example_inputs=x))
    more = images()
    assert torch.isfinite(model(x)).all()
    assert torch.isfinite(model(more)).all()


@pytest.mark.parametrize("grid", [(1, 2), (2, 4)])
def test_compiled(model, grid):
    x = images(4 * grid[0], 4 * grid[1])
    with torch.no_grad():
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
        torch.testing.assert_close(compiled(x), model(x), rtol=1e-9, atol=1e-9)
