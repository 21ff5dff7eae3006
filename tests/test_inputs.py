"""Example inputs: every form that a user may give, and what is inferred where none are given."""

from collections import OrderedDict, UserDict

import pytest
import torch
from torch import nn
from toys import ViT, images, vit
from zoo import EXPECTED, build

import t5fx
from t5fx.capture.inputs import infer, normalize
from t5fx.errors import InputError

X, Y = torch.zeros(1), torch.ones(2)
MASK = torch.ones(2, 1, 1, 11, dtype=torch.bool)


@pytest.mark.parametrize(
    ("given", "args", "kwargs"),
    [
        (X, (X,), {}),
        ((X,), (X,), {}),
        ((X, Y), (X, Y), {}),
        ([X, Y], (X, Y), {}),
        ((X, 3), (X, 3), {}),
        ({"x": X, "flag": True}, (), {"x": X, "flag": True}),
        (OrderedDict(x=X), (), {"x": X}),
        (UserDict(x=X), (), {"x": X}),  # what transformers' processors return
        (((X, Y), {"flag": True}), (X, Y), {"flag": True}),
        (([X], {}), (X,), {}),
        (((), {"x": X}), (), {"x": X}),
        ((X, {"x": Y}), (X, {"x": Y}), {}),  # two arguments, the second of them a dict
        (((X, Y), (X,)), ((X, Y), (X,)), {}),
    ],
)
def test_every_form_is_brought_into_one(given, args, kwargs):
    found_args, found_kwargs = normalize(nn.Identity(), given)
    assert found_args == args
    assert type(found_args) is tuple
    assert found_kwargs == kwargs
    assert type(found_kwargs) is dict


def test_what_was_given_is_not_the_models_to_change():
    given = {"x": X}
    _, kwargs = normalize(nn.Identity(), given)
    kwargs["more"] = 1
    assert list(given) == ["x"]


@pytest.mark.parametrize(
    "given",
    [images(), (images(),), {"image": images()}, ((images(),), {}), ((), {"image": images()}), (images(), MASK),
     {"image": images(), "mask": MASK}, ((images(),), {"mask": MASK})],
    ids=["tensor", "tuple", "dict", "pair", "keywords", "two", "dict of two", "pair of two"],
)  # fmt: skip
def test_linearize_takes_every_form(given):
    model = t5fx.linearize(vit(), t5fx.everything, example_inputs=given)
    assert [s.name for s in t5fx.report(model).selected] == ["blocks.0.attn", "blocks.1.attn"]
    args, kwargs = normalize(model, given)
    assert model(*args, **kwargs).isfinite().all()


@pytest.mark.parametrize("given", [3, "image.png", nn.Identity(), {1, 2}])
def test_inputs_of_another_type_are_refused(given):
    with pytest.raises(InputError, match=rf"example_inputs is a {type(given).__name__}; pass a tensor"):
        t5fx.inspect(vit(), given)


def test_inputs_that_the_model_does_not_take_are_shown():
    with pytest.raises(InputError, match=r"float64\[2, 3, 8, 20\], size=7.*TypeError"):
        t5fx.inspect(vit(), ((images(),), {"size": 7}))


INFERRED = [n for n in EXPECTED if n.startswith(("timm/", "diffusers/", "transformers/")) and n != "transformers/Llama"]


@pytest.mark.parametrize("name", INFERRED)
def test_inferred_inputs_run_and_show_the_sites(name):
    """A dry run of the model itself: what it does not take is an InputError."""
    model, _, _ = build(name)
    report = t5fx.inspect(model)
    count, codes, _ = EXPECTED[name]
    assert report.how == "dry run"
    assert len(report) == count
    assert sorted(s.refusal.code for s in report if s.refusal) == sorted(codes)
    own = {"transformers/Bert"}  # transformers' dummy inputs are three sentences
    assert name in own or {s.batch for s in report if s.kind != "window"} <= {1}


def test_inferred_inputs_take_the_models_dtype_device_and_size():
    model, _, _ = build("timm/vit_tiny")
    (image,), _ = infer(model.bfloat16())
    assert (image.dtype, image.device.type, image.shape) == (torch.bfloat16, "cpu", (1, 3, 64, 64))
    (image,), _ = infer(model.to("meta"))
    assert image.device.type == "meta"
    dynamic, _, _ = build("timm/vit_dynamic_size")
    (image,), _ = infer(dynamic, 28)
    assert image.shape == (1, 3, 28, 28)
    (image,), _ = infer(dynamic, (28, 42))
    assert image.shape == (1, 3, 28, 42)
    sd3, _, _ = build("diffusers/SD3")
    _, kwargs = infer(sd3.half(), (8, 16))
    assert kwargs["hidden_states"].shape == (1, 4, 8, 16)
    assert kwargs["hidden_states"].dtype == torch.float16


def test_a_subclass_of_a_librarys_model_counts_as_one():
    class Mine(type(build("timm/vit_tiny")[0])):
        pass

    model = Mine(img_size=32, patch_size=16, embed_dim=32, depth=1, num_heads=2, in_chans=4)
    (image,), kwargs = infer(model)
    assert (image.shape, kwargs) == ((1, 4, 32, 32), {})
    assert len(t5fx.inspect(model)) == 1


@pytest.mark.parametrize("call", [t5fx.inspect, t5fx.linearize])
def test_nothing_is_guessed_about_an_unknown_module(call):
    with pytest.raises(InputError, match=r"can't be inferred for ViT .*pass example_inputs=.*torch\.randn"):
        call(ViT())


def test_a_library_model_with_an_odd_configuration_is_an_input_error():
    model, _, _ = build("timm/vit_tiny")
    model.patch_embed.img_size = "large"
    with pytest.raises(InputError, match=r"VisionTransformer could not be inferred .*pass example_inputs="):
        t5fx.inspect(model)
