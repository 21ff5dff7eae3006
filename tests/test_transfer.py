"""relative_error: which tokens of an owner's outputs count, and how much."""

import pytest
import torch
from toys import images, vit

import t5fx
from t5fx.transfer import Grid, WatchSteps, relative_error

GRID = Grid(tokens=8, first=1, end=7)  # a class token, 2 x 3 patches, a token behind them


def tensors(*shape, count=2):
    return [torch.randn(shape, dtype=torch.float64, requires_grad=True) for _ in range(count)]


def plain(got, wanted):
    return float(((got - wanted).square().mean() / wanted.var(correction=0)).detach())


def test_tokens_beside_the_grid_count_as_much_as_those_on_it():
    got, wanted = tensors(3, 8, 5)
    beside = [0, 7]
    expected = (plain(got[:, 1:7], wanted[:, 1:7]) + plain(got[:, beside], wanted[:, beside])) / 2
    assert float(relative_error(got, wanted, grid=GRID).detach()) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("shape", [(3, 6, 5), (3, 2, 4, 5), (8, 8)])  # an image alone, a grid of pixels, no tokens
def test_outputs_of_another_shape_are_one_whole(shape):
    got, wanted = tensors(*shape)
    assert float(relative_error(got, wanted, grid=GRID).detach()) == pytest.approx(plain(got, wanted), rel=1e-12)


def test_a_grid_that_is_all_there_is_changes_nothing():
    got, wanted = tensors(3, 8, 5)
    assert torch.equal(relative_error(got, wanted, grid=Grid(8, 0, 8)), relative_error(got, wanted))


def test_masked_tokens_count_in_neither_part():
    got, wanted = tensors(2, 8, 5)
    mask = torch.ones(2, 8, dtype=torch.bool)
    mask[1, [4, 5, 6, 7]] = False
    seen = []
    for rows in ([0, 7], [1, 2, 3, 4, 5, 6]):
        inside = mask[:, rows]
        seen.append(plain(got[:, rows][inside], wanted[:, rows][inside]))
    error = relative_error(got, wanted, mask, GRID).detach()
    assert float(error) == pytest.approx(sum(seen) / 2, rel=1e-12)
    other = got.detach().clone().masked_fill(~mask[..., None], 100.0).requires_grad_()
    assert float(relative_error(other, wanted, mask, GRID).detach()) == pytest.approx(float(error), rel=1e-12)


def test_the_grid_is_seen_where_the_model_runs():
    model = t5fx.linearize(vit(), t5fx.everything, example_inputs=images())
    with WatchSteps() as seen:
        model(images(8, 12))
    assert seen.grid == Grid(tokens=7, first=1, end=7)
