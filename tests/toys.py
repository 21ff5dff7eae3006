"""Small models for tests: a plain softmax vision transformer whose every number can be recomputed by hand."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import t5fx


class Attention(nn.Module):
    """Softmax attention with a joint projection; ``mask`` and the other options reach the call as they come."""

    def __init__(self, dim: int = 16, heads: int = 2, **options) -> None:
        super().__init__()
        self.heads, self.options = heads, options
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def heads_of(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        batch, tokens, _ = x.shape
        query, key, value = self.qkv(x).reshape(batch, tokens, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        return query, key, value

    def out(self, x: Tensor) -> Tensor:
        return self.proj(x.transpose(1, 2).flatten(2))

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        query, key, value = self.heads_of(x)
        return self.out(F.scaled_dot_product_attention(query, key, value, attn_mask=mask, **self.options))


class Block(nn.Module):
    def __init__(self, dim: int = 16, heads: int = 2, **options) -> None:
        super().__init__()
        self.norm, self.attn, self.mlp = (
            nn.LayerNorm(dim),
            Attention(dim, heads, **options),
            nn.Linear(dim, dim),
        )

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        x = x + self.attn(self.norm(x), mask)
        return x + self.mlp(x).tanh()


class ViT(nn.Module):
    """Patch embedding, class token, blocks, head.  Takes images of any size that 4 divides, square or not."""

    def __init__(self, depth: int = 2, dim: int = 16, heads: int = 2, **options) -> None:
        super().__init__()
        self.embed = nn.Conv2d(3, dim, 4, 4)
        self.cls = nn.Parameter(0.1 * torch.randn(1, 1, dim))
        self.blocks = nn.ModuleList(Block(dim, heads, **options) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, 5)

    def forward(self, image: Tensor, mask: Tensor | None = None) -> Tensor:
        x = self.embed(image).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls.expand(len(x), -1, -1), x], dim=1)
        for block in self.blocks:
            x = block(x, mask)
        return self.head(self.norm(x.mean(1)))


def vit(**options) -> ViT:
    """In float64, with parameters large enough that a wrong step shows."""
    return ViT(**options).double().eval()


def images(height: int = 8, width: int = 20, batch: int = 2) -> Tensor:
    """Patches of 4: the default makes a 2 x 5 grid."""
    return torch.randn(batch, 3, height, width, dtype=torch.float64)


def key_padding(*lengths: int, tokens: int) -> Tensor:
    """[batch, 1, 1, tokens]: True for the first ``lengths`` tokens of each row."""
    return (torch.arange(tokens) < torch.tensor(lengths)[:, None])[:, None, None]


def louder(model: nn.Module) -> nn.Module:
    """Make the new parameters as large as any: at their usual start (std 0.02) a lost term hides in the noise."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".ttt" in f".{name}":
                parameter.copy_(0.4 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    return model


def by_hand(attention: Attention, x: Tensor, *, config=t5fx.T5, mask: Tensor | None = None, **layout) -> Tensor:
    """What a converted :class:`Attention` must compute, from its parameters and the reference operator."""
    query, key, value = attention.heads_of(x)
    params = dict(attention.ttt.named_parameters())
    scale = attention.options.get("scale")
    out = t5fx.ops.ttt_attention(query, key, value, params, config, mask=mask, scale=scale, **layout)
    return attention.out(out)


def state(model: nn.Module) -> dict:
    """Everything about a model that must not change unasked: see :func:`assert_same_state`."""
    tables = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_forward_hooks_with_kwargs",
              "_forward_pre_hooks_with_kwargs", "_state_dict_hooks", "_load_state_dict_pre_hooks")  # fmt: skip
    plain = (bool, int, float, str, type(None), tuple)
    return {
        "classes": {n: type(m) for n, m in model.named_modules()},
        "tensors": {k: (id(v), v._version, None if v.is_meta else v.detach().clone())
                    for k, v in (*model.named_parameters(), *model.named_buffers())},
        "keys": list(model.state_dict()),
        "attributes": {n: {k: v if isinstance(v, plain) else id(v) for k, v in m.__dict__.items()}
                       for n, m in model.named_modules()},
        "hooks": {n: {t: list(getattr(m, t)) for t in tables} for n, m in model.named_modules()},
        "rng": torch.get_rng_state(),
    }  # fmt: skip


def assert_same_state(before: dict, after: dict, *, but: tuple[str, ...] = ()) -> None:
    """``but`` leaves parts out: "rng" for what draws random numbers, "versions" for what writes and restores."""
    for part in before.keys() - set(but) - {"tensors", "rng"}:
        assert after[part] == before[part], part
    assert after["tensors"].keys() == before["tensors"].keys()
    for name, (identity, version, value) in before["tensors"].items():
        now = after["tensors"][name]
        assert now[0] == identity, name
        assert now[1] == version or "versions" in but, name
        assert value is None or torch.equal(now[2], value), name
    if "rng" not in but:
        assert torch.equal(after["rng"], before["rng"])


def first_tensor(output):
    if isinstance(output, torch.Tensor):
        return output
    return output[0] if isinstance(output, tuple) else output.last_hidden_state


def run(model, args, kwargs):
    with torch.no_grad():
        return first_tensor(model(*args, **kwargs))


def fine_tune(model, args, kwargs):
    """Two steps that move every parameter."""
    optimizer = torch.optim.AdamW(t5fx.param_groups(model, 1e-3))
    for _ in range(2):
        optimizer.zero_grad()
        first_tensor(model(*args, **kwargs)).square().mean().backward()
        optimizer.step()
    return model


def save_a_toy(folder: Path) -> tuple[Path, Tensor, Tensor]:
    """A fine-tuned toy of three blocks, two of them converted: its folder, an image and the answer to it."""
    torch.manual_seed(1)
    model = vit(depth=3)
    t5fx.linearize(model, t5fx.last(2), example_inputs=images())
    fine_tune(model, (images(),), {})
    x = images()
    return t5fx.save(model, folder), x, run(model, (x,), {})
