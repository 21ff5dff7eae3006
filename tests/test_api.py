"""linearize, revert, inspect: atomic, in place, on modules and on traced graphs; errors say what to do."""

import copy

import pytest
import torch
import torch.nn.functional as F
from test_layout import Block, Net
from torch import fx, nn
from zoo import build

import t5fx


def snapshot(model):
    return (
        [type(m) for m in model.modules()],
        {key: value.clone() for key, value in model.state_dict().items()},
        [dict(m._forward_hooks) | dict(m._forward_pre_hooks) for m in model.modules()],
        [set(m.__dict__) for m in model.modules()],
    )


def assert_same(before, after):
    assert before[0] == after[0]
    assert list(before[1]) == list(after[1])
    assert all(torch.equal(before[1][key], after[1][key]) for key in before[1])
    assert before[2:] == after[2:]


FAILURES = {
    "no example inputs": (lambda m: t5fx.linearize(m), t5fx.InputError, "pass example_inputs="),
    "inputs that do not run": (
        lambda m: t5fx.linearize(m, example_inputs=torch.randn(1, 5, 8, 8)),
        t5fx.InputError,
        r"float32\[1, 5, 8, 8\]",
    ),
    "nothing selected": (
        lambda m: t5fx.linearize(m, lambda site: False, example_inputs=torch.randn(1, 3, 8, 8)),
        t5fx.SelectionError,
        "blocks.0.*blocks.1",
    ),
    "a name that matches nothing": (
        lambda m: t5fx.linearize(m, t5fx.names("layers.*"), example_inputs=torch.randn(1, 3, 8, 8)),
        t5fx.SelectionError,
        "'layers.*' matches no site",
    ),
    "a config of another type": (
        lambda m: t5fx.linearize(m, config="T5", example_inputs=torch.randn(1, 3, 8, 8)),
        t5fx.ConfigError,
        "TTTConfig",
    ),
}


@pytest.mark.parametrize("case", FAILURES)
def test_failures_change_nothing(case):
    call, error, message = FAILURES[case]
    net = Net()
    before = snapshot(net)
    with pytest.raises(error, match=message):
        call(net)
    assert_same(before, snapshot(net))


def test_failure_while_installing_is_undone(monkeypatch):
    net = Net()
    before = snapshot(net)

    def fail(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("t5fx.api.add_recorders", fail)
    with pytest.raises(KeyboardInterrupt):
        t5fx.linearize(net, t5fx.everything, example_inputs=torch.randn(1, 3, 8, 8))
    assert_same(before, snapshot(net))


def test_inspect_changes_nothing():
    for name in ("timm/vit_tiny", "transformers/Dinov3ViT", "diffusers/SD3"):
        model, args, kwargs = build(name)
        model.train()
        before, rng = snapshot(model), torch.get_rng_state()
        t5fx.inspect(model, (args, kwargs))
        assert_same(before, snapshot(model))
        assert torch.equal(torch.get_rng_state(), rng)
        assert all(m.training for m in model.modules())
        out = model.eval()(*args, **kwargs)  # no fake tensor was left in a cache
        assert all(type(x) is torch.Tensor for x in torch.utils._pytree.tree_leaves(out) if isinstance(x, torch.Tensor))


def test_twice_and_not_at_all():
    net = Net()
    with pytest.raises(t5fx.T5fxError, match="not linearized"):
        t5fx.revert(net)
    with pytest.raises(t5fx.T5fxError, match="not linearized"):
        t5fx.report(net)
    t5fx.linearize(net, example_inputs=torch.randn(1, 3, 8, 8))
    assert [s.name for s in t5fx.report(net).selected] == ["blocks.1"]
    with pytest.raises(t5fx.T5fxError, match="linearized already"):
        t5fx.linearize(net, example_inputs=torch.randn(1, 3, 8, 8))
    with pytest.raises(t5fx.T5fxError, match=r"submodule 'net'"):
        t5fx.report(nn.ModuleDict({"net": net}))
    with pytest.raises(t5fx.T5fxError, match=r"pipeline\.transformer"):
        t5fx.linearize(object())


def test_training_then_revert_keeps_the_training():
    net = Net()
    image = torch.randn(2, 3, 8, 12)
    t5fx.linearize(net, t5fx.everything, example_inputs=image)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    net(image).square().mean().backward()
    optimizer.step()
    trained = net.blocks[0].qkv.weight.detach().clone()
    t5fx.revert(net)
    assert torch.equal(net.blocks[0].qkv.weight, trained)
    fresh = Net()
    fresh.load_state_dict(net.state_dict())
    torch.testing.assert_close(fresh(image), net(image), rtol=0, atol=0)


def test_device_and_dtype_come_from_the_owner():
    net = Net().to(torch.bfloat16)
    t5fx.linearize(net, t5fx.everything, example_inputs=torch.randn(1, 3, 8, 8, dtype=torch.bfloat16))
    assert {p.dtype for p in net.parameters()} == {torch.bfloat16}
    with torch.device("meta"):
        meta = Net()
    t5fx.linearize(meta, t5fx.everything, example_inputs=torch.randn(1, 3, 8, 8))
    assert {p.device.type for p in meta.parameters()} == {"meta"}


def test_hooks_and_swapped_linears_keep_working():
    """What a user hangs on the model, before or after, still runs: hooks, a Linear swapped for another (LoRA)."""
    net = Net()
    seen = []
    net.blocks[0].register_forward_hook(lambda *a: seen.append("before"))
    t5fx.linearize(net, t5fx.everything, example_inputs=torch.randn(1, 3, 8, 8))
    seen.clear()  # hooks run in the dry run too: a model may need them
    net.blocks[0].register_forward_hook(lambda *a: seen.append("after"))
    plain = net.blocks[0].qkv
    net.blocks[0].qkv = nn.Sequential(plain, nn.Dropout(0.0))
    net.blocks[0].qkv.register_forward_hook(lambda *a: seen.append("linear"))
    net(torch.randn(1, 3, 8, 8))
    assert seen == ["linear", "before", "after"]


def test_changed_settings_are_noticed():
    """An attribute that the forward reads is part of what was traced."""

    class Scaled(Block):
        gain = 1.0

        def __init__(self, dim):
            super().__init__(dim)
            self.twice = False

        def forward(self, x):
            return super().forward(x) * (2.0 if self.twice else 1.0)

    net = nn.Sequential(Scaled(16))
    x = torch.randn(1, 16, 16)
    t5fx.linearize(net, t5fx.everything, example_inputs=x)
    once = net(x)
    net[0].twice = True
    torch.testing.assert_close(net(x), 2 * once)


class Masked(nn.Module):
    """Takes a mask, or is causal, only when asked to."""

    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(16, 48)

    def forward(self, x, mask=None, causal=False):
        query, key, value = self.qkv(x).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, is_causal=causal)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ({"causal": True}, "causal"),
        ({"mask": torch.zeros(16, 16)}, "float mask"),
        ({"mask": torch.ones(16, 16, dtype=torch.bool)}, "differs between queries"),
    ],
)
def test_a_mask_that_turns_up_later_is_refused(call, message):
    net = Masked()
    x = torch.randn(2, 16, 16)
    t5fx.linearize(net, t5fx.everything, example_inputs=x)
    net(x)
    with pytest.raises(t5fx.T5fxError, match=message):
        net(x, **call)
    net(x)


@pytest.mark.parametrize("call", [{"causal": True}, {"mask": torch.zeros(16, 16)}])
def test_masks_are_refused_from_the_start(call):
    site = t5fx.inspect(Masked(), ((torch.randn(2, 16, 16),), call))[0]
    assert site.refusal.code in ("causal", "float-mask")


def test_key_padding_mask_is_exact():
    """Masked tokens change nothing: a padded batch equals the unpadded one."""
    net = Masked().double()
    x = torch.randn(2, 20, 16).double()
    mask = (torch.arange(20) < 16)[None, None, None].expand(2, 1, 1, 20)
    layout = t5fx.TokenLayout(0, (4, 4), 4)
    t5fx.linearize(net, t5fx.everything, example_inputs=((x,), {"mask": mask}), layout=layout)
    padded = net(x, mask=mask)[:, :, :16]
    plain = copy.deepcopy(net)
    plain.ttt.layout.suffix = 0
    torch.testing.assert_close(padded, plain(x[:, :16]), rtol=1e-10, atol=1e-10)
    assert not torch.allclose(padded, net(x)[:, :, :16])
    with pytest.raises(t5fx.MaskError, match="same for all queries"):
        net(x, mask=mask.expand(2, 1, 20, 20).contiguous())


def test_graph_module():
    net = Net()
    image = torch.randn(2, 3, 8, 12)
    graph = fx.symbolic_trace(net)
    before, out = str(graph.graph), graph(image)
    report = t5fx.inspect(graph, image)
    assert [site.name for site in report] == ["blocks.0", "blocks.1"]
    assert report[0].layout == t5fx.TokenLayout(1, (4, 6))
    assert t5fx.linearize(graph, example_inputs=image) is graph
    assert {key.rsplit(".ttt.")[0] for key in graph.state_dict() if ".ttt." in key} == {"blocks.1"}
    targets = [str(n.target) for n in graph.graph.nodes]
    assert targets.count("t5fx.inner_apply.default") == 1

    twin = t5fx.linearize(copy.deepcopy(net), example_inputs=image)
    twin.load_state_dict(graph.state_dict())
    for size in ((8, 12), (12, 8)):
        other = torch.randn(2, 3, *size)
        torch.testing.assert_close(graph(other), twin(other))
    graph(image).square().sum().backward()
    assert graph.blocks.get_submodule("1").ttt.w1.grad.any()
    torch.testing.assert_close(copy.deepcopy(graph)(image), graph(image), rtol=0, atol=0)

    t5fx.revert(graph)
    assert str(graph.graph) == before
    torch.testing.assert_close(graph(image), out, rtol=0, atol=0)
    assert not any(".ttt." in key for key in graph.state_dict())


def test_exported_module():
    image = torch.randn(2, 3, 8, 12)
    module = torch.export.export(Net(), (image,)).module()
    report = t5fx.inspect(module, image)
    assert len(report) == 2
    assert all(site.convertible for site in report)
    t5fx.linearize(module, t5fx.everything, example_inputs=image)
    assert module(image).shape == (2, 25, 16)
    assert not torch.allclose(module(image), t5fx.revert(module)(image))


class OwnInner:
    """An inner model of one's own: two linear layers."""

    def init(self, heads, head_dim, value_dim, hidden, *, std, device=None, dtype=None, generator=None):
        def make(*shape):
            return nn.init.normal_(torch.empty(*shape, device=device, dtype=dtype), std=std)

        return {"first": make(heads, head_dim, hidden), "second": make(heads, hidden, value_dim)}

    def apply(self, weights, x):
        return torch.tanh(x @ weights["first"]) @ weights["second"]


def test_own_inner_model():
    net = Net()
    image = torch.randn(2, 3, 8, 12)
    config = t5fx.TTTConfig(inner=OwnInner(), loss="mse")
    t5fx.linearize(net, t5fx.everything, config=config, example_inputs=image)
    assert {"blocks.0.ttt.first", "blocks.0.ttt.second"} < set(net.state_dict())
    out = net(image)
    out.square().sum().backward()
    assert net.blocks[0].ttt.first.grad.any()
    torch.testing.assert_close(
        torch.compile(net, backend="aot_eager", fullgraph=True)(image), out, rtol=1e-4, atol=1e-5
    )
    x = net.tokens(image)
    query, key, value = net.blocks[0].qkv(x).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
    by_hand = t5fx.ops.ttt_attention(
        query, key, value, dict(net.blocks[0].ttt.named_parameters()), config, prefix=1, grid=[4, 6]
    )
    torch.testing.assert_close(net.blocks[0](x), x + by_hand.transpose(1, 2).flatten(2))
