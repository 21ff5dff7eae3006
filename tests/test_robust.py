"""What a capture must not lose or leave behind: buffers, gradients that are off, attributes, several calls, copies."""

import copy
import pickle
import random

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn
from toys import Attention, images, vit
from zoo import build

import t5fx
from t5fx.cost import site_cost

X = torch.randn(1, 16, 16, dtype=torch.float64)


def test_buffers_are_not_written():
    class Counts(nn.Module):
        def __init__(self):
            super().__init__()
            self.vit = vit()
            self.register_buffer("calls", torch.zeros(3))

        def forward(self, x):
            self.calls += 1
            return self.vit(x)

    class Normed(Attention):
        def __init__(self):
            super().__init__()
            self.norm = nn.BatchNorm1d(16)

        def forward(self, x, mask=None):
            return super().forward(self.norm(x.mT).mT)

    model = Counts()
    model.vit.blocks[1].attn = Normed().double()
    model.train()
    t5fx.inspect(model, images())
    t5fx.linearize(model, t5fx.everything, example_inputs=images())
    assert not model.calls.any()
    assert model.vit.blocks[1].attn.norm.num_batches_tracked == 0
    model(images())
    assert model.calls.eq(1).all()
    assert model.vit.blocks[1].attn.norm.num_batches_tracked == 1


def without_gradients(self, x):
    query, key, value = self.heads_of(x)
    with torch.no_grad():
        mean = value.mean(2, keepdim=True)
    return self.out(F.scaled_dot_product_attention(query, key, value) + mean)


def without_autocast(self, x):
    with torch.autocast("cpu", enabled=False):
        shift = F.linear(x, self.proj.weight)
    return self.out(F.scaled_dot_product_attention(*self.heads_of(x + shift)))


@pytest.mark.parametrize("forward", [without_gradients, without_autocast])
def test_what_a_graph_does_not_hold_is_refused(forward):
    model = type("Own", (Attention,), {"forward": forward})().double()
    site = t5fx.inspect(model, X)[0]
    assert site.refusal.code == "capture"
    assert "no_grad" in site.refusal.reason
    assert torch.is_grad_enabled()
    assert not torch.is_autocast_enabled("cpu")


@pytest.mark.parametrize("make", [lambda v: (v,), lambda v: [v], lambda v: {0: v}])
def test_containers_are_watched(make):
    class Gained(Attention):
        def forward(self, x):
            return super().forward(x) * self.gain[0]

    model = Gained().double()
    model.gain = make(1.0)
    t5fx.linearize(model, t5fx.everything, example_inputs=X)
    once = model(X)
    model.gain = make(2.0)
    torch.testing.assert_close(model(X), 2 * once)


def test_causal_switched_on_in_an_option_is_refused():
    model = vit()
    t5fx.linearize(model, t5fx.everything, example_inputs=images())
    model.blocks[1].attn.options["is_causal"] = True
    with pytest.raises(t5fx.CaptureError, match="causal"):
        model(images())


def test_a_scale_made_of_sizes_follows_them():
    class ByLength(Attention):
        def forward(self, x):
            query, key, value = self.heads_of(x)
            return self.out(F.scaled_dot_product_attention(query, key, value, scale=key.shape[2] ** -0.5))

    model = ByLength().double()
    t5fx.linearize(model, t5fx.everything, example_inputs=X)
    with torch.no_grad():
        for parameter in model.ttt.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.4)
    x = torch.randn(1, 36, 16, dtype=torch.float64)
    weights = dict(model.ttt.named_parameters())
    out = t5fx.ops.ttt_attention(*model.heads_of(x), weights, t5fx.T5, grid=(6, 6), scale=36**-0.5)
    torch.testing.assert_close(model(x), model.out(out))


class Crossable(nn.Module):
    def __init__(self):
        super().__init__()
        self.query, self.rest = nn.Linear(16, 16), nn.Linear(16, 32)

    def forward(self, x, context):
        query = self.query(x).unflatten(-1, (2, 8)).transpose(1, 2)
        key, value = self.rest(context).unflatten(-1, (2, 2, 8)).permute(2, 0, 3, 1, 4)
        return F.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2)


class Shared(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = Crossable()

    def forward(self, x, context):
        x = self.attention(x, x)
        return self.attention(x, x if context is None else context)


def test_one_module_called_in_two_ways_is_refused():
    x = torch.randn(1, 16, 16)
    assert t5fx.inspect(Shared(), (x, torch.randn(1, 9, 16)))["attention"].refusal.code == "calls"
    model = Shared()
    t5fx.linearize(model, t5fx.everything, example_inputs=(x, None))  # twice in the same way: one set of weights
    assert len(t5fx.report(model).selected) == 1
    model(x, None).sum().backward()
    assert model.attention.ttt.w1.grad.any()


def test_copies_of_a_graph_module_keep_the_record():
    class Plain(nn.Module):
        def forward(self, x):
            return F.scaled_dot_product_attention(x, x, x)

    x = torch.randn(1, 2, 16, 8)
    graph = fx.symbolic_trace(Plain())
    before = graph(x)
    t5fx.linearize(graph, t5fx.everything, example_inputs=x)
    twin = copy.deepcopy(graph)
    assert len(t5fx.report(twin).selected) == 1
    torch.testing.assert_close(t5fx.revert(twin)(x), before, rtol=0, atol=0)
    assert not torch.allclose(graph(x), before)
    torch.testing.assert_close(t5fx.revert(graph)(x), before, rtol=0, atol=0)


def test_numbers_do_not_make_graphs():
    class Factor(Attention):
        def forward(self, x, factor=1.0):
            return super().forward(x) * factor

    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = Factor().double()

        def forward(self, x, factor=1.0):
            return self.attention(x, factor)

    model = Outer()
    t5fx.linearize(model, t5fx.everything, example_inputs=X)
    once = model(X, 1.0)
    for _ in range(20):
        factor = random.random()
        torch.testing.assert_close(model(X, factor), factor * once)
    assert sum(map(len, model.attention._t5fx_owner.entries.values())) <= 4


def test_video_flops_count_three_axes():
    model, args, kwargs = build("diffusers/Wan")
    site = t5fx.inspect(model, (args, kwargs))[0]
    sizes = {key: getattr(site, key) for key in ("batch", "heads", "queries", "keys", "head_dim", "value_dim")}
    wanted = site_cost(**sizes, config=t5fx.T5, grid_tokens=site.layout.grid_tokens, grid_axes=3)
    assert site.ttt_flops == wanted.ttt_flops


def test_attention_dropout_is_noted():
    timm = pytest.importorskip("timm")
    model = timm.create_model("vit_tiny_patch16_224", depth=2, img_size=64, attn_drop_rate=0.1)
    assert all("dropout of 0.1" in " ".join(site.notes) for site in t5fx.inspect(model))


class OwnState(Attention):
    def __getstate__(self):
        return {**self.__dict__, "marker": 1}


def test_a_class_with_its_own_state_is_pickled():
    model = OwnState().double()
    t5fx.linearize(model, t5fx.everything, example_inputs=X)
    twin = pickle.loads(pickle.dumps(model))
    assert twin.marker == 1
    torch.testing.assert_close(twin(X), model(X), rtol=0, atol=0)
