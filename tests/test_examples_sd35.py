"""examples/finetune_sd35.py on a tiny random checkpoint: the same code as for the real one."""

import csv
import io
import json
import sys
import tarfile
from pathlib import Path

import pytest
import torch
from accelerate.state import AcceleratorState
from diffusers import SD3Transformer2DModel
from safetensors.torch import load_file
from torch import nn

import t5fx

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))
import captions
import finetune_sd35 as example
import tiny_sd3

TINY = ["--tiny", "--steps", "4", "--every", "1", "--warm-up", "2", "--lr", "1e-3"]


@pytest.fixture(autouse=True)
def _fresh_accelerator():
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


def run(out, *more):
    AcceleratorState._reset_state(reset_partial_state=True)
    example.main([*TINY, "--out", str(out), *more])


def rows(out):
    """The log without its times."""
    with open(out / "log.csv", newline="") as file:
        return [{k: v for k, v in row.items() if "seconds" not in k} for row in csv.DictReader(file)]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run of four steps after two of calibration, with a picture before and after."""
    out = tmp_path_factory.mktemp("sd35") / "whole"
    run(out, "--calibrate-steps", "2", "--prompts", "a red wall")
    return out


def test_the_result_loads(whole):
    transformer = SD3Transformer2DModel.from_pretrained(whole / "tiny-checkpoint", subfolder="transformer")
    before = {name: p.clone() for name, p in transformer.named_parameters()}
    t5fx.load(transformer, whole / "linear")
    assert [site.owner for site in t5fx.report(transformer).selected] == [
        "transformer_blocks.1.attn", "transformer_blocks.1.attn2", "transformer_blocks.3.attn",
    ]  # fmt: skip
    after = dict(transformer.named_parameters())
    trained = [name for name, p in before.items() if not torch.equal(p, after[name])]
    assert len(trained) > 0.9 * len(before)
    assert all(p.isfinite().all() for p in after.values())
    for name in ("0-softmax.png", "0-converted.png", "0-finetuned.png", "curves.png"):
        assert (whole / name).stat().st_size > 100
    assert (whole / "0-softmax.png").read_bytes() != (whole / "0-finetuned.png").read_bytes()


def test_the_log(whole):
    log = rows(whole)
    assert [(row["stage"], row["step"]) for row in log] == [
        ("calibrate", "1"), ("calibrate", "2"), *(("train", str(step)) for step in range(1, 5)),
    ]  # fmt: skip
    assert [float(row["lr"]) for row in log[2:]] == pytest.approx([5e-4, 1e-3, 1e-3, 1e-3])
    assert all(float(row["loss"]) > 0 for row in log)


def test_resume_is_bit_equal(whole, tmp_path):
    options = ["--calibrate-steps", "2", "--checkpoint-every", "2"]
    with pytest.raises(SystemExit, match="stopped after 3 steps"):
        run(tmp_path, *options, "--stop-after", "3")
    assert json.loads((tmp_path / "checkpoint" / "where.json").read_text())["step"] == 2
    assert not (tmp_path / "linear").exists()
    run(tmp_path, *options, "--resume")
    assert rows(tmp_path) == rows(whole)
    one, other = (load_file(out / "linear" / "model.safetensors") for out in (tmp_path, whole))
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_batches_in_parts_and_bf16(tmp_path):
    run(tmp_path, "--accumulate", "2", "--no-checkpointing", "--mixed-precision", "bf16", "--stop-after", "9")
    assert len(rows(tmp_path)) == 4
    saved = load_file(tmp_path / "linear" / "model.safetensors")
    assert {p.dtype for p in saved.values()} == {torch.float32}
    assert all(p.isfinite().all() for p in saved.values())


def test_the_target_is_that_of_rectified_flow(whole):
    device = torch.device("cpu")
    args = example.parse(["--tiny", "--out", str(whole), "--text-tokens", "16", "--drop-captions", "0"])
    pipeline = example.load_pipeline(whole / "tiny-checkpoint", False, device)
    encode = example.Encoders(pipeline, args, device)
    assert encode.shift == 3.0
    images = torch.rand(2, 3, 64, 64) * 2 - 1
    many = images.repeat_interleave(64, 0)
    inputs, velocity = encode(many, ["a red wall"] * 128)
    time = inputs["timestep"] / 1000
    clean = inputs["hidden_states"] - time[:, None, None, None] * velocity
    posterior = pipeline.vae.encode(images).latent_dist
    mean = (posterior.mean - 0.06) * 1.5
    spread = 1.5 * posterior.std / 64**0.5
    found = clean.unflatten(0, (2, 64)).mean(1)
    assert ((found - mean).abs() < 6 * spread + 1e-4).all()
    normal = (time / (3 - 2 * time)).logit()  # the shift taken back
    assert abs(normal.mean()) < 0.4
    assert 0.7 < normal.std() < 1.3
    assert inputs["encoder_hidden_states"].shape == (128, 16 + 16, 64)
    assert inputs["pooled_projections"].shape == (128, 64)
    assert not any(p.requires_grad for p in pipeline.vae.parameters())


def test_captions_are_dropped_for_guidance(whole):
    args = example.parse(["--tiny", "--out", str(whole), "--text-tokens", "16", "--drop-captions", "0.5"])
    pipeline = example.load_pipeline(whole / "tiny-checkpoint", True, torch.device("cpu"))
    assert pipeline.text_encoder_3 is None
    inputs, _ = example.Encoders(pipeline, args, torch.device("cpu"))(torch.zeros(32, 3, 64, 64), ["a red wall"] * 32)
    kinds = inputs["pooled_projections"].round(decimals=4).unique(dim=0)
    assert len(kinds) == 2


def test_folder_and_shards_hold_the_same(tmp_path):
    tiny_sd3.make(tmp_path / "checkpoint", tmp_path / "pairs")
    (tmp_path / "pairs" / "alone.png").write_bytes((tmp_path / "pairs" / "0.png").read_bytes())  # no caption: left out
    folder = captions.open_pairs(tmp_path / "pairs", 32)
    (tmp_path / "shards").mkdir()
    for number in range(2):
        with tarfile.open(tmp_path / "shards" / f"{number}.tar", "w") as shard:
            for path in sorted((tmp_path / "pairs").iterdir())[number * 8 : (number + 1) * 8 + number]:
                content = path.read_bytes()
                member = tarfile.TarInfo(f"some/{path.name}")
                member.size = len(content)
                shard.addfile(member, io.BytesIO(content))
    shards = captions.open_pairs(tmp_path / "shards", 32)
    assert len(folder) == len(shards) == 8
    for one, other in zip(folder, shards, strict=True):
        assert torch.equal(one[0], other[0])
        assert one[1] == other[1] != ""
    assert folder[0][0].shape == (3, 32, 32)
    assert folder[0][0].amin() == -1
    assert folder[0][0].amax() == 1  # red
    with pytest.raises(SystemExit, match="holds no pairs"):
        captions.open_pairs(tmp_path / "checkpoint", 32)


def take(steps, count):
    return [batch for batch, _ in zip(steps, range(count), strict=False)]


def test_steps_go_on_from_anywhere():
    all_of_them = take(captions.Steps(10, 4, seed=1), 10)
    assert take(captions.Steps(10, 4, seed=1, first=7), 3) == all_of_them[7:]
    halves = [take(captions.Steps(10, 4, seed=1, rank=rank, processes=2), 10) for rank in range(2)]
    assert [a + b for a, b in zip(*halves, strict=True)] == all_of_them
    epoch = [index for batch in all_of_them for index in batch][:20]
    assert sorted(epoch[:10]) == sorted(epoch[10:]) == list(range(10))
    with pytest.raises(SystemExit, match="can't be shared by 3"):
        captions.Steps(10, 4, seed=1, processes=3)


def test_arguments():
    with pytest.raises(SystemExit):
        example.parse(["--out", "x"])
    assert isinstance(tiny_sd3.pipeline().text_encoder_3, nn.Module)
