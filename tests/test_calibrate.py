"""calibrate: each site learns the softmax output on the softmax model's inputs, and nothing else changes."""

import contextlib

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn
from toys import Attention, ViT, assert_same_state, by_hand, images, key_padding, state, vit
from zoo import build

import t5fx
from t5fx.calibrate import calibrate
from t5fx.errors import InputError


def converted(select=t5fx.everything, *, inputs=None, config=t5fx.T5, **options):
    model = vit(**options)
    return t5fx.linearize(model, select, config=config, example_inputs=images() if inputs is None else inputs)


def inherited(model):
    return {n: p.detach().clone() for n, p in model.state_dict().items() if ".ttt" not in f".{n}"}


def new(model):
    return {n: p.detach().clone() for n, p in model.named_parameters() if ".ttt" in f".{n}"}


def improved(result, factor=0.7):
    assert all(last < factor * result.first[site] for site, last in result.last.items()), str(result)


@pytest.mark.parametrize(
    "name", ["timm/vit_tiny", "diffusers/SD3_dual", "transformers/Bert", "torch/MultiheadAttention"]
)
def test_every_site_learns_and_the_inherited_weights_are_bit_equal(name):
    model, args, kwargs = build(name)
    t5fx.linearize(model, t5fx.everything, example_inputs=(args, kwargs))
    before, started = inherited(model), new(model)
    result = calibrate(model, [(args, kwargs)], steps=40)
    assert result.sites == tuple(s.name for s in t5fx.report(model).selected)
    assert len(result.errors) == 40
    improved(result)
    after = inherited(model)
    assert all(torch.equal(after[n], before[n]) for n in before)
    assert all(not torch.equal(p, started[n]) for n, p in new(model).items())


def test_a_padded_batch_learns_from_its_real_tokens_alone():
    mask = key_padding(11, 7, tokens=11)
    model = converted(inputs=(images(), mask))
    changed = images(batch=1).expand(2, -1, -1, -1).clone()
    other = changed.clone()
    other[1, :, :, 12:] = 50.0  # patches of 4: tokens from the fourth of the second row on are padding
    padding = key_padding(11, 4, tokens=11)
    errors = []
    for image in (changed, other):
        start = new(model)
        errors.append(calibrate(model, [(image[:, :, :4], padding[..., :6])], steps=1).errors[0])
        for n, p in start.items():
            model.get_parameter(n).data.copy_(p)
    assert errors[0] == pytest.approx(errors[1], rel=1e-9)
    improved(calibrate(model, [(images(), mask)], steps=40))


def test_the_error_is_that_of_the_owners_output_on_the_inputs_of_the_softmax_model():
    """The second block's error is the same whether or not the first one is converted, and is what the formula says."""
    model = converted()
    x = images()
    softmax = vit()
    softmax.load_state_dict(inherited(model))
    tokens = softmax.embed(x).flatten(2).transpose(1, 2)
    tokens = torch.cat([softmax.cls.expand(len(tokens), -1, -1), tokens], dim=1)
    wanted = []
    for plain, block in zip(softmax.blocks, model.blocks, strict=True):
        inside = plain.norm(tokens)
        exact = plain.attn(inside)
        got = by_hand(block.attn, inside, prefix=1, grid=(2, 5))
        # The class token and the patches count alike.
        parts = slice(0, 1), slice(1, None)
        errors = [(got[:, at] - exact[:, at]).square().mean() / exact[:, at].var(correction=0) for at in parts]
        wanted.append(float(sum(errors).detach() / 2))
        tokens = plain(tokens)
    result = calibrate(model, [x], steps=1)
    assert result.errors[0] == pytest.approx(wanted, rel=1e-9)


def test_what_flows_on_is_the_softmax_output():
    model = converted()
    x = images()
    expected = t5fx.revert(copied(model))(x)
    outputs = []
    model.register_forward_hook(lambda module, inputs, output: outputs.append(output))
    calibrate(model, [x], steps=2)
    assert all(torch.equal(output, expected) for output in outputs)
    assert len(outputs) == 2
    assert not torch.equal(model(x), expected)


def copied(model):
    import copy

    return copy.deepcopy(model)


# ---- nothing is left behind ---------------------------------------------------------------------------------


class Stop(Exception):
    pass


def stopping(kind, after):
    for _ in range(after):
        yield images()
    raise kind("stop")


@pytest.mark.parametrize("ending", ["done", "error in the data", "ctrl-c", "error in the model", "ended early"])
def test_the_model_is_left_as_it_was(ending):
    model = converted(depth=3)
    model.train()
    model.blocks[1].eval()
    model.blocks[0].attn.qkv.weight.requires_grad_(False)
    model.blocks[0].attn.ttt.w1.requires_grad_(False)
    model.head.bias.grad = torch.ones_like(model.head.bias)
    model.blocks[0].attn.ttt.w2.grad = torch.ones_like(model.blocks[0].attn.ttt.w2)
    flags = {n: (p.requires_grad, p.grad if p.grad is None else p.grad.clone()) for n, p in model.named_parameters()}
    modes = [m.training for m in model.modules()]
    before, entries = state(model), new(model)
    calls = {"done": [images()], "error in the data": stopping(Stop, 2), "ctrl-c": stopping(KeyboardInterrupt, 2),
             "error in the model": [images(), torch.zeros(2, 3, 8, 8, 8)], "ended early": iter([images()])}  # fmt: skip
    raises = {"done": None, "error in the data": Stop, "ctrl-c": KeyboardInterrupt, "error in the model": RuntimeError,
              "ended early": InputError}[ending]  # fmt: skip
    with pytest.raises(raises) if raises else contextlib.nullcontext():
        calibrate(model, calls[ending], steps=3)
    after = state(model)
    moved = {n for n, p in new(model).items() if not torch.equal(p, entries[n])}
    assert moved == set(entries)  # the steps that were made count
    for name in entries:
        for table in (before, after):
            table["tensors"].pop(name)
    assert_same_state(before, after, but=("rng",))
    assert [m.training for m in model.modules()] == modes
    for n, p in model.named_parameters():
        assert p.requires_grad == flags[n][0]
        assert p.grad is flags[n][1] or torch.equal(p.grad, flags[n][1])
    assert model(images()).requires_grad


def test_hooks_and_dropout_of_the_user_see_an_ordinary_eval_pass():
    model = converted()
    model.train()
    seen = []
    model.blocks[0].attn.register_forward_hook(lambda m, i, o: seen.append(m.training))
    calibrate(model, [images()], steps=3)
    assert seen == [False] * 3


def test_it_draws_no_random_numbers_and_repeats_bit_for_bit():
    results = []
    for _ in range(2):
        torch.manual_seed(0)
        model = converted()
        x = images()
        before = torch.get_rng_state()
        results.append((calibrate(model, [x], steps=5), new(model)))
        assert torch.equal(torch.get_rng_state(), before)
    (one, weights), (two, again) = results
    assert one == two
    assert all(torch.equal(weights[n], again[n]) for n in weights)


# ---- owners with several calls, graphs, wrappers --------------------------------------------------------------


class Twice(nn.Module):
    """Two attention calls in a row in one forward, and a causal one that is refused."""

    def __init__(self):
        super().__init__()
        self.one, self.two, self.three = (Attention() for _ in range(3))

    def forward(self, x):
        for part, causal in ((self.one, False), (self.three, True), (self.two, False)):
            x = x + part.out(F.scaled_dot_product_attention(*part.heads_of(x), is_causal=causal))
        return x, x.mean(1)


def test_two_sites_and_a_refused_one_in_an_owner_are_kept_apart():
    class Owner(nn.Module):
        def __init__(self):
            super().__init__()
            self.twice = Twice()

        def forward(self, x):
            return self.twice(x)[0]

    model = Owner().double()
    x = torch.randn(2, 9, 16, dtype=torch.float64)
    layout = t5fx.TokenLayout(0, (3, 3))
    t5fx.linearize(model, t5fx.everything, example_inputs=x, layout=layout)
    names = [site.name for site in t5fx.report(model).selected]
    assert names == ["twice", "twice:2"]
    before, errors = state(model), {}
    for name in names:  # each as if it alone were converted
        alone = copied(model)
        t5fx.revert(alone)
        t5fx.linearize(alone, t5fx.names(name), example_inputs=x, layout=layout)
        ttt = alone.twice.ttt
        ttt.load_state_dict(getattr(model.twice, "ttt" if name == "twice" else "ttt_1").state_dict())
        errors[name] = calibrate(alone, [x], steps=1).errors[0][0]
    result = calibrate(model, [x], steps=40)
    assert dict(zip(result.sites, result.errors[0], strict=True)) == pytest.approx(errors, rel=1e-6)
    improved(result, 0.9)
    after = state(model)
    for name in new(model):
        for table in (before, after):
            table["tensors"].pop(name)
    assert_same_state(before, after, but=("rng",))


class Traceable(ViT):
    def forward(self, image):
        x = self.embed(image).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls.expand(x.size(0), -1, -1), x], dim=1)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x.mean(1)))


def test_a_traced_graph_module():
    graph = fx.symbolic_trace(Traceable().double().eval())
    x = images()
    expected = graph(x)
    t5fx.linearize(graph, t5fx.everything, example_inputs=x)
    assert len(t5fx.report(graph).selected) == 2
    outputs = []
    handle = graph.register_forward_hook(lambda m, i, o: outputs.append(o))
    result = calibrate(graph, [x], steps=60)
    handle.remove()
    torch.testing.assert_close(outputs[0], expected, rtol=0, atol=1e-12)
    improved(result)
    assert not torch.allclose(graph(x), expected)


def test_a_compiled_model_is_calibrated_and_runs_compiled_afterwards():
    model = converted()
    compiled = torch.compile(model, backend="aot_eager")
    x = images()
    compiled(x)
    improved(calibrate(compiled, [x], steps=30))
    torch.testing.assert_close(compiled(x), model(x))


# ---- precision, and memory for time ---------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_under_autocast(dtype):
    model = converted().float()
    x = images().float()
    with torch.autocast("cpu", dtype=dtype):
        result = calibrate(model, [x], steps=40)
    improved(result)
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert all(p.isfinite().all() for p in model.parameters())


def test_float16_gradients_that_underflow_are_scaled(monkeypatch):
    """The gradient of a mean over many elements is below the least float16: without a scaler nothing would move."""
    model = converted().float()
    x = images(64, 64, batch=2).float()
    with torch.autocast("cpu", dtype=torch.float16):
        scaled = calibrate(model, [x], steps=1)
        before = new(model)
        result = calibrate(model, [x], steps=30)
    assert scaled.errors[0] == pytest.approx(result.errors[0], rel=0.2)
    improved(result, 0.8)
    assert all(not torch.equal(before[n], p) for n, p in new(model).items())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_model_in_half_precision_learns_in_float32(dtype):
    """A step of 1e-3 is lost on a bfloat16 rate of 1; many of them on a float32 copy are not."""
    model = converted(config=t5fx.T5.replace(learn_inner_lr=True)).to(dtype)
    start = new(model)
    result = calibrate(model, [images().to(dtype)], steps=60, lr=1e-3)
    assert result.last["blocks.0.attn"] < result.first["blocks.0.attn"]
    assert {p.dtype for p in model.parameters()} == {dtype}
    moved = (model.blocks[0].attn.ttt.inner_lr - start["blocks.0.attn.ttt.inner_lr"]).abs()
    assert moved.max() > 0


@pytest.mark.parametrize("name", ["timm/vit_tiny", "diffusers/SD3"])
def test_with_gradient_checkpointing_the_numbers_are_the_same(name):
    errors = []
    for checkpointing in (False, True):
        model, args, kwargs = build(name)
        torch.manual_seed(0)
        t5fx.linearize(model, t5fx.everything, example_inputs=(args, kwargs))
        if checkpointing:
            getattr(model, "enable_gradient_checkpointing", getattr(model, "set_grad_checkpointing", None))()
        errors.append(calibrate(model, [(args, kwargs)], steps=5).errors)
    assert errors[0] == errors[1]


def test_the_inner_rate_is_learned_where_the_config_says_so():
    config = t5fx.T5.replace(inner_lr=4.0, learn_inner_lr=True)
    model = converted(config=config)
    calibrate(model, [images()], steps=10)
    rates = [block.attn.ttt.inner_lr for block in model.blocks]
    assert all((r != 4).all() and (r - 4).abs().max() < 1 for r in rates)
