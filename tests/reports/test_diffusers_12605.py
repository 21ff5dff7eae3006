"""https://github.com/huggingface/diffusers/issues/12605: an attention backend that ignores the mask it is given.

The result looks right and is wrong.  Here a mask is either used, or the site is refused.
"""

import pytest
import torch
from toys import images, key_padding, louder, vit
from zoo import build

import t5fx


def test_a_mask_is_used():
    model, x = vit(), images()
    t5fx.linearize(model, t5fx.everything, example_inputs=(x, key_padding(11, 7, tokens=11)))
    with torch.no_grad():
        short, long = (model(x, key_padding(11, n, tokens=11)) for n in (7, 10))
    torch.testing.assert_close(short[0], long[0])
    assert not torch.allclose(short[1], long[1])


def test_a_mask_that_cannot_be_used_is_refused():
    x = images()
    for mask in (torch.randn(11, 11).double(), torch.ones(11, 11, dtype=torch.bool).tril()):
        report = t5fx.inspect(vit(), (x, mask))
        assert {site.refusal.code for site in report} <= {"float-mask", "query-mask"}


def test_a_mask_that_comes_later_is_refused():
    model, x = vit(), images()
    t5fx.linearize(model, t5fx.everything, example_inputs=x)
    with pytest.raises(t5fx.CaptureError, match="float mask"):
        model(x, torch.randn(11, 11).double())
    with pytest.raises(t5fx.CaptureError, match="differs between queries"):
        model(x, torch.ones(11, 11, dtype=torch.bool).tril())


def test_joint_text_with_a_mask():
    """diffusers' own: Flux passes the mask of attention_kwargs on, and a converted site takes no float one."""
    model, args, kwargs = build("diffusers/Flux")
    louder(t5fx.linearize(model, t5fx.everything, example_inputs=(args, kwargs)))
    tokens = 7 + 64
    block = model.transformer_blocks[0]
    cis = model.pos_embed(torch.cat((kwargs["txt_ids"], kwargs["img_ids"])))
    image, text = torch.randn(2, 64, 32), torch.randn(2, 7, 32)
    with torch.no_grad(), t5fx.grid(model, (8, 8)):
        keep = torch.ones(2, 1, 1, tokens, dtype=torch.bool)
        plain = block.attn(image, text, image_rotary_emb=cis)[0]
        all_kept = block.attn(image, text, attention_mask=keep, image_rotary_emb=cis)[0]
        torch.testing.assert_close(all_kept, plain, rtol=1e-3, atol=1e-4)
        keep[..., :3] = False
        some = block.attn(image, text, attention_mask=keep, image_rotary_emb=cis)[0]
        assert not torch.allclose(some, plain, rtol=1e-3, atol=1e-4)
        with pytest.raises(t5fx.T5fxError, match="boolean mask"):
            block.attn(image, text, attention_mask=torch.zeros(2, 1, 1, tokens), image_rotary_emb=cis)
