"""examples/real_weights.py, all its stages, on a small random model and made-up pictures."""

import csv
import sys
from pathlib import Path

import pytest
import timm
import torch
from safetensors.torch import load_file, save_file

import t5fx

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))
import data
import real_weights as example

SIZES = {"embed_dim": 32, "depth": 2, "num_heads": 2}
SMALL = ["--size", "56", "--batch", "4", "--calibrate-steps", "3", "--distill-steps", "4", "--every", "2",
         "--probe-train", "40", "--probe-test", "20"]  # fmt: skip


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Call it as a user does, but for the sizes of the model and the pictures."""
    labels = torch.arange(60) % 10
    images = torch.randint(0, 60, (60, 3, 32, 32), dtype=torch.uint8) + (15 * labels)[:, None, None, None]
    sets = data.Images(images.to(torch.uint8), labels, [str(i) for i in range(10)])
    monkeypatch.setattr(data, "load", lambda name, **_: (sets, sets))
    model = timm.create_model(example.NAME, img_size=518, num_classes=0, **SIZES)
    with torch.no_grad():
        model.pos_embed.normal_(std=0.5)
    save_file({k: v.half() for k, v in model.state_dict().items()}, tmp_path / "weights.safetensors")
    parse = example.parse

    def with_sizes(arguments):
        args = parse(arguments)
        args.sizes = SIZES
        return args

    monkeypatch.setattr(example, "parse", with_sizes)

    def call(out, *more):
        example.main(["--weights", str(tmp_path / "weights.safetensors"), "--out", str(out), *SMALL, *more])

    return call


def rows(path):
    with open(path, newline="") as file:
        return [{k: v for k, v in row.items() if "seconds" not in k} for row in csv.DictReader(file)]


def test_all_stages_and_resume(run, tmp_path):
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    run(whole)
    table = rows(whole / "probe.csv")
    assert [row["model"] for row in table] == ["original", "converted", "calibrated", "distilled"]
    assert float(table[0]["error"]) == 0
    assert all(float(row["error"]) > 0 for row in table[1:])
    assert all(0 <= float(row["accuracy"]) <= 100 for row in table)
    assert [(row["stage"], row["step"]) for row in rows(whole / "log.csv")] == [
        ("calibrate", "3"), ("distill", "2"), ("distill", "4"),
    ]  # fmt: skip
    assert (whole / "curves.png").stat().st_size > 1000
    original, converted, calibrated, distilled = (
        load_file(path)
        for path in (tmp_path / "weights.safetensors", *(whole / name / "model.safetensors"
                     for name in ("converted", "calibrated", "distilled")))
    )  # fmt: skip
    for name in calibrated:
        if ".ttt." in name:
            assert not torch.equal(converted[name], calibrated[name]), name
        elif name != "pos_embed":
            assert torch.equal(original[name].float(), calibrated[name]), name
    assert sum(not torch.equal(calibrated[name], distilled[name]) for name in distilled) > 0.9 * len(distilled)

    with pytest.raises(SystemExit, match="stopped after 3 steps"):
        run(cut, "--stop-after", "3")
    run(cut, "--resume")
    assert rows(cut / "probe.csv") == table
    assert rows(cut / "log.csv") == rows(whole / "log.csv")
    again = load_file(cut / "distilled" / "model.safetensors")
    assert all(torch.equal(again[name], distilled[name]) for name in distilled)


def test_half_of_the_sites(run, tmp_path):
    run(tmp_path / "half", "--select", "every_other", "--stages", "original,convert")
    model = t5fx.load(
        example.pretrained(tmp_path / "weights.safetensors", 56, **SIZES), tmp_path / "half" / "converted"
    )
    assert [site.owner for site in t5fx.report(model).selected] == ["blocks.1.attn"]
    with pytest.raises(SystemExit, match="'distil' is none of"):
        run(tmp_path / "half", "--stages", "distil")


def test_positions_are_resized_plainly():
    """A ramp stays a ramp inside; the class token's own stays; the same size changes nothing."""
    ramp = torch.arange(37.0).expand(37, 37).reshape(1, -1, 1).repeat(1, 1, 2)
    embedding = torch.cat([torch.full((1, 1, 2), 7.0), ramp], dim=1)
    small = example.resized(embedding, (8, 8))
    assert small.shape == (1, 65, 2)
    assert (small[:, 0] == 7).all()
    inside = small[0, 1:, 0].view(8, 8)[:, 1:-1]
    wanted = ((torch.arange(1, 7) + 0.5) * 37 / 8 - 0.5).expand(8, 6)
    torch.testing.assert_close(inside, wanted, rtol=0, atol=0.1)  # a cubic through four points is not quite straight
    torch.testing.assert_close(example.resized(embedding, (37, 37)), embedding)


def test_feature_loss():
    """A mistake in one channel weighs as much as one in another that is a hundred times as large."""
    std = torch.tensor([1.0, 10.0, 100.0])
    wanted = torch.randn(200, 101, 3) * std
    assert example.feature_loss(wanted, wanted, std) == 0
    for channel in range(3):
        got = wanted.clone()
        got[:, 0, channel] += 2 * std[channel]
        assert example.feature_loss(got, wanted, std).item() == pytest.approx(4 / 3 / 2, rel=0.2)
        got[:, 1:, channel] += std[channel]
        assert example.feature_loss(got, wanted, std).item() == pytest.approx(5 / 3 / 2, rel=0.2)
