"""examples/finetune_dit.py, all its stages, on a handful of made-up pictures."""

import csv
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import t5fx

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))
import data
import finetune_dit as example
import frechet
import loop

SMALL = ["--images", "64", "--batch", "16", "--width", "32", "--depth", "2", "--epochs", "2", "--finetune", "0.5",
         "--calibrate-steps", "3", "--samples", "20", "--sample-steps", "2", "--lr", "1e-3",
         "--classifier-epochs", "2"]  # fmt: skip


@pytest.fixture(autouse=True)
def pictures(monkeypatch):
    """Stand in for Fashion-MNIST: squares, whose place and grey are the class."""
    labels = torch.arange(64) % 10
    images = torch.zeros(64, 1, 28, 28, dtype=torch.uint8)
    for image, label in zip(images, labels.tolist(), strict=True):
        image[:, 2 * label : 2 * label + 8, 5:20] = 255 - 20 * label
    sets = data.Images(images, labels, [str(i) for i in range(10)])
    monkeypatch.setattr(data, "load", lambda name, **_: (sets, sets))
    monkeypatch.setattr(example, "SHEET", 20)
    return sets


def rows(path):
    with open(path, newline="") as file:
        return [{k: v for k, v in row.items() if "seconds" not in k} for row in csv.DictReader(file)]


def test_all_stages_and_resume(tmp_path, monkeypatch):
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    example.main([*SMALL, "--out", str(whole)])
    log = rows(whole / "log.csv")
    assert [row["stage"] for row in log] == [
        *["classifier"] * 2, *["softmax"] * 2, "control", "calibrate", "finetune"
    ]  # fmt: skip
    table = {row["model"]: row for row in rows(whole / "distances.csv")}
    assert list(table) == ["real images, the other half", *example.ROWS.values()]
    assert all(float(row["distance"]) >= 0 for row in table.values())
    assert len({row["flow_loss"] for row in table.values()}) == 6
    for name in ("samples.png", "curves.png"):
        assert 1000 < (whole / name).stat().st_size < 300_000

    # Calibration leaves the inherited weights alone, fine-tuning moves all of them.
    softmax = torch.load(whole / "softmax.pt")
    calibrated, finetuned = (load_file(whole / n / "model.safetensors") for n in ("calibrated", "finetuned"))
    converted = load_file(whole / "converted" / "model.safetensors")
    new = [name for name in calibrated if ".ttt." in name]
    assert new
    assert all(torch.equal(softmax[name], calibrated[name]) for name in softmax if name in calibrated)
    assert all(not torch.equal(converted[name], calibrated[name]) for name in new)
    moved = [name for name in finetuned if not torch.equal(finetuned[name], calibrated[name])]
    assert set(new) < set(moved)
    assert len(moved) > 0.8 * len(finetuned)

    # Cut off in the middle of the softmax training, and gone on with: bit-equal.
    save = loop.save_checkpoint

    def save_and_stop(*args, **rest):
        save(*args, **rest)
        if rest["stage"] == "softmax":
            raise KeyboardInterrupt

    monkeypatch.setattr(loop, "save_checkpoint", save_and_stop)
    with pytest.raises(KeyboardInterrupt):
        example.main([*SMALL, "--out", str(cut)])
    monkeypatch.setattr(loop, "save_checkpoint", save)
    assert not (cut / "softmax.pt").exists()
    example.main([*SMALL, "--out", str(cut), "--resume"])
    assert rows(cut / "log.csv") == log
    assert rows(cut / "distances.csv") == rows(whole / "distances.csv")
    other = load_file(cut / "finetuned" / "model.safetensors")
    assert all(torch.equal(finetuned[name], other[name]) for name in finetuned)


def test_the_target_is_that_of_rectified_flow(pictures):
    images = example.pictures(pictures, torch.arange(64))
    assert images.shape == (64, 1, 32, 32)
    assert images[:, :, :2].eq(-1).all()
    inputs, velocity = example.noisy(images, pictures.labels)
    time = inputs["timestep"][:, None, None, None] / 1000
    torch.testing.assert_close(inputs["hidden_states"] - time * velocity, images, rtol=0, atol=1e-5)


def test_samples_depend_on_seed_and_labels_alone():
    model = example.build(example.parse([*SMALL, "--out", "none"]))
    assert [site.convertible for site in t5fx.inspect(model)] == [True, True]
    torch.nn.init.normal_(model.proj_out_2.weight, std=0.1)
    labels = torch.arange(4)
    one, same = (example.sample(model, labels, seed=3, steps=2, batch=batch) for batch in (4, 3))
    torch.testing.assert_close(one, same)
    assert not torch.allclose(one, example.sample(model, labels, seed=4, steps=2))
    assert one.abs().max() <= 1


def test_frechet_distance():
    """Gaussians with known moments: |difference of means|^2 + sum of (difference of deviations)^2."""
    x = torch.randn(100, 4, dtype=torch.float64)
    x = (x - x.mean(0)) @ torch.linalg.inv(torch.linalg.cholesky(x.T.cov())).T  # mean 0, covariance 1
    assert frechet.distance(x, x) == pytest.approx(0, abs=1e-9)
    assert frechet.distance(x, x + 2) == pytest.approx(4 * 4)
    scale = torch.tensor([1.0, 2.0, 3.0, 0.5], dtype=torch.float64)
    turn = torch.linalg.qr(torch.randn(4, 4, dtype=torch.float64))[0]
    assert frechet.distance(x @ turn, x * scale @ turn) == pytest.approx(0 + 1 + 4 + 0.25)
    assert frechet.distance(x, x * scale) == pytest.approx(frechet.distance(x * scale, x))


def test_unknown_stage(tmp_path):
    with pytest.raises(SystemExit, match="'convret' is none of"):
        example.main(["--out", str(tmp_path), "--stages", "convret"])
