"""Random small transformers: converted and equal to the same TTT block written by hand, or refused.

A :class:`Spec` is drawn by hypothesis and built into a model whose attention is spelled in one of many ways.  The
reference never looks at a graph: it takes the model's own query, key and value, and calls
:func:`t5fx.ops.ttt_attention` with the prefix, the grid and the mask that the spec says.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from toys import louder

import t5fx

BATCH = 2
WRITTEN = ("matmul", "bmm", "baddbmm", "einsum", "einsum-transposed")
REFUSED = {"causal": {"causal", "query-mask", "float-mask"}, "per-query": {"query-mask"}, "float": {"float-mask"}}


@dataclass(frozen=True)
class Spec:
    form: str
    heads: int
    groups: int
    head_dim: int
    grid: tuple[int, int]
    cls: int
    registers_before: int
    registers_after: int
    text_before: int
    text_after: int
    rope: bool
    qk_norm: str
    mask: str
    scale: str
    depth: int
    seed: int

    @property
    def dim(self) -> int:
        return self.heads * self.head_dim

    @property
    def prefix(self) -> int:
        return self.cls + self.registers_before + self.text_before

    @property
    def tokens(self) -> int:
        return self.prefix + math.prod(self.grid) + self.registers_after + self.text_after


@st.composite
def specs(draw) -> Spec:
    form = draw(st.sampled_from(("sdpa", "sdpa", "mha", *WRITTEN)))
    plain = form == "mha"  # its projections are its own: no room for RoPE, norms and groups
    few = st.integers(0, 3)
    groups = 1 if plain else draw(st.sampled_from((1, 1, 2)))
    return Spec(
        form=form,
        heads=groups * draw(st.integers(1, 3)),
        groups=groups,
        head_dim=2 * draw(st.integers(4, 64)),
        grid=(draw(st.integers(2, 6)), draw(st.integers(2, 6))),
        cls=draw(st.integers(0, 1)),
        registers_before=draw(few),
        registers_after=draw(few),
        text_before=draw(few),
        text_after=draw(few),
        rope=not plain and draw(st.booleans()),
        qk_norm="" if plain else draw(st.sampled_from(("", "layer", "rms"))),
        mask=draw(st.sampled_from(("none", "none", "padding", "padding", "float", "causal", "per-query"))),
        scale="plain" if plain else draw(st.sampled_from(("plain", "query", "both", "division", "other"))),
        depth=draw(st.integers(1, 2)),
        seed=draw(st.integers(0, 10_000)),
    )


def rotate(x: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat([-second, first], -1)


class Attention(nn.Module):
    def __init__(self, spec: Spec) -> None:
        super().__init__()
        self.spec = spec
        kv = spec.dim // spec.groups
        self.q, self.k, self.v = nn.Linear(spec.dim, spec.dim), nn.Linear(spec.dim, kv), nn.Linear(spec.dim, kv)
        self.proj = nn.Linear(spec.dim, spec.dim)
        norm = {"": nn.Identity, "layer": nn.LayerNorm, "rms": nn.RMSNorm}[spec.qk_norm]
        self.norm_q, self.norm_k = norm(spec.head_dim), norm(spec.head_dim)

    def heads_of(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        query, key, value = (
            linear(x).unflatten(-1, (-1, self.spec.head_dim)).transpose(1, 2) for linear in (self.q, self.k, self.v)
        )
        query, key = self.norm_q(query), self.norm_k(key)
        if self.spec.rope:
            half = torch.arange(self.spec.head_dim // 2, dtype=x.dtype) / self.spec.head_dim
            angles = torch.outer(torch.arange(x.shape[1], dtype=x.dtype), 100.0 ** (-2 * half)).repeat(1, 2)
            query, key = (y * angles.cos() + rotate(y) * angles.sin() for y in (query, key))
        return query, key, value

    def out(self, x: Tensor) -> Tensor:
        return self.proj(x.transpose(1, 2).flatten(2))

    def scale(self) -> float:
        return 0.3 if self.spec.scale == "other" else self.spec.head_dim**-0.5

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        query, key, value = self.heads_of(x)
        if self.spec.form == "sdpa":
            given = {"scale": self.scale()} if self.spec.scale == "other" else {}
            causal = self.spec.mask == "causal"
            grouped = self.spec.groups > 1
            out = F.scaled_dot_product_attention(
                query, key, value, attn_mask=mask, is_causal=causal, enable_gqa=grouped, **given
            )
            return self.out(out)
        key, value = (y.repeat_interleave(self.spec.groups, 1) for y in (key, value))
        return self.out(self.written(query, key, value, mask))

    def written(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        """softmax(query key^T scale + mask) value, the scale and the products as the spec spells them."""
        factor, form, shape = self.scale(), self.spec.form, query.shape
        if self.spec.scale == "query":
            query, factor = query * factor, 1.0
        elif self.spec.scale == "both":
            query, key, factor = query * math.sqrt(factor), key * math.sqrt(factor), 1.0
        if form in ("bmm", "baddbmm"):
            query, key, value = (y.flatten(0, 1) for y in (query, key, value))
        if form == "baddbmm":
            empty = torch.empty(query.shape[0], query.shape[1], key.shape[1], dtype=query.dtype)
            scores = torch.baddbmm(empty, query, key.transpose(1, 2), beta=0, alpha=factor)
            factor = 1.0
        elif form == "bmm":
            scores = torch.bmm(query, key.transpose(1, 2))
        elif form == "einsum":
            scores = torch.einsum("b h i d, b h j d -> b h i j", query, key)
        elif form == "einsum-transposed":
            scores = torch.einsum("bhid,bhdj->bhij", query, key.mT)
        else:
            scores = query @ key.transpose(-2, -1)
        if factor != 1.0:
            scores = scores / (1 / factor) if self.spec.scale == "division" else scores * factor
        if form in ("bmm", "baddbmm") and self.spec.mask != "none":  # masks know nothing of folded heads
            scores = scores.view(shape[0], shape[1], shape[2], -1)
        if self.spec.mask == "causal":
            count = scores.shape[-1]
            scores = scores.masked_fill(torch.ones(count, count).triu(1).bool(), -torch.inf)
        elif mask is not None:
            scores = scores + mask if mask.is_floating_point() else scores.masked_fill(~mask, -torch.inf)
        if scores.dim() > value.dim():
            scores = scores.flatten(0, 1)
        weights = scores.softmax(-1)
        if form.startswith("einsum"):
            return torch.einsum("bhij,bhjd->bhid", weights, value)
        if form in ("bmm", "baddbmm"):
            return torch.bmm(weights, value).view(shape)
        return weights @ value


class Builtin(nn.Module):
    """The same around ``nn.MultiheadAttention``, which hides where a boolean mask is True."""

    def __init__(self, spec: Spec) -> None:
        super().__init__()
        self.spec = spec
        self.inner = nn.MultiheadAttention(spec.dim, spec.heads, batch_first=True)

    def heads_of(self, x: Tensor) -> tuple[Tensor, ...]:
        joint = F.linear(x, self.inner.in_proj_weight, self.inner.in_proj_bias)
        return tuple(y.unflatten(-1, (self.spec.heads, -1)).transpose(1, 2) for y in joint.chunk(3, -1))

    def out(self, x: Tensor) -> Tensor:
        return self.inner.out_proj(x.transpose(1, 2).flatten(2))

    def scale(self) -> float:
        return self.spec.head_dim**-0.5

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        hidden, padding = None, None
        if self.spec.mask == "causal":
            hidden = torch.ones(x.shape[1], x.shape[1]).triu(1).bool()
        elif self.spec.mask == "padding":
            padding = ~mask[:, 0, 0]
        elif mask is not None:
            mask = mask.expand(len(x), self.spec.heads, x.shape[1], x.shape[1]).flatten(0, 1)
            hidden = mask if mask.is_floating_point() else ~mask
        return self.inner(x, x, x, key_padding_mask=padding, attn_mask=hidden, need_weights=False)[0]


class Net(nn.Module):
    def __init__(self, spec: Spec) -> None:
        super().__init__()
        self.spec, dim = spec, spec.dim
        self.embed, self.head = nn.Conv2d(3, dim, 2, 2), nn.Linear(dim, 3)
        self.cls = nn.Parameter(torch.randn(1, spec.cls, dim))
        self.before = nn.Parameter(torch.randn(1, spec.registers_before, dim))
        self.after = nn.Parameter(torch.randn(1, spec.registers_after, dim))
        kind = Builtin if spec.form == "mha" else Attention
        self.norms = nn.ModuleList(nn.LayerNorm(dim) for _ in range(spec.depth))
        self.blocks = nn.ModuleList(kind(spec) for _ in range(spec.depth))

    def tokens(self, image: Tensor, before: Tensor, after: Tensor) -> Tensor:
        x = self.embed(image).flatten(2).transpose(1, 2)
        cls, first, last = (p.expand(len(x), -1, -1) for p in (self.cls, self.before, self.after))
        parts = (cls, first, before, x, last, after)
        return torch.cat([part for part in parts if part.shape[1]], 1)

    def forward(self, image: Tensor, before: Tensor, after: Tensor, mask: Tensor | None) -> Tensor:
        x = self.tokens(image, before, after)
        for norm, block in zip(self.norms, self.blocks, strict=True):
            x = x + block(norm(x), mask)
        return self.head(x)

    def by_hand(self, image: Tensor, before: Tensor, after: Tensor, mask: Tensor | None) -> Tensor:
        """Once converted, this is what it must compute."""
        x = self.tokens(image, before, after)
        for norm, block in zip(self.norms, self.blocks, strict=True):
            query, key, value = block.heads_of(norm(x))
            key, value = (y.repeat_interleave(self.spec.groups, 1) for y in (key, value))
            weights = (block.inner if isinstance(block, Builtin) else block).ttt
            settings = {"prefix": self.spec.prefix, "grid": self.spec.grid, "scale": block.scale()}
            keys = None if mask is None else mask[:, 0, 0]
            params = dict(weights.named_parameters())
            x = x + block.out(t5fx.ops.ttt_attention(query, key, value, params, t5fx.T5, mask=keys, **settings))
        return self.head(x)


def inputs(spec: Spec) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    def numbers(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64)

    n, mask = spec.tokens, None
    if spec.mask == "padding":
        mask = torch.rand(BATCH, 1, 1, n) < 0.7
        mask[..., 0] = True  # softmax over nothing is no number
    elif spec.mask == "float":
        mask = numbers(1, spec.heads, n, n)
    elif spec.mask == "per-query":
        mask = (torch.rand(BATCH, 1, n, n) < 0.7) | torch.eye(n, dtype=torch.bool)
    image = numbers(BATCH, 3, 2 * spec.grid[0], 2 * spec.grid[1])
    return image, numbers(BATCH, spec.text_before, spec.dim), numbers(BATCH, spec.text_after, spec.dim), mask


def check(spec: Spec) -> None:
    torch.manual_seed(spec.seed)
    model, args = Net(spec).double().eval(), inputs(spec)
    with torch.no_grad():
        softmax = model(*args)
        report = t5fx.inspect(model, args)
        event(f"{spec.form}, mask {spec.mask}")
        assert len(report) == spec.depth
        # Heads folded into the batch, unfolded for a mask, and folded again: no form that is known.
        folded = spec.form in ("bmm", "baddbmm") and spec.mask != "none"
        if folded or spec.mask in REFUSED:
            codes = {"form"} if folded else REFUSED[spec.mask]
            assert all(site.refusal is not None and site.refusal.code in codes for site in report)
            with pytest.raises(t5fx.SelectionError):
                t5fx.linearize(model, t5fx.everything, example_inputs=args)
            assert torch.equal(model(*args), softmax)
            return
        assert [site.refusal for site in report] == [None] * spec.depth
        louder(t5fx.linearize(model, t5fx.everything, example_inputs=args))
        got, want = model(*args), model.by_hand(*args)
        if args[-1] is not None:  # the numbers of hidden tokens are nobody's business, but they are finite
            assert torch.isfinite(got).all()
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9)
        t5fx.revert(model)
        assert torch.equal(model(*args), softmax)


common = {
    "deadline": None,
    "derandomize": True,
    "print_blob": True,
    "suppress_health_check": [HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
}


@settings(max_examples=50, **common)
@given(specs())
def test_converted_and_equal_or_refused(spec):
    check(spec)


@pytest.mark.slow
@settings(max_examples=500, **common)
@given(specs())
def test_converted_and_equal_or_refused_500(spec):
    check(spec)
