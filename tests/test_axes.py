"""Axis provenance: what views, joins, splits and operators do to what an axis is made of."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import t5fx
from t5fx.capture import axes as ax
from t5fx.capture.axes import Algebra, size_of
from t5fx.capture.track import AxisTracker


@pytest.fixture
def algebra():
    return Algebra()


def test_flatten_and_back(algebra):
    b, c, h, w = (algebra.new(n, ax.SPATIAL, name) for n, name in ((2, "b"), (6, "c"), (4, "h"), (5, "w")))
    flat = algebra.regroup([b, c, h, w], [2, 6, 20])
    assert flat[2] == (*h, *w)
    assert algebra.regroup(flat, [2, 6, 4, 5]) == [b, c, h, w]


def test_windows_split_and_merge(algebra):
    h, w = algebra.new(8, ax.SPATIAL, "h"), algebra.new(6, ax.SPATIAL, "w")
    outer_h, inner_h, outer_w, inner_w = algebra.regroup([h, w], [4, 2, 3, 2])
    assert inner_h[0].parent is h[0]
    assert algebra.regroup([outer_h, inner_h, outer_w, inner_w], [8, 6]) == [h, w]
    mixed = algebra.regroup([outer_h, outer_w, inner_h, inner_w], [12, 4])
    assert mixed == [(*outer_h, *outer_w), (*inner_h, *inner_w)]


def test_join_and_cut(algebra):
    first, grid = algebra.new(1, ax.PARAM), (*algebra.new(4, ax.SPATIAL), *algebra.new(5, ax.SPATIAL))
    joined = algebra.join([first, grid])
    assert size_of(joined) == 21
    assert algebra.join([first, grid]) == joined
    assert algebra.cut(joined, 1, 20) == grid
    assert algebra.cut(joined, 0, 21) == joined
    assert algebra.cut(joined, 0, 5) not in (joined, grid)
    assert algebra.join([algebra.cut(joined, 0, 1), algebra.cut(joined, 1, 20)]) == joined


def test_what_does_not_line_up_is_unknown(algebra):
    h, w = algebra.new(4, ax.SPATIAL, "h"), algebra.new(6, ax.SPATIAL, "w")
    odd = algebra.regroup([h, w], [3, 8])
    assert all(axis[0].origin == ax.OTHER for axis in odd)


def follow(function, *inputs):
    """The axes of ``function(*inputs)``, and those of the first input."""
    with torch.no_grad(), AxisTracker() as tracker:
        for i, tensor in enumerate(inputs):
            tracker.put_input(tensor, f"i{i}")
        out = function(*inputs)
        return tracker.axes(out), tracker.axes(inputs[0])


IMAGE = torch.randn(2, 3, 8, 12)
TOKENS = torch.randn(2, 10, 16)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
        lambda x: F.layer_norm(F.linear(x, torch.randn(16, 16)), (16,)),
        lambda x: F.gelu(x) * torch.sigmoid(x) + torch.randn(1, 10, 16),
        lambda x: torch.cat([x[:, :4], x[:, 4:]], 1),
        lambda x: x.unflatten(-1, (2, 8)).permute(0, 2, 1, 3).transpose(1, 2).flatten(2),
        lambda x: torch.softmax(x @ x.transpose(1, 2), -1) @ x,
        lambda x: x / x.norm(dim=-1, keepdim=True) * x.var(-1, keepdim=True),
        lambda x: x.chunk(2, -1)[0],
        lambda x: torch.einsum("bnc,cd->bnd", x, torch.randn(16, 4)),
        lambda x: x.masked_fill(torch.zeros(2, 10, 1, dtype=torch.bool), 0.0),
    ],
)
def test_the_token_axis_is_kept(function):
    out, axes = follow(function, TOKENS)
    assert out[:2] == axes[:2]


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.roll(1, 1),
        lambda x: x.flip(1),
        lambda x: x[:, torch.randperm(10)],
        lambda x: x.gather(1, torch.zeros(2, 10, 16, dtype=torch.long)),
        lambda x: x.sort(1)[0],
        lambda x: torch.linalg.solve(torch.eye(10), x),
    ],
)
def test_what_reorders_tokens_is_not_trusted(function):
    out, axes = follow(function, TOKENS)
    assert out[1] != axes[1]


def test_patches_make_a_grid():
    out, _ = follow(nn.Conv2d(3, 7, 4, 4), IMAGE)
    assert [size_of(a) for a in out] == [2, 7, 2, 3]
    assert [a[0].origin for a in out[2:]] == [ax.SPATIAL] * 2
    same, axes = follow(nn.Conv2d(3, 7, 3, padding=1), IMAGE)
    assert same[2:] == axes[2:]
    position, _ = follow(lambda x: F.interpolate(torch.randn(1, 5, 4, 4), (8, 12)), IMAGE)
    assert [a[0].origin for a in position] == [ax.PARAM] * 4  # of a parameter, not of the image


class Attends(nn.Module):
    def __init__(self, prepare):
        super().__init__()
        self.patch = nn.Conv2d(3, 16, 2, 2)
        self.qkv = nn.Linear(16, 48)
        self.prepare = prepare

    def forward(self, image):
        x = self.prepare(self.patch(image))
        query, key, value = self.qkv(x).unflatten(-1, (3, 2, 8)).movedim(-3, 0).transpose(-2, -3)
        return F.scaled_dot_product_attention(query, key, value)


@pytest.mark.parametrize(
    ("prepare", "kind", "layout", "code"),
    [
        (lambda x: x.flatten(2).mT, "self", "4x6", None),
        (lambda x: x.permute(0, 2, 3, 1).flatten(1, 2), "self", "4x6", None),
        (lambda x: x.transpose(2, 3).flatten(2).mT, "self", "6x4", None),  # columns first
        (lambda x: torch.cat([torch.zeros(2, 3, 16), x.flatten(2).mT], 1), "self", "3 + 4x6", None),
        (
            lambda x: x.unflatten(2, (2, 2)).unflatten(4, (3, 2)).permute(0, 2, 4, 3, 5, 1).reshape(12, 4, 16),
            "window",
            "2x2",
            None,
        ),
        (lambda x: x.flatten(2).mT[:, torch.randperm(24)], "self", "?", "layout"),
        (lambda x: x.flatten(2).mT.roll(3, 1), "self", "?", "layout"),
    ],
)
def test_sites_are_told_apart(prepare, kind, layout, code):
    site = t5fx.inspect(Attends(prepare), torch.randn(2, 3, 8, 12))[0]
    assert site.kind == kind
    assert str(site.layout or "?") == layout
    assert (site.refusal.code if site.refusal else None) == code
