"""The official implementations' numbers, reached through the public API (float64, to 1e-10).

data/*.safetensors hold one run each of the official attention modules of T5 and DiT5: parameters, input, output, a
cotangent and all gradients.  A plain softmax block with their projections is linearized, and must agree.
"""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import nn

import t5fx

DATA = Path(__file__).parent / "data"
CONFIGS = {
    "t5_swiglu_d16": t5fx.T5,
    "t5_mlp_dot_d16": t5fx.TTTConfig(inner="mlp", loss="dot", dwc=None),
    "dit5_mlp_mse_d16": t5fx.DIT5_TTT,
}
OURS = {"q_conv2d.": "ttt.dwc_q.", "k_conv2d.": "ttt.dwc_k.", "w1": "ttt.w1", "w2": "ttt.w2", "w3": "ttt.w3"}


class SoftmaxBlock(nn.Module):
    def __init__(self, dim=32, heads=2):
        super().__init__()
        self.heads = heads
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def forward(self, x):
        batch, tokens, dim = x.shape
        query, key, value = self.qkv(x).reshape(batch, tokens, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        x = F.scaled_dot_product_attention(query, key, value)
        return self.proj(x.transpose(1, 2).reshape(batch, tokens, dim))


def ours(name):
    for theirs, mine in OURS.items():
        if name.startswith(theirs):
            return mine + name[len(theirs) :]
    return name


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("given", [True, False])
def test_golden(name, given):
    golden = load_file(DATA / f"{name}.safetensors")
    block = SoftmaxBlock().double()
    layout = t5fx.TokenLayout(grid=(6, 6)) if given else None
    t5fx.linearize(block, t5fx.everything, config=CONFIGS[name], example_inputs=golden["x"], layout=layout)

    parameters = dict(block.named_parameters())
    official = {ours(key[6:]): key[6:] for key in golden if key.startswith("param.")}
    assert set(official) == set(parameters)
    with torch.no_grad():
        for mine, theirs in official.items():
            parameters[mine].copy_(golden[f"param.{theirs}"].reshape(parameters[mine].shape))

    x = golden["x"].clone().requires_grad_()
    y = block(x)
    y.backward(golden["cotangent"])
    torch.testing.assert_close(y, golden["y"], rtol=0, atol=1e-10)
    torch.testing.assert_close(x.grad, golden["grad.x"], rtol=0, atol=1e-10)
    for mine, theirs in official.items():
        expected = golden[f"grad.{theirs}"].reshape(parameters[mine].shape)
        torch.testing.assert_close(
            parameters[mine].grad, expected, rtol=0, atol=1e-10, msg=lambda m, n=mine: f"{n}: {m}"
        )
