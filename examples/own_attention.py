"""Teach t5fx an attention function that it does not know, in one screen.

Many models call an extension: ``flash_attn_func(q, k, v, softmax_scale=...)``, a ring attention, a kernel of one's own.
To torch.fx that is one opaque call.  Here such a function is made (a custom operator that works on [batch, tokens,
heads, head_dim]), a small vision transformer that calls it, and the pass that opens it.  Run me:

    python examples/own_attention.py
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from rich import print as show
from torch import Tensor, nn

import t5fx
import t5fx.passes

# --- what the model brings along: an operator that nobody can look into -----------------------------------------


@torch.library.custom_op("own_attention::flash", mutates_args=())
def flash(query: Tensor, key: Tensor, value: Tensor, softmax_scale: float) -> Tensor:
    """query, key, value [batch, tokens, heads, head_dim]; think of a CUDA kernel here."""
    scores = torch.einsum("bqhd,bkhd->bhqk", query, key) * softmax_scale
    return torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), value)


@flash.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, softmax_scale: float) -> Tensor:
    return torch.empty_like(query)


class Attention(nn.Module):
    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads, self.scale = heads, (dim // heads) ** -0.5
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.qkv(x).unflatten(-1, (3, self.heads, -1)).unbind(2)
        return self.proj(torch.ops.own_attention.flash(query, key, value, self.scale).flatten(2))


class VisionTransformer(nn.Module):
    def __init__(self, dim: int = 64, depth: int = 4, heads: int = 4) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, dim, 8, 8)
        self.blocks = nn.ModuleList(Attention(dim, heads) for _ in range(depth))

    def forward(self, image: Tensor) -> Tensor:
        x = self.patch(image).flatten(2).transpose(1, 2)
        for block in self.blocks:
            x = x + block(x)
        return x


# --- the pass: the same function, said in the open around F.scaled_dot_product_attention ------------------------


def example() -> tuple:
    """Arguments on which both forms are compared when the pass is registered."""
    return (*torch.randn(3, 2, 9, 4, 16).unbind(0), 0.3)


def flash_in_the_open(query: Tensor, key: Tensor, value: Tensor, softmax_scale: float) -> Tensor:
    query, key, value = (x.transpose(1, 2) for x in (query, key, value))  # SDPA wants [batch, heads, tokens, head_dim]
    out = F.scaled_dot_product_attention(query, key, value, scale=softmax_scale)
    return out.transpose(1, 2)


def teach() -> None:
    t5fx.passes.register(torch.ops.own_attention.flash, flash_in_the_open, check=example)


def main() -> None:
    torch.manual_seed(0)
    model, image = VisionTransformer().eval(), torch.randn(1, 3, 128, 96)
    show(f"before: t5fx sees {len(t5fx.inspect(model, image))} attention sites")
    teach()
    show("after ten lines of teaching:")
    show(t5fx.inspect(model, image))
    with torch.no_grad():
        softmax = model(image)
        t5fx.linearize(model, t5fx.every_other, example_inputs=image)
        linear = model(image)
    converted = [site.name for site in t5fx.report(model).selected]
    show(f"converted {converted}; the output moved by {float((linear - softmax).norm() / softmax.norm()):.1%}")
    print(t5fx.code(model, "blocks.1"))


if __name__ == "__main__":
    main()
