"""https://github.com/huggingface/diffusers/issues/11903: what fuse_qkv_projections does to training, and its undoing.

Fuse, convert, train, undo: a converted site reads the fused projection, and reverting leaves it fused and trained.
"""

import pytest
import torch
from zoo import build

import t5fx


def fused():
    model, args, kwargs = build("diffusers/SD3")
    model.fuse_qkv_projections()
    return model, args, kwargs


def test_fuse_convert_undo():
    model, args, kwargs = build("diffusers/SD3")
    with torch.no_grad():
        softmax = model(*args, **kwargs)[0]
        model.fuse_qkv_projections()
        assert hasattr(model.transformer_blocks[0].attn, "to_qkv")
        before = model(*args, **kwargs)[0]
        torch.testing.assert_close(before, softmax, rtol=1e-4, atol=1e-5)
        t5fx.linearize(model, t5fx.everything, example_inputs=(args, kwargs))
        converted = model(*args, **kwargs)[0]
        assert not torch.equal(converted, before)
        t5fx.revert(model)
        assert torch.equal(model(*args, **kwargs)[0], before)
        model.unfuse_qkv_projections()
        torch.testing.assert_close(model(*args, **kwargs)[0], softmax, rtol=1e-4, atol=1e-5)


def test_fused_and_split_convert_to_the_same():
    one, args, kwargs = fused()
    two, *_ = build("diffusers/SD3")
    with torch.no_grad():
        for model in (one, two):
            torch.manual_seed(3)
            t5fx.linearize(model, t5fx.everything, example_inputs=(args, kwargs))
        torch.testing.assert_close(one(*args, **kwargs)[0], two(*args, **kwargs)[0], rtol=1e-4, atol=1e-5)


def test_the_fused_projection_is_what_trains():
    model, args, kwargs = fused()
    t5fx.linearize(model, t5fx.everything, example_inputs=(args, kwargs))
    model(*args, **kwargs)[0].square().sum().backward()
    attention = model.transformer_blocks[0].attn
    assert attention.to_qkv.weight.grad.any()
    assert attention.to_q.weight.grad is None  # diffusers keeps the split ones; nothing reads them


def test_fusing_a_converted_layer_is_refused():
    """The new processor would compute softmax attention again, and nobody would notice."""
    model, args, kwargs = build("diffusers/SD3")
    t5fx.linearize(model, t5fx.everything, example_inputs=(args, kwargs))
    model.fuse_qkv_projections()
    with pytest.raises(t5fx.CaptureError, match="processor"):
        model(*args, **kwargs)
