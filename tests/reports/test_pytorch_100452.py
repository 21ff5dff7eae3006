"""https://github.com/pytorch/pytorch/issues/100452: Inductor's attention pattern misses masks, dropout and half.

The report's network, written out, in each of these forms.
"""

import math

import pytest
import torch
from torch import nn

import t5fx


class Net(nn.Module):
    def __init__(self, dropout=False, mask=""):
        super().__init__()
        self.qkv, self.dropout, self.mask = nn.Linear(16, 48), dropout, mask

    def heads_of(self, x):
        return self.qkv(x).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)

    def forward(self, x, keep=None):
        q, k, v = self.heads_of(x)
        scores = q @ k.transpose(-2, -1) / math.sqrt(q.size(-1))
        if self.mask == "tril":
            seen = torch.ones(q.size(-2), k.size(-2), dtype=torch.bool, device=q.device).tril(diagonal=0)
            scores = scores + torch.zeros_like(scores).masked_fill(torch.logical_not(seen), -float("inf"))
        elif self.mask == "padding":
            scores = scores.masked_fill(torch.logical_not(keep), -float("inf"))
        weight = torch.softmax(scores, dim=-1)
        if self.dropout:
            weight = torch.dropout(weight, 0.1, True)
        return weight @ v


def by_hand(model, x, mask=None):
    params = dict(model.ttt.named_parameters())
    return t5fx.ops.ttt_attention(*model.heads_of(x), params, t5fx.T5, grid=(3, 3), mask=mask)


def test_dropout_is_found_and_said():
    model, x = Net(dropout=True).eval(), torch.randn(2, 9, 16)
    (site,) = t5fx.inspect(model, x)
    assert site.convertible
    assert any("dropout of 0.1" in note for note in site.notes)
    t5fx.linearize(model, t5fx.everything, example_inputs=x)
    torch.testing.assert_close(model(x), by_hand(model, x))
    assert torch.equal(model(x), model(x))  # nothing random is left


def test_key_padding_mask():
    model, x = Net(mask="padding").eval(), torch.randn(2, 9, 16)
    keep = (torch.arange(9) < torch.tensor([[9], [6]]))[:, None, None]
    t5fx.linearize(model, t5fx.everything, example_inputs=(x, keep))
    torch.testing.assert_close(model(x, keep), by_hand(model, x, keep[:, 0, 0]))
    moved = x.clone()
    moved[1, 6:] += 7
    torch.testing.assert_close(model(moved, keep)[1, :, :6], model(x, keep)[1, :, :6])


def test_causal_mask_is_refused():
    (site,) = t5fx.inspect(Net(mask="tril").eval(), torch.randn(2, 9, 16))
    assert site.refusal.code == "float-mask"


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half(dtype):
    model, x = Net().eval(), torch.randn(2, 9, 16)
    t5fx.linearize(model, t5fx.everything, example_inputs=x)
    exact = model(x)
    low = model.to(dtype)(x.to(dtype))
    assert low.dtype == dtype
    assert (low.float() - exact).norm() < 0.02 * exact.norm()


def test_half_from_the_start():
    model, x = Net().half().eval(), torch.randn(2, 9, 16).half()
    t5fx.linearize(model, t5fx.everything, example_inputs=x)
    assert model.ttt.w1.dtype == torch.float16
    torch.testing.assert_close(model(x), by_hand(model, x))
