"""Every way to write attention becomes one SDPA call; what is not understood is refused with its obstacle."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import t5fx

HEADS, DIM = 2, 8


def heads(x):
    return x.unflatten(-1, (HEADS, DIM)).transpose(1, 2)


def plain(x):
    return x.transpose(1, 2).flatten(2)


def sdpa(self, q, k, v):
    return plain(F.scaled_dot_product_attention(heads(q), heads(k), heads(v)))


def scaled_query(self, q, k, v):
    q = heads(q) * DIM**-0.5
    attention = q @ heads(k).transpose(-2, -1)
    attention = attention.softmax(dim=-1)
    return plain(self.drop(attention) @ heads(v))


def scaled_both(self, q, k, v):
    scale = DIM**-0.25
    return plain(torch.softmax((heads(q) * scale) @ (heads(k) * scale).mT, -1) @ heads(v))


def scaled_key_transposed(self, q, k, v):
    return plain(torch.softmax(heads(q) @ (heads(k) * DIM**-0.5).transpose(-2, -1), -1) @ heads(v))


def scaled_key_permuted(self, q, k, v):
    k = (heads(k) / DIM**0.5).permute(0, 1, 3, 2)
    return plain(torch.softmax(heads(q) @ k, -1) @ heads(v))


def scaled_before_heads(self, q, k, v):
    q, k = q * DIM**-0.25, k * DIM**-0.25
    return plain(torch.softmax(heads(q) @ heads(k).transpose(2, 3), -1) @ heads(v))


def divided_scores(self, q, k, v):
    scores = torch.matmul(heads(q), heads(k).permute(0, 1, 3, 2)) / math.sqrt(q.size(-1) // HEADS)
    return plain(torch.matmul(F.dropout(F.softmax(scores, -1), 0.0, self.training), heads(v)))


def einsum(self, q, k, v):
    q, k, v = (x.unflatten(-1, (HEADS, DIM)).permute(0, 2, 1, 3) for x in (q, k, v))
    scores = torch.einsum("b h i d, b h j d -> b h i j", q, k) * DIM**-0.5
    return plain(torch.einsum("bhij,bhjd->bhid", scores.softmax(-1), v))


def baddbmm(self, q, k, v):
    q, k, v = (heads(x).reshape(-1, x.shape[1], DIM) for x in (q, k, v))
    empty = torch.empty(q.shape[0], q.shape[1], k.shape[1], dtype=q.dtype, device=q.device)
    scores = torch.baddbmm(empty, q, k.transpose(-1, -2), beta=0, alpha=DIM**-0.5)
    out = torch.bmm(scores.softmax(-1), v)
    return plain(out.reshape(-1, HEADS, out.shape[1], DIM))


def in_float(self, q, k, v):
    scores = (heads(q) @ heads(k).mT) * DIM**-0.5
    return plain(F.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype) @ heads(v))


def softmax_module(self, q, k, v):
    return plain(self.softmax(heads(q) @ heads(k).mT * DIM**-0.5) @ heads(v))


FORMS = {
    f.__name__: f
    for f in (
        sdpa,
        scaled_query,
        scaled_both,
        scaled_key_transposed,
        scaled_key_permuted,
        scaled_before_heads,
        divided_scores,
        einsum,
        baddbmm,
        in_float,
        softmax_module,
    )
}


class Attention(nn.Module):
    def __init__(self, form):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(HEADS * DIM, HEADS * DIM) for _ in range(3))
        self.drop, self.softmax = nn.Dropout(0.1), nn.Softmax(dim=-1)
        self.form = form
        self.mix = nn.Linear(HEADS, HEADS)
        self.temperature = nn.Parameter(torch.ones(HEADS, 1, 1))

    def forward(self, x, *rest):
        return self.form(self, self.q(x), self.k(x), self.v(x), *rest)


@pytest.mark.parametrize("form", FORMS)
def test_all_forms_are_one(form):
    reference, other = Attention(sdpa).eval(), Attention(FORMS[form]).eval()
    other.load_state_dict(reference.state_dict())
    x = torch.randn(2, 16, HEADS * DIM)
    torch.testing.assert_close(other(x), reference(x))
    for net in (reference, other):
        site = t5fx.inspect(net, x)[0]
        assert (site.kind, site.heads, site.head_dim, site.mask) == ("self", HEADS, DIM, "none")
        t5fx.linearize(net, t5fx.everything, example_inputs=x)
    with torch.no_grad():  # at their start the inner weights are too small for a forgotten factor to show
        for name, weight in reference.named_parameters():
            if name.startswith("ttt.w"):
                weight.mul_(30)
    other.load_state_dict(reference.state_dict())
    larger = torch.randn(3, 25, HEADS * DIM)
    torch.testing.assert_close(other(larger), reference(larger))
    compiled = torch.compile(other, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), reference(x))


def float_mask(self, q, k, v, mask):
    return plain((heads(q) @ heads(k).mT * DIM**-0.5 + mask).softmax(-1) @ heads(v))


def hidden(self, q, k, v, mask):
    scores = (heads(q) @ heads(k).mT * DIM**-0.5).masked_fill(mask, float("-inf"))
    return plain(scores.softmax(-1) @ heads(v))


def chosen(self, q, k, v, mask):
    scores = torch.where(mask, heads(q) @ heads(k).mT * DIM**-0.5, -torch.inf)
    return plain(scores.softmax(-1) @ heads(v))


@pytest.mark.parametrize(
    ("form", "mask", "code", "kind"),
    [
        (float_mask, torch.zeros(16, 16), "float-mask", "float"),
        (hidden, torch.zeros(2, 1, 1, 16, dtype=torch.bool), None, "key padding"),
        (hidden, torch.zeros(16, 16, dtype=torch.bool), "query-mask", "boolean"),
        (chosen, torch.ones(2, 1, 1, 16, dtype=torch.bool), None, "key padding"),
    ],
)
def test_masks_in_written_attention(form, mask, code, kind):
    site = t5fx.inspect(Attention(form), (torch.randn(2, 16, HEADS * DIM), mask))[0]
    assert (site.refusal.code if site.refusal else None, site.mask) == (code, kind)


def test_masked_keys_take_no_part():
    net = Attention(hidden)
    x = torch.randn(2, 16, HEADS * DIM)
    mask = torch.zeros(2, 1, 1, 16, dtype=torch.bool)
    mask[:, :, :, 12:] = True
    t5fx.linearize(net, t5fx.everything, example_inputs=(x, mask), layout=t5fx.TokenLayout(0, (3, 4), 4))
    other = x.clone()
    other[:, 12:] = torch.randn(2, 4, HEADS * DIM)
    torch.testing.assert_close(net(x, mask)[:, :12], net(other, mask)[:, :12])
    assert not torch.allclose(net(x, mask)[:, :12], net(x, ~mask)[:, :12])


def talking(self, q, k, v):
    scores = heads(q) @ heads(k).mT * DIM**-0.5
    scores = self.mix(scores.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
    return plain(scores.softmax(-1) @ heads(v))


def talking_after(self, q, k, v):
    scores = (heads(q) @ heads(k).mT * DIM**-0.5).softmax(-1)
    return plain(self.mix(scores.permute(0, 2, 3, 1)).permute(0, 3, 1, 2) @ heads(v))


def learned_temperature(self, q, k, v):
    return plain((heads(q) @ heads(k).mT * self.temperature).softmax(-1) @ heads(v))


def over_queries(self, q, k, v):
    return plain((heads(q) @ heads(k).mT).softmax(-2) @ heads(v))


def squared(self, q, k, v):
    return plain((heads(q) @ heads(k).mT).square().softmax(-1) @ heads(v))


def wrong_einsum(self, q, k, v):
    scores = torch.einsum("bhid,bhjd->bhij", heads(q), heads(k)).softmax(-1)
    return plain(torch.einsum("bhji,bhjd->bhid", scores, heads(v)))


def map_returned(self, q, k, v):
    scores = (heads(q) @ heads(k).mT * DIM**-0.5).softmax(-1)
    return plain(scores @ heads(v)), scores


@pytest.mark.parametrize(
    ("form", "code", "says"),
    [
        (talking, "form", "stands between"),
        (talking_after, "form", "used by"),
        (learned_temperature, "form", "temperature"),
        (over_queries, "form", "axis"),
        (squared, "form", "square"),
        (wrong_einsum, "form", "einsum"),
        (map_returned, "map", "attention map"),
    ],
)
def test_other_forms_are_refused(form, code, says):
    net = Attention(form)
    site = t5fx.inspect(net, torch.randn(2, 16, HEADS * DIM))[0]
    assert site.refusal.code == code
    assert says in site.refusal.reason
    with pytest.raises(t5fx.SelectionError):
        t5fx.linearize(net, t5fx.everything, example_inputs=torch.randn(2, 16, HEADS * DIM))


class IgnoresTheMap(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = Attention(map_returned)

    def forward(self, x):
        return self.attention(x)[0]


def test_a_map_that_nobody_reads_is_no_obstacle():
    net = IgnoresTheMap()
    x = torch.randn(2, 16, HEADS * DIM)
    t5fx.linearize(net, t5fx.everything, example_inputs=x)
    assert net(x).shape == x.shape
    assert net.attention(x)[1] is None


# -- nn.MultiheadAttention ------------------------------------------------------------------------------------


class UsesMultihead(nn.Module):
    def __init__(self, need_weights=False, **kwargs):
        super().__init__()
        self.attention = nn.MultiheadAttention(HEADS * DIM, HEADS, batch_first=True, **kwargs)
        self.need_weights = need_weights

    def forward(self, x, **kwargs):
        return self.attention(x, x, x, need_weights=self.need_weights, **kwargs)[0]


@pytest.mark.parametrize("training", [False, True])
def test_multihead(training):
    reference, net = Attention(sdpa), UsesMultihead().train(training)
    with torch.no_grad():
        weight, bias = net.attention.in_proj_weight, net.attention.in_proj_bias
        for i, part in enumerate((reference.q, reference.k, reference.v)):
            part.weight.copy_(weight.chunk(3)[i])
            part.bias.copy_(bias.chunk(3)[i])
    x = torch.randn(2, 16, HEADS * DIM)
    torch.testing.assert_close(net.attention.out_proj(reference(x)), net(x), rtol=1e-4, atol=1e-5)
    for model in (reference, net):
        t5fx.linearize(model, t5fx.everything, example_inputs=x)
    reference.ttt.load_state_dict(net.attention.ttt.state_dict())
    torch.testing.assert_close(net.attention.out_proj(reference(x)), net(x), rtol=1e-4, atol=1e-5)
    assert isinstance(net.attention, nn.MultiheadAttention)
    assert torch.compile(net, backend="aot_eager", fullgraph=True)(x).shape == x.shape


@pytest.mark.parametrize(
    ("kwargs", "call", "code"),
    [
        ({"need_weights": True}, {}, "map"),
        ({"bias": True, "add_bias_kv": True}, {}, "capture"),
        ({}, {"attn_mask": torch.zeros(16, 16)}, "float-mask"),
        ({}, {"attn_mask": torch.zeros(16, 16, dtype=torch.bool)}, "query-mask"),
        ({}, {"key_padding_mask": torch.zeros(2, 16, dtype=torch.bool)}, None),
    ],
)
def test_multihead_refusals(kwargs, call, code):
    net = UsesMultihead(**kwargs)
    site = t5fx.inspect(net, ((torch.randn(2, 16, HEADS * DIM),), call))[0]
    assert (site.refusal.code if site.refusal else None) == code


def test_encoder_layer_takes_no_short_cut():
    """In eval torch.nn.TransformerEncoderLayer skips its attention's forward, unless something is hooked to it."""
    net = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 2, enable_nested_tensor=False)
    net.eval()
    x = torch.randn(2, 16, 16)
    with torch.no_grad():
        before = net(x)
        t5fx.linearize(net, t5fx.everything, example_inputs=x)
        after = net(x)
        assert not torch.allclose(before, after)
        with torch.enable_grad():
            torch.testing.assert_close(net(x), after)
        t5fx.revert(net)
        torch.testing.assert_close(net(x), before, rtol=0, atol=0)


# -- bias that the user drops ---------------------------------------------------------------------------------


def test_drop_bias():
    class Biased(Attention):
        def __init__(self):
            super().__init__(float_mask)
            self.bias = nn.Parameter(torch.randn(HEADS, 16, 16))

        def forward(self, x):
            return self.form(self, self.q(x), self.k(x), self.v(x), self.bias)

    net = Biased()
    x = torch.randn(2, 16, HEADS * DIM)
    assert "drop_bias=True" in t5fx.inspect(net, x)[0].refusal.reason
    config = t5fx.T5.replace(drop_bias=True)
    t5fx.linearize(net, t5fx.everything, config=config, example_inputs=x)
    assert "dropped" in str(t5fx.report(net))
    source = next(iter(net._t5fx_owner.entries.values()))[0].source
    assert "softmax" not in source
    assert "bias" not in source.replace("dwc_q.bias", "").replace("dwc_k.bias", "").replace("_bias", "")
    with pytest.raises(t5fx.SelectionError):  # a boolean mask is never dropped
        t5fx.linearize(
            Attention(hidden), t5fx.everything, config=config,
            example_inputs=(x, torch.zeros(16, 16, dtype=torch.bool)),
        )  # fmt: skip
