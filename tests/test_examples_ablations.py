"""examples/ablations.py: a row a variant, only what should begin anew does, and a stopped run is a row too."""

import csv

import pytest
import test_examples_timm
import torch
from test_examples_timm import options

import t5fx

folder = test_examples_timm.folder  # the fixture

import ablations  # noqa: E402 (the examples' folder is on the path since the import above)
import finetune_timm  # noqa: E402


@pytest.fixture(scope="module")
def base(folder, tmp_path_factory):
    out = tmp_path_factory.mktemp("base")
    finetune_timm.main(options(folder, out, "--stages", "softmax", "--epochs", "1"))
    return out / "softmax.pt"


def arguments(folder, base, out, *more):
    return ["--data", str(folder), "--size", "16", "--batch", "16", "--width", "32", "--depth", "2",
            "--tune-epochs", "2", "--base", str(base), "--out", str(out), *more]  # fmt: skip


def table(out):
    with open(out / "ablations.csv", newline="") as file:
        return list(csv.DictReader(file))


def test_rows_and_resume(folder, base, tmp_path):
    some = ["T5", "no key norm", "linear attention", "from scratch", "inherited weights frozen, calibrated"]
    given = arguments(folder, base, tmp_path, "--calibrate-steps", "2", "--only")
    ablations.main([*given, *some[:2]])
    first = table(tmp_path)
    ablations.main([*given, *some, "--resume"])
    rows = table(tmp_path)
    assert [row["variant"] for row in rows] == some
    assert rows[:2] == first
    assert all(row["stopped"] or 0 <= float(row["accuracy"]) <= 100 for row in rows)
    assert (tmp_path / "ablations.png").stat().st_size > 1000


@pytest.mark.parametrize("half", ["mean", "deviation", "whole"])
def test_half_of_the_key_norm(half):
    """One half leaves the other statistic as it was, and the mode ends where it ends."""
    key = 3 + 2 * torch.randn(2, 3, 50, 4, dtype=torch.float64)
    whole = torch.ops.t5fx.key_norm(key, 0.0)
    with ablations.KeyNorm(half):
        got = torch.ops.t5fx.key_norm.default(key, 0.0)
    deviation, mean = got.std(2, correction=0), got.mean(2)
    before = key.std(2, correction=0), key.mean(2)
    assert torch.allclose(deviation, before[0] if half == "mean" else torch.ones_like(deviation))
    wanted = before[1] / before[0] if half == "deviation" else torch.zeros_like(mean)
    assert torch.allclose(mean, wanted, atol=1e-12)
    assert torch.equal(torch.ops.t5fx.key_norm.default(key, 0.0), whole)


def test_the_halves_reach_a_converted_model(folder, base, tmp_path):
    """In a converted model, before any training, the halves and the whole give different outputs."""
    seen = {}
    for half in ("whole", "mean", "deviation"):
        # In float64: new weights begin small, and in float32 what they add is lost.
        model = ablations.Ablations(ablations.parse(arguments(folder, base, tmp_path))).softmax().double()
        torch.manual_seed(0)
        x = torch.randn(2, 3, 16, 16, dtype=torch.float64)
        t5fx.linearize(model, t5fx.everything, example_inputs=x)
        with ablations.KeyNorm(half):
            seen[half] = model.eval()(x).detach()
    assert not torch.equal(seen["whole"], seen["mean"])
    assert not torch.equal(seen["whole"], seen["deviation"])


@pytest.mark.parametrize("name", ["inherit the MLP only", "inherit attention only", "from scratch"])
def test_what_begins_anew(folder, base, tmp_path, name):
    run = ablations.Ablations(ablations.parse(arguments(folder, base, tmp_path)))
    model, before = run.softmax(), dict(run.softmax().named_parameters())
    torch.manual_seed(7)
    fresh = run.softmax()
    for parameter in fresh.parameters():
        torch.nn.init.normal_(parameter)
    count = ablations.begin_anew(model, fresh, ablations.VARIANTS[name].anew)
    changed = {n for n, p in model.named_parameters() if not torch.equal(p, before[n])}
    assert len(changed) == count > 0
    part = {"inherit the MLP only": ".attn.", "inherit attention only": ".mlp.", "from scratch": ""}[name]
    assert changed == {n for n in before if part in n}


def test_a_stopped_run_is_a_row(folder, base, tmp_path, monkeypatch):
    burst = ablations.Variant(t5fx.T5.replace(inner_lr=1e38))
    monkeypatch.setitem(ablations.VARIANTS, "T5", burst)
    ablations.main(arguments(folder, base, tmp_path, "--only", "T5"))
    (row,) = table(tmp_path)
    assert "blocks." in row["stopped"]
    assert row["accuracy"] == "nan"
