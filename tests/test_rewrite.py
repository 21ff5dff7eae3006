"""A rewritten owner computes the reference operator on its own queries, keys and values; outputs and gradients."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from toys import Attention, assert_same_state, by_hand, images, key_padding, louder, state, vit

import t5fx

CONFIGS = {
    "T5": t5fx.T5,
    "DiT5": t5fx.DIT5_TTT,
    "no convolution": t5fx.T5.replace(dwc=None),
    "no key norm": t5fx.T5.replace(key_norm=False),
    "numbers": t5fx.T5.replace(inner_lr=3.0, key_norm_eps=0.1, hidden_ratio=1.5, dwc=5),
    "learned rate": t5fx.T5.replace(inner_lr=4.0, learn_inner_lr=True),
}
each_config = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)


def linearized(config=t5fx.T5, inputs=None, **options):
    model = vit(**options)
    given = images() if inputs is None else inputs
    return louder(t5fx.linearize(model, t5fx.everything, config=config, example_inputs=given))


def expected(model, image, config=t5fx.T5, mask=None, grid=None):
    """The toy's forward with every attention computed by hand; the grid comes from the image, not from the model."""
    grid = grid or (image.shape[2] // 4, image.shape[3] // 4)
    x = model.embed(image).flatten(2).transpose(1, 2)
    x = torch.cat([model.cls.expand(len(x), -1, -1), x], dim=1)
    for block in model.blocks:
        x = x + by_hand(block.attn, block.norm(x), config=config, mask=mask, prefix=1, grid=grid)
        x = x + block.mlp(x).tanh()
    return model.head(model.norm(x.mean(1)))


def assert_equal_with_gradients(model, actual, wanted):
    torch.testing.assert_close(actual, wanted, rtol=0, atol=1e-12)
    parameters = dict(model.named_parameters())
    cotangent = torch.linspace(-1, 1, wanted.numel(), dtype=wanted.dtype).view_as(wanted)
    mine, theirs = (
        torch.autograd.grad(y, list(parameters.values()), cotangent, allow_unused=True) for y in (actual, wanted)
    )
    for name, one, other in zip(parameters, mine, theirs, strict=True):
        assert other is not None
        assert other.abs().max() > 0, name
        torch.testing.assert_close(one, other, rtol=0, atol=1e-11, msg=lambda m, n=name: f"{n}: {m}")


@each_config
def test_a_converted_model_is_the_reference_with_a_class_token_and_a_grid_that_is_not_square(config):
    model, x = linearized(config), images()
    assert_equal_with_gradients(model, model(x), expected(model, x, config))


@pytest.mark.parametrize("training", [False, True])
def test_the_grid_is_that_of_this_call(training):
    """2 x 5, then 5 x 2 (as many tokens), 3 x 4, a row and a column."""
    model = linearized().train(training)
    for height, width in ((2, 5), (5, 2), (3, 4), (1, 6), (6, 1), (2, 5)):
        x = images(4 * height, 4 * width, batch=3)
        torch.testing.assert_close(model(x), expected(model, x, grid=(height, width)), rtol=0, atol=1e-12)


def test_a_grid_that_the_tokens_do_not_have_is_an_error_and_never_used():
    model = linearized()
    model(images(8, 20))
    block = model.blocks[1]
    for tokens in (1, 10, 12, 21):
        with pytest.raises(t5fx.LayoutError, match=rf"blocks\.1\.attn.*{tokens} tokens.*2x5.*t5fx\.grid"):
            block(torch.randn(2, tokens, 16, dtype=torch.float64))
    x = torch.randn(2, 21, 16, dtype=torch.float64)
    with t5fx.grid(model, (5, 4)):
        wanted = by_hand(block.attn, block.norm(x), prefix=1, grid=(5, 4))
        torch.testing.assert_close(block.attn(block.norm(x)), wanted, rtol=0, atol=1e-12)
    with pytest.raises(t5fx.LayoutError):
        block(x)


# ---- masks and scale --------------------------------------------------------------------------------------------


@each_config
def test_a_key_padding_mask_reaches_every_part(config):
    x, mask = images(), key_padding(7, 11, tokens=11)
    model = linearized(config, (images(), mask))
    for form in (mask, mask.expand(2, 2, 11, 11)):
        assert_equal_with_gradients(model, model(x, form), expected(model, x, config, mask[:, 0, 0]))
    assert not torch.allclose(model(x, mask), model(x, torch.ones_like(mask)))
    torch.testing.assert_close(model(x), expected(model, x, config), rtol=0, atol=1e-12)  # a call without one


def test_one_mask_for_all_rows():
    x, mask = images(), key_padding(8, tokens=11)[0, 0]
    model = linearized(inputs=(images(), mask))
    wanted = expected(model, x, mask=mask.expand(2, 11))
    torch.testing.assert_close(model(x, mask), wanted, rtol=0, atol=1e-12)


BAD_MASKS = {
    "float": torch.zeros(2, 1, 1, 11, dtype=torch.float64),
    "differs between queries": torch.ones(2, 1, 11, 11, dtype=torch.bool).tril(),
    "differs between heads": torch.arange(22).view(1, 2, 1, 11).expand(2, 2, 1, 11) != 3,
    "one for all, differs between queries": torch.ones(11, 11, dtype=torch.bool),
}


@pytest.mark.parametrize("traced_with_mask", [False, True])
@pytest.mark.parametrize("kind", BAD_MASKS)
def test_a_mask_that_turns_up_later_is_refused_unless_it_is_key_padding(kind, traced_with_mask):
    inputs = (images(), key_padding(7, 11, tokens=11)) if traced_with_mask else images()
    model = linearized(inputs=inputs)
    with pytest.raises(t5fx.T5fxError, match=r"mask"):
        model(images(), BAD_MASKS[kind])
    x = images()
    torch.testing.assert_close(model(x), expected(model, x), rtol=0, atol=1e-12)  # and no harm is done


class Switch(Attention):
    causal = False

    def forward(self, x, mask=None):
        return self.out(F.scaled_dot_product_attention(*self.heads_of(x), is_causal=self.causal))


def test_attention_that_turns_causal_later_is_refused():
    model = vit()
    model.blocks[1].attn = owner = Switch().double()
    owner.causal = False  # on the instance
    t5fx.linearize(model, t5fx.everything, example_inputs=images())
    model(images())
    owner.causal = True
    with pytest.raises(t5fx.CaptureError, match=r"blocks\.1\.attn.*causal"):
        model(images())


@pytest.mark.parametrize("scale", [None, 0.7])
def test_the_softmax_scale_becomes_that_of_the_inner_loss(scale):
    model, x = linearized(scale=scale), images()
    actual = model(x)
    torch.testing.assert_close(actual, expected(model, x), rtol=0, atol=1e-12)
    for block in model.blocks:
        block.attn.options = {"scale": 1.0}  # only ``by_hand`` looks at it now
    assert not torch.allclose(actual, expected(model, x))


# ---- other shapes of attention ----------------------------------------------------------------------------------


class Grouped(nn.Module):
    """Four query heads on two key heads."""

    def __init__(self):
        super().__init__()
        self.q, self.kv = nn.Linear(16, 16), nn.Linear(16, 16)

    def qkv(self, x):
        query = self.q(x).unflatten(-1, (4, 4)).transpose(1, 2)
        key, value = self.kv(x).unflatten(-1, (2, 2, 4)).permute(2, 0, 3, 1, 4)
        return query, key, value

    def forward(self, x):
        return F.scaled_dot_product_attention(*self.qkv(x), enable_gqa=True).transpose(1, 2).flatten(2)


def test_heads_that_share_keys_are_shared_in_order():
    owner, x = Grouped().double(), torch.randn(2, 6, 16, dtype=torch.float64)
    layout = t5fx.TokenLayout(grid=(2, 3))
    louder(t5fx.linearize(owner, t5fx.everything, example_inputs=x, layout=layout))
    query, key, value = owner.qkv(x)
    key, value = key[:, [0, 0, 1, 1]], value[:, [0, 0, 1, 1]]
    wanted = t5fx.ops.ttt_attention(query, key, value, dict(owner.ttt.named_parameters()), t5fx.T5, grid=(2, 3))
    torch.testing.assert_close(owner(x), wanted.transpose(1, 2).flatten(2), rtol=0, atol=1e-12)


class Halves(Attention):
    """Two attention calls in one forward, and another way in train mode."""

    def forward(self, x, mask=None):
        query, key, value = self.heads_of(x)
        one = F.scaled_dot_product_attention(query, key, value)
        two = F.scaled_dot_product_attention(one, key, value)
        return self.out(2 * two if self.training else two)


@pytest.mark.parametrize("which", ["", ":1", "both"])
def test_the_calls_of_one_owner_are_told_apart_and_so_are_train_and_eval(which):
    model = vit(depth=1)
    model.blocks[0].attn = owner = Halves().double()
    site = "blocks.0.attn"
    select = t5fx.everything if which == "both" else t5fx.names(f"{site}{which}")
    if which == "":
        select = lambda s: s.index == 0  # noqa: E731  (its name is the owner's, which is that of both)
    louder(t5fx.linearize(model, select, example_inputs=images()))
    x = torch.randn(2, 11, 16, dtype=torch.float64)
    query, key, value = owner.heads_of(x)

    def attend(query, index):
        chosen = {"": [0], ":1": [1], "both": [0, 1]}[which]
        if index not in chosen:
            return F.scaled_dot_product_attention(query, key, value)
        weights = owner.ttt if chosen.index(index) == 0 else owner.ttt_1
        params = dict(weights.named_parameters())
        return t5fx.ops.ttt_attention(query, key, value, params, t5fx.T5, prefix=1, grid=(2, 5))

    wanted = attend(attend(query, 0), 1)
    for training, factor in ((False, 1), (True, 2), (False, 1)):
        model.train(training)
        with t5fx.grid(model, (2, 5)):
            torch.testing.assert_close(owner(x), owner.out(factor * wanted), rtol=0, atol=1e-12)


# ---- and back ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("trained", [False, True])
def test_revert_leaves_nothing_behind(trained):
    model, x = vit(), images()
    before, answer = state(model), model(x)
    t5fx.linearize(model, t5fx.everything, example_inputs=images())
    assert [n for n, _ in model.named_parameters() if ".ttt." in n]
    assert not torch.allclose(model(x), answer)
    if trained:
        model(x).sum().backward()
        model.zero_grad()
    t5fx.revert(model)
    assert_same_state(before, state(model), but=("rng",))
    assert torch.equal(model(x), answer)
