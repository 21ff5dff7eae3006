"""What other libraries put into an owner, before linearize or after it: LoRA, quantised and parametrised Linears."""

import copy

import pytest
import torch
from peft import LoraConfig, get_peft_model
from peft.tuners.lora import LoraLayer
from torch import nn
from torch.nn.utils import parametrizations, parametrize
from torchao.quantization import Int8WeightOnlyConfig, quantize_
from toys import first_tensor, louder, run
from zoo import build

import t5fx
from t5fx.weights import TTTWeights

TARGETS = {
    "timm/vit_tiny": ["qkv"],
    "transformers/ViT": ["q_proj", "v_proj"],
    "diffusers/DiT": ["to_q", "to_v"],
    "diffusers/SD3": ["to_q", "to_v"],
}


def lora(name, **options):
    """Adapters that do something from the start."""
    return LoraConfig(r=4, lora_alpha=32, target_modules=TARGETS[name], init_lora_weights=False, **options)


def convert(model, args, kwargs):
    return louder(t5fx.linearize(model, t5fx.everything, example_inputs=(args, kwargs)))


def close(a, b):
    torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


# -- LoRA -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("name", TARGETS)
def test_lora(name, when, tmp_path):
    plain, args, kwargs = build(name)
    without = run(convert(plain, args, kwargs), args, kwargs)

    model, *_ = build(name)
    if when == "after":
        convert(model, args, kwargs)
    adapted = get_peft_model(model, lora(name))
    if when == "before":
        convert(model, args, kwargs)
    out = run(adapted, args, kwargs)
    with adapted.disable_adapter():
        close(run(adapted, args, kwargs), without)
    assert (out - without).abs().max() > 1e-3

    first_tensor(adapted(*args, **kwargs)).square().sum().backward()
    layers = [m for m in adapted.modules() if isinstance(m, LoraLayer)]
    assert len(layers) == 2 * len(TARGETS[name])
    for layer in layers:
        for part in (layer.lora_A, layer.lora_B):
            assert part["default"].weight.grad.any()
        assert layer.base_layer.weight.grad is None

    merged = adapted.merge_and_unload()
    assert merged is model
    assert not any(isinstance(m, LoraLayer) for m in merged.modules())
    close(run(merged, args, kwargs), out)
    t5fx.save(merged, tmp_path)
    loaded, *_ = build(name, seed=3)
    t5fx.load(loaded, tmp_path)
    torch.testing.assert_close(run(loaded, args, kwargs), run(merged, args, kwargs), rtol=0, atol=0)


@pytest.mark.parametrize("when", ["before", "after"])
def test_merged_softmax_model_is_the_same(when):
    """The adapters of a converted model are those of the softmax model: reverted, it is the softmax model adapted."""
    name = "timm/vit_tiny"
    model, args, kwargs = build(name)
    if when == "after":
        convert(model, args, kwargs)
    torch.manual_seed(7)
    adapted = get_peft_model(model, lora(name))
    if when == "before":
        convert(model, args, kwargs)
    t5fx.revert(model)
    reference, *_ = build(name)
    torch.manual_seed(7)
    reference = get_peft_model(reference, lora(name))
    torch.testing.assert_close(run(adapted, args, kwargs), run(reference, args, kwargs), rtol=0, atol=0)


def test_lora_beside_trained_sites():
    """modules_to_save=["ttt"]: peft trains a copy of the new weights, which must still know the grid of the call."""
    model, args, kwargs = build("timm/vit_dynamic_size")
    for name, parameter in model.named_parameters():
        if name.endswith("gamma"):  # layer scales start at 1e-5
            nn.init.ones_(parameter)
    convert(model, args, kwargs)
    high, wide = torch.randn(1, 3, 112, 28), torch.randn(1, 3, 28, 112)  # as many tokens as the example

    def tokens(x):
        with torch.no_grad():
            return model.forward_features(x)

    wanted = [tokens(x) for x in (high, wide)]
    with t5fx.grid(model, (4, 4)):
        assert (tokens(high) - wanted[0]).abs().max() > 1e-2
    adapted = get_peft_model(model, LoraConfig(r=4, target_modules=["qkv"], modules_to_save=["ttt"]))
    for x, out in zip((high, wide), wanted, strict=True):
        close(tokens(x), out)
    optimizer = torch.optim.SGD([p for p in adapted.parameters() if p.requires_grad], lr=1.0)
    model.forward_features(high).square().mean().backward()
    optimizer.step()
    trained = tokens(high)
    assert (trained - wanted[0]).abs().max() > 1e-2
    merged = adapted.merge_and_unload()
    assert all(type(m) is TTTWeights for n, m in merged.named_modules() if n.endswith(".ttt"))
    close(tokens(high), trained)


def test_diffusers_adapters():
    model, args, kwargs = build("diffusers/SD3")
    without = run(convert(model, args, kwargs), args, kwargs)
    model.add_adapter(lora("diffusers/SD3"))
    adapted = run(model, args, kwargs)
    assert (adapted - without).abs().max() > 1e-3
    model.fuse_lora()
    close(run(model, args, kwargs), adapted)
    model.unfuse_lora()
    model.disable_adapters()
    close(run(model, args, kwargs), without)
    model.delete_adapters("default")
    close(run(model, args, kwargs), without)


# -- quantised and parametrised Linears -----------------------------------------------------------------------


@pytest.mark.parametrize("name", ["timm/vit_tiny", "diffusers/DiT"])
def test_int8_weights(name, tmp_path):
    model, args, kwargs = build(name)
    full = run(convert(model, args, kwargs), args, kwargs)
    new = {k: v.clone() for k, v in model.state_dict().items() if ".ttt." in k}
    t5fx.save(model, tmp_path)
    quantize_(model, Int8WeightOnlyConfig())
    out = run(model, args, kwargs)
    assert 0 < (out - full).norm() < 0.05 * full.norm()

    first, *_ = build(name)
    quantize_(first, Int8WeightOnlyConfig())
    owners = {site.owner for site in t5fx.linearize(first, t5fx.everything, example_inputs=(args, kwargs))._t5fx.report}
    inside = [m for o in owners for m in first.get_submodule(o).modules() if isinstance(m, nn.Linear)]
    assert {type(m.weight).__name__ for m in inside} == {"Int8Tensor"}
    assert {p.dtype for n, p in first.named_parameters() if ".ttt." in n} == {torch.float32}
    first.load_state_dict(new, strict=False)
    torch.testing.assert_close(run(first, args, kwargs), out, rtol=0, atol=0)
    torch.testing.assert_close(run(copy.deepcopy(first), args, kwargs), out, rtol=0, atol=0)

    with pytest.raises(t5fx.T5fxError, match="before it is quantised"):
        t5fx.save(first, tmp_path / "int8")
    loaded, *_ = build(name, seed=3)
    quantize_(t5fx.load(loaded, tmp_path), Int8WeightOnlyConfig())
    torch.testing.assert_close(run(loaded, args, kwargs), out, rtol=0, atol=0)


class Half(nn.Module):
    def forward(self, weight):
        return weight / 2


@pytest.mark.parametrize("when", ["before", "after"])
def test_parametrized_projection(when):
    model, args, kwargs = build("timm/vit_tiny")
    halved, *_ = build("timm/vit_tiny")
    with torch.no_grad():
        halved.blocks[0].attn.qkv.weight.div_(2)
    wanted = run(convert(halved, args, kwargs), args, kwargs)
    if when == "after":
        convert(model, args, kwargs)
    parametrize.register_parametrization(model.blocks[0].attn.qkv, "weight", Half())
    if when == "before":
        convert(model, args, kwargs)
    close(run(model, args, kwargs), wanted)
    model(*args).square().sum().backward()
    assert model.blocks[0].attn.qkv.parametrizations.weight.original.grad.any()
    parametrize.remove_parametrizations(model.blocks[0].attn.qkv, "weight")  # leaves the halved weight
    close(run(model, args, kwargs), wanted)


def test_parametrized_new_weights():
    model, args, kwargs = build("timm/vit_tiny")
    out = run(convert(model, args, kwargs), args, kwargs)
    parametrizations.weight_norm(model.blocks[0].attn.proj)
    close(run(model, args, kwargs), out)
    parametrize.register_parametrization(model.blocks[0].attn.ttt, "w1", Half())
    halved = run(model, args, kwargs)
    assert (halved - out).abs().max() > 1e-3
    parametrize.remove_parametrizations(model.blocks[0].attn.ttt, "w1", leave_parametrized=False)
    close(run(model, args, kwargs), out)
