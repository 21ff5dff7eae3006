"""https://github.com/facebookresearch/dinov2/issues/506: a model made for non-square images takes its tokens as square.

The grid comes from the patch embedding of the forward that is running, so neither a square is assumed nor height and
width mixed up.
"""

import pytest
import torch
from toys import by_hand, images, louder, vit
from zoo import build

import t5fx


@pytest.mark.parametrize("size", [(56, 112), (112, 56), (42, 70)])
def test_made_for_non_square_images(size):
    model, args, kwargs = build("timm/vit_dinov2_reg4", size=size)
    grid = (size[0] // 14, size[1] // 14)
    assert [site.layout for site in t5fx.inspect(model, (args, kwargs))] == [t5fx.TokenLayout(5, grid)] * 2
    t5fx.linearize(model, t5fx.everything, example_inputs=(args, kwargs))
    with torch.no_grad():
        assert torch.isfinite(model(*args)).all()
    assert model.blocks[0].attn.ttt.layout.resolve(5 + grid[0] * grid[1]) == (5, list(grid))


def test_as_many_tokens_lying_otherwise():
    """2 x 6, 3 x 4 and 6 x 2 are twelve tokens each: only the grid tells them apart."""
    model = louder(t5fx.linearize(vit(), t5fx.everything, example_inputs=images()))
    tokens = torch.randn(2, 13, 16, dtype=torch.float64)
    attention, found = model.blocks[0].attn, []
    with torch.no_grad():
        for grid in ((2, 6), (3, 4), (6, 2)):
            model(images(4 * grid[0], 4 * grid[1]))
            found.append(attention(tokens))
            torch.testing.assert_close(found[-1], by_hand(attention, tokens, prefix=1, grid=grid))
    assert not torch.allclose(found[0], found[2])
