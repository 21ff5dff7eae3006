"""https://github.com/huggingface/transformers/issues/30978: output_attentions=True returned a list of None.

A converted layer has no attention map: asking for it is an error, never None.
"""

import pytest
import torch
from zoo import build

import t5fx


def test_output_attentions_is_refused_once_converted():
    model, args, kwargs = build("transformers/ViT")
    t5fx.linearize(model, t5fx.everything, example_inputs=(args, kwargs))
    with torch.no_grad():
        before = model(**kwargs).last_hidden_state
        with pytest.raises(t5fx.T5fxError):
            model(**kwargs, output_attentions=True)
        assert torch.equal(model(**kwargs).last_hidden_state, before)


def test_output_attentions_of_eager_attention():
    model, args, kwargs = build("transformers/ViT")
    model.set_attn_implementation("eager")
    report = t5fx.inspect(model, (args, kwargs))
    assert all(site.convertible for site in report)
    asked = t5fx.inspect(model, (args, {**kwargs, "output_attentions": True}))
    assert [site.refusal.code for site in asked] == ["map", "map"]
