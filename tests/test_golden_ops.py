"""The operators reproduce the official implementations in float64: output and every gradient."""

import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors import safe_open

from t5fx.config import TTTConfig
from t5fx.ops import ttt_attention

DATA = Path(__file__).parent / "data"


def block(x, params, config, heads, grid, scale):
    """qkv projection, TTT attention, output projection: what the official modules compute."""
    batch, tokens, channels = x.shape
    qkv = F.linear(x, params["qkv.weight"], params["qkv.bias"])
    query, key, value = qkv.view(batch, tokens, 3, heads, channels // heads).permute(2, 0, 3, 1, 4)
    site = {}
    for name, tensor in params.items():
        if name.startswith("w"):
            site[name] = tensor.squeeze(0)
        elif "conv2d" in name:
            site[name.replace("q_conv2d", "dwc_q").replace("k_conv2d", "dwc_k")] = tensor
    output = ttt_attention(query, key, value, site, config, grid=grid, scale=scale)
    return F.linear(output.transpose(1, 2).flatten(2), params["proj.weight"], params["proj.bias"])


@pytest.mark.parametrize("name", ["t5_swiglu_d16", "t5_mlp_dot_d16", "dit5_mlp_mse_d16"])
def test_official_numbers(name):
    with safe_open(DATA / f"{name}.safetensors", "pt") as file:
        told = {key: json.loads(text) for key, text in file.metadata().items()}
        tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 (not a dict)
    params = {k.removeprefix("param."): v.requires_grad_() for k, v in tensors.items() if k.startswith("param.")}
    x = tensors["x"].requires_grad_()
    config = TTTConfig(
        inner=told["inner"],
        loss=told["loss"],
        key_norm_eps=told["key_norm_eps"],
        dwc=3 if told["dwc"] else None,
    )
    y = block(x, params, config, told["heads"], told["grid"], told["scale"])
    torch.testing.assert_close(y, tensors["y"], rtol=0, atol=1e-10)

    gradients = torch.autograd.grad(y, [x, *params.values()], tensors["cotangent"])
    names = ["x", *params]
    assert sorted(f"grad.{n}" for n in names) == sorted(k for k in tensors if k.startswith("grad."))
    for n, gradient in zip(names, gradients, strict=True):
        torch.testing.assert_close(gradient, tensors[f"grad.{n}"], rtol=0, atol=1e-10, msg=lambda m, n=n: f"{n}: {m}")
