"""calibrate, as it is called: batches in each form, arguments that make no sense, what stops it, how it prints."""

import math

import pytest
import torch
from test_calibrate import converted, new
from toys import images, vit

from t5fx.calibrate import calibrate
from t5fx.errors import ConfigError, InputError, T5fxError, TrainingError


@pytest.mark.parametrize("form", ["tensor", "tuple", "list", "dict", "args and kwargs"])
def test_a_batch_in_each_form(form):
    model, x = converted(), images()
    batch = {"tensor": x, "tuple": (x,), "list": [x], "dict": {"image": x}, "args and kwargs": ((x,), {"mask": None})}
    start = {n: p.clone() for n, p in new(model).items()}
    result = calibrate(model, [batch[form]], steps=4)
    for n, p in start.items():
        model.get_parameter(n).data.copy_(p)
    assert result.errors == calibrate(model, [x], steps=4).errors


def test_few_batches_are_begun_again_and_an_iterator_that_ends_is_an_error():
    model = converted()
    assert len(calibrate(model, [images(), images()], steps=5).errors) == 5
    with pytest.raises(InputError, match=r"ended after 2 of 5 steps.*DataLoader"):
        calibrate(model, (x for x in [images(), images()]), steps=5)
    assert len(calibrate(model, (x for x in [images(), images()]), steps=2).errors) == 2
    loader = torch.utils.data.DataLoader([x.squeeze(0) for x in images(batch=4).split(1)], batch_size=2)
    assert len(calibrate(model, loader, steps=3).errors) == 3


@pytest.mark.parametrize(("batches", "message"), [
    (images(), "Tensor.*iterable of batches"), ({"image": images()}, "dict.*iterable of batches"), (3, "int"),
    ([], "empty"), ([None, "x"], "infer|example_inputs|str"),
])  # fmt: skip
def test_what_are_no_batches(batches, message):
    with pytest.raises(InputError, match=message):
        calibrate(converted(), batches, steps=2)


@pytest.mark.parametrize("options", [{"steps": 0}, {"steps": 2.5}, {"steps": True}, {"lr": 0}, {"lr": math.nan},
                                     {"warm_up": 1.0}, {"warm_up": -0.1}])  # fmt: skip
def test_numbers_that_make_no_sense(options):
    (name,) = options
    with pytest.raises(ConfigError, match=f"calibrate: {name}"):
        calibrate(converted(), [images()], **{"steps": 2, **options})


def test_a_model_that_is_not_linearized():
    with pytest.raises(T5fxError, match="not linearized"):
        calibrate(vit(), [images()], steps=1)


def test_a_number_that_is_not_finite_stops_it_and_names_the_site():
    model = converted(depth=3)
    model.blocks[1].attn.ttt.w2.data[0, 0, 0] = float("inf")
    before = new(model)
    with pytest.raises(TrainingError, match=r"blocks\.1\.attn.*not finite") as error:
        calibrate(model, [images()], steps=3)
    assert error.value.site == "blocks.1.attn"
    assert all(torch.equal(p, before[n]) for n, p in new(model).items())


def test_the_result_prints_as_a_table_and_is_plain_data():
    model = converted()
    result = calibrate(model, [images()], steps=12)
    lines = str(result).splitlines()
    assert lines[0].startswith(f"calibrated 2 sites in 12 steps; relative squared error {result.mean:.3f}")
    row = next(line for line in lines if "blocks.1.attn" in line).split()
    assert row[1:3] == [f"{result.first['blocks.1.attn']:.3f}", f"{result.last['blocks.1.attn']:.3f}"]
    assert len(row[3]) == 12
    assert result.to_dict()["errors"][3][1] == result.history("blocks.1.attn")[3]
    assert result.first["blocks.1.attn"] == result.history("blocks.1.attn")[0]
