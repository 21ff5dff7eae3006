"""The command line speaks human."""

import json

import pytest
from diffusers import SD3Transformer2DModel

from t5fx.cli import main


def run(capsys, *arguments):
    status = main(list(arguments))
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def test_inspect_timm(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    status, out, _ = run(capsys, "inspect", "timm/vit_small_patch14_dinov2", "--size", "518")
    assert status == 0
    assert "12 attention sites, 12 convertible" in out
    assert "1 + 37x37" in out
    assert "blocks.11.attn" in out
    assert "half (every other block)" in out
    lines = [line for line in out.splitlines() if "│ all" in line or "│ half" in line]
    assert len(lines) == 2
    assert max(map(len, out.splitlines())) <= 100


def test_inspect_json_and_size(capsys):
    status, out, _ = run(capsys, "inspect", "timm/vit_tiny_patch16_224", "--size", "64x96", "--json")
    report = json.loads(out)
    assert status == 0
    assert {tuple(site["layout"]["grid"]) for site in report["sites"]} == {(4, 6)}


def test_inspect_diffusers_config(capsys, tmp_path):
    model = SD3Transformer2DModel(sample_size=16, num_layers=3, num_attention_heads=2, attention_head_dim=16,
                                  joint_attention_dim=32, caption_projection_dim=32, pooled_projection_dim=32,
                                  pos_embed_max_size=16)  # fmt: skip
    model.save_config(tmp_path)
    status, out, _ = run(
        capsys, "inspect", "diffusers/SD3Transformer2DModel", "--config", str(tmp_path / "config.json")
    )
    assert status == 0
    assert "3 attention sites" in out
    assert "8x8 + 333" in out


def test_inspect_transformers(capsys):
    status, out, _ = run(capsys, "inspect", "transformers/ViTModel", "--size", "448")
    assert status == 0
    assert "1 + 28x28" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["timm/vit_small_patch14_dino2"], "did you mean"),
        (["vit_small"], "write timm/NAME"),
        (["diffusers/Nothing"], "no model class 'Nothing'"),
        (["transformers/ViTModel", "--config", "nowhere.json"], "nowhere.json can't be read"),
    ],
)
def test_errors(capsys, arguments, message):
    status, _, error = run(capsys, "inspect", *arguments)
    assert status == 1
    assert message in " ".join(error.split())


def test_bad_size(capsys):
    with pytest.raises(SystemExit):
        main(["inspect", "timm/x", "--size", "big"])
    assert "518x784" in capsys.readouterr().err
