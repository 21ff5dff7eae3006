"""param_groups: every trainable parameter in exactly one group, with the learning rate that the papers use."""

import pytest
import torch
from toys import images, vit
from zoo import build

import t5fx
from t5fx.errors import T5fxError


def linearized(**options):
    model = vit(**options)
    return t5fx.linearize(model, t5fx.everything, example_inputs=images())


def by_name(model, groups):
    names = {id(p): n for n, p in model.named_parameters()}
    return {g["name"]: {names[id(p)] for p in g["params"]} for g in groups}


@pytest.mark.parametrize("name", ["toy", "timm/vit_tiny", "diffusers/SD3_dual", "transformers/Dinov3ViT"])
def test_the_groups_are_a_partition_of_the_trainable_parameters(name):
    if name == "toy":
        model = linearized()
    else:
        model, args, kwargs = build(name)
        t5fx.linearize(model, example_inputs=(args, kwargs))
    frozen = [n for n, _ in model.named_parameters()][::5]
    for n in frozen:
        model.get_parameter(n).requires_grad_(False)
    groups = by_name(model, t5fx.param_groups(model, 1e-4))
    assert set(groups) == {"inherited", "inherited_no_decay", "new", "new_no_decay"}
    trainable = {n for n, p in model.named_parameters() if p.requires_grad}
    assert sorted(n for names in groups.values() for n in names) == sorted(trainable)
    assert frozen
    for kind, names in groups.items():
        assert all((".ttt." in f".{n}") == kind.startswith("new") for n in names)
        own = set(model.no_weight_decay()) if hasattr(model, "no_weight_decay") else set()
        assert all((model.get_parameter(n).dim() <= 1 or n in own) == kind.endswith("no_decay") for n in names)


def test_learning_rates_and_decay():
    model = linearized()
    groups = {g["name"]: (g["lr"], g["weight_decay"]) for g in t5fx.param_groups(model, 2e-4, weight_decay=0.05)}
    rates = {"inherited": 2e-4, "new": 20 * 2e-4}
    assert groups == {
        f"{kind}{end}": (pytest.approx(rate), decay)
        for kind, rate in rates.items()
        for end, decay in (("", 0.05), ("_no_decay", 0.0))
    }
    scaled = t5fx.param_groups(model, 1.0, new_lr_scale=3, inherited_lr_scale=0.5)
    assert {g["name"].split("_")[0]: g["lr"] for g in scaled} == {"inherited": 0.5, "new": 3}
    assert {g["weight_decay"] for g in scaled} == {0.0}


def test_a_learned_inner_rate_is_new_and_not_decayed():
    config = t5fx.T5.replace(learn_inner_lr=True)
    model = t5fx.linearize(vit(), t5fx.everything, config=config, example_inputs=images())
    groups = by_name(model, t5fx.param_groups(model, 1.0, weight_decay=0.1))
    assert {"blocks.0.attn.ttt.inner_lr", "blocks.1.attn.ttt.inner_lr"} <= groups["new_no_decay"]


def test_a_scale_of_zero_leaves_a_kind_out():
    model = linearized()
    assert {g["name"] for g in t5fx.param_groups(model, 1.0, inherited_lr_scale=0)} == {"new", "new_no_decay"}
    assert {g["name"] for g in t5fx.param_groups(model, 1.0, new_lr_scale=0)} == {
        "inherited",
        "inherited_no_decay",
    }


def test_a_tied_parameter_is_in_one_group_once():
    model = vit()
    model.blocks[1].mlp.weight = model.blocks[0].mlp.weight
    t5fx.linearize(model, t5fx.everything, example_inputs=images())
    everyone = [id(p) for g in t5fx.param_groups(model, 1.0) for p in g["params"]]
    assert len(everyone) == len(set(everyone)) == len(list(model.parameters()))


def test_one_step_of_adamw_moves_each_parameter_by_its_rate():
    """The first step of Adam is lr in every coordinate, whatever the gradient: the rates can be read off."""
    model = linearized()
    frozen = model.embed.weight.requires_grad_(False)
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    optimizer = torch.optim.AdamW(t5fx.param_groups(model, 1e-5), eps=1e-30)
    model(images()).square().sum().backward()
    optimizer.step()
    assert torch.equal(frozen, before["embed.weight"])
    for name, parameter in model.named_parameters():
        if parameter is frozen:
            continue
        moved = (parameter - before[name]).abs().max().item()
        assert moved == pytest.approx(20e-5 if ".ttt." in name else 1e-5, rel=1e-3), name


def test_decay_shrinks_weights_and_leaves_biases_alone():
    model = linearized()
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    optimizer = torch.optim.AdamW(t5fx.param_groups(model, 0.1, new_lr_scale=2, weight_decay=0.1))
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    for name, parameter in model.named_parameters():
        factor = 1.0 if parameter.dim() == 1 else 1 - 0.1 * 0.1 * (2 if ".ttt." in name else 1)
        torch.testing.assert_close(parameter.detach(), before[name] * factor, msg=name)


@pytest.mark.parametrize(
    "options",
    [
        {"lr": -1.0},
        {"lr": float("nan")},
        {"new_lr_scale": -1},
        {"inherited_lr_scale": -0.5},
        {"weight_decay": -0.1},
    ],
)
def test_a_negative_number_is_refused_by_name(options):
    (name,) = options
    with pytest.raises(T5fxError, match=rf"param_groups: {name} must"):
        t5fx.param_groups(linearized(depth=1), **{"lr": 1.0, **options})


def test_a_model_that_is_not_linearized_is_refused():
    with pytest.raises(T5fxError, match="not linearized"):
        t5fx.param_groups(vit(), 1.0)
    model = t5fx.revert(linearized())
    with pytest.raises(T5fxError, match="not linearized"):
        t5fx.param_groups(model, 1.0)
