"""The token grid: found out, right at run time, or a clear error; never a stale one."""

import threading

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint
from zoo import build

import t5fx
from t5fx import LayoutError, TokenLayout


class Block(nn.Module):
    def __init__(self, dim, heads=2):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(dim, 3 * dim)

    def forward(self, x):
        query, key, value = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        out = F.scaled_dot_product_attention(query, key, value)
        return x + out.transpose(1, 2).flatten(2)


class Net(nn.Module):
    """A class token, a grid of 2x2 patches, as many register tokens behind as asked for."""

    def __init__(self, registers=0, dim=16, use_reentrant=None):
        super().__init__()
        self.embed = nn.Conv2d(3, dim, 2, 2)
        self.first = nn.Parameter(torch.randn(1, 1, dim))
        self.registers = nn.Parameter(torch.randn(1, registers, dim)) if registers else None
        self.blocks = nn.ModuleList([Block(dim), Block(dim)])
        self.use_reentrant = use_reentrant

    def tokens(self, image):
        x = self.embed(image).flatten(2).transpose(1, 2)
        parts = [self.first.expand(x.shape[0], -1, -1), x]
        if self.registers is not None:
            parts.append(self.registers.expand(x.shape[0], -1, -1))
        return torch.cat(parts, 1)

    def forward(self, image):
        x = self.tokens(image)
        for block in self.blocks:
            reentrant = self.use_reentrant
            x = block(x) if reentrant is None else checkpoint(block, x, use_reentrant=reentrant)
        return x


def by_hand(block, x, prefix, grid):
    """The converted block, with the reference instead of the graph."""
    query, key, value = block.qkv(x).unflatten(-1, (3, block.heads, -1)).permute(2, 0, 3, 1, 4)
    weights = dict(block.ttt.named_parameters())
    out = t5fx.ops.ttt_attention(query, key, value, weights, t5fx.T5, prefix=prefix, grid=grid)
    return x + out.transpose(1, 2).flatten(2)


def expected(net, image):
    x = net.tokens(image)
    grid = [image.shape[-2] // 2, image.shape[-1] // 2]
    for block in net.blocks:
        x = by_hand(block, x, 1, grid)
    return x


def converted(size=(8, 12), **kwargs):
    net = Net(**kwargs).double()
    t5fx.linearize(net, t5fx.everything, example_inputs=torch.randn(2, 3, *size).double())
    with torch.no_grad():  # at its start the inner model hardly moves: make the grid matter
        for name, parameter in net.named_parameters():
            if ".ttt." in name:
                parameter.normal_(std=0.5)
    return net


def test_found_out():
    net = Net(registers=3)
    site = t5fx.inspect(net, torch.randn(1, 3, 8, 12))[0]
    assert site.layout == TokenLayout(1, (4, 6), 3)
    assert "embed" in site.layout_from


@pytest.mark.parametrize("registers", [0, 3])
@pytest.mark.parametrize("size", [(8, 12), (12, 8), (6, 20), (10, 2), (16, 16)])
def test_new_sizes_equal_the_reference(registers, size):
    net = converted(registers=registers)
    image = torch.randn(2, 3, *size).double()
    torch.testing.assert_close(net(image), expected(net, image), rtol=1e-10, atol=1e-10)


def test_the_grid_matters():
    """Transposing the grid must show, or the tests above prove nothing."""
    net = converted()
    image = torch.randn(2, 3, 8, 12).double()
    x = net.tokens(image)
    right, wrong = (by_hand(net.blocks[0], x, 1, g) for g in ([4, 6], [6, 4]))
    assert (right - wrong).abs().max() > 1e-3


def test_called_past_forward():
    net = converted()
    image = torch.randn(2, 3, 12, 4).double()
    tokens = net.tokens(image)  # runs the embedding, so the grid is known
    torch.testing.assert_close(net.blocks[0](tokens), by_hand(net.blocks[0], tokens, 1, [6, 2]), rtol=1e-10, atol=1e-10)
    with pytest.raises(LayoutError, match=r"'blocks.0' got 10 tokens.*6x2.*t5fx.grid"):
        net.blocks[0](tokens[:, :10])
    short = tokens[:, :9]
    with t5fx.grid(net, (2, 4)):
        torch.testing.assert_close(
            net.blocks[0](short), by_hand(net.blocks[0], short, 1, [2, 4]), rtol=1e-10, atol=1e-10
        )
    with pytest.raises(LayoutError):
        net.blocks[0](short)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointing_remembers_the_grid(use_reentrant):
    """Two grids of as many tokens, both forwards before either backward: recomputation must use the right one."""
    torch.manual_seed(0)
    images = [torch.randn(2, 3, *size).double().requires_grad_() for size in ((8, 12), (12, 8))]
    net = converted()
    plain = [torch.autograd.grad(net(image).square().sum(), image)[0] for image in images]
    net.use_reentrant = use_reentrant
    losses = [net(image).square().sum() for image in images]
    if use_reentrant:  # nothing tells the two apart: an error, not a guess
        with pytest.raises(LayoutError, match="use_reentrant=False"):
            losses[0].backward()
        return
    for image, wanted, loss in zip(images, plain, losses, strict=True):
        loss.backward()
        torch.testing.assert_close(image.grad, wanted, rtol=1e-8, atol=1e-8)


def test_threads_at_two_sizes():
    net = converted()
    images = [torch.randn(1, 3, *size).double() for size in ((8, 12), (12, 8))]
    wanted = [expected(net, image).detach() for image in images]
    wrong = []

    def run(image, right):
        with torch.no_grad():
            wrong.extend(i for i in range(100) if not torch.allclose(net(image), right, rtol=1e-9, atol=1e-9))

    threads = [threading.Thread(target=run, args=pair) for pair in zip(images, wanted, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_timm_forward_features_and_new_size():
    model, _, _ = build("timm/vit_dynamic_size")
    t5fx.linearize(model, t5fx.everything)  # inputs inferred
    for height, width in ((56, 56), (28, 112), (112, 28), (42, 70)):
        image = torch.randn(1, 3, height, width)
        direct = model.forward_features(image)
        assert direct.shape[1] == 5 + (height // 14) * (width // 14)
        torch.testing.assert_close(model.forward_head(direct), model(image))
        grids = [site.ttt.layout.resolve(direct.shape[1]) for site in (b.attn for b in model.blocks)]
        assert grids == [(5, [height // 14, width // 14])] * 2


def test_text_of_any_length():
    model, args, kwargs = build("diffusers/SD3")
    t5fx.linearize(model, t5fx.everything, example_inputs=(args, kwargs))
    for length in (1, 7, 30):
        model(**{**kwargs, "encoder_hidden_states": torch.randn(2, length, 32)})
        layout = model.transformer_blocks[0].attn.ttt.layout
        assert layout.resolve(64 + length) == (0, [8, 8])
    model(**{**kwargs, "hidden_states": torch.randn(2, 4, 8, 16)})
    assert layout.resolve(32 + 7) == (0, [4, 8])


class Plain(nn.Module):
    """Tokens come from the caller."""

    def __init__(self):
        super().__init__()
        self.block = Block(16)

    def forward(self, x):
        return self.block(x)


def test_square_is_assumed_and_said():
    report = t5fx.inspect(Plain(), torch.randn(1, 36, 16))
    assert report[0].layout == TokenLayout(grid=(6, 6))
    assert "assumed" in str(report)
    net = t5fx.linearize(Plain(), t5fx.everything, example_inputs=torch.randn(1, 36, 16))
    assert net(torch.randn(1, 49, 16)).shape == (1, 49, 16)
    with pytest.raises(LayoutError, match=r"'block' got 35 tokens.*square"):
        net(torch.randn(1, 35, 16))


def test_no_square_is_refused():
    site = t5fx.inspect(Plain(), torch.randn(1, 37, 16))[0]
    assert site.refusal.code == "layout"
    assert "layout=t5fx.TokenLayout" in site.refusal.reason
    assert t5fx.inspect(Plain(), torch.randn(1, 37, 16), t5fx.T5.replace(dwc=None))[0].convertible


def test_given_layout():
    inputs = torch.randn(2, 21, 16)
    net = t5fx.linearize(Plain(), t5fx.everything, example_inputs=inputs, layout=TokenLayout(2, (3, 6), 1))
    torch.testing.assert_close(net(inputs), by_hand(net.block, inputs, 2, [3, 6]))
    with pytest.raises(LayoutError, match="30 tokens"):
        net(torch.randn(1, 30, 16))
    seen = []
    net = t5fx.linearize(
        Plain(), t5fx.everything, example_inputs=inputs, layout=lambda site: seen.append(site) or TokenLayout(0, (3, 7))
    )
    assert [s.name for s in seen] == ["block"]
    torch.testing.assert_close(net(inputs), by_hand(net.block, inputs, 0, [3, 7]))


@pytest.mark.parametrize("layout", [TokenLayout(2, (3, 6)), "square", lambda site: (3, 7)])
def test_bad_layout_leaves_the_model_alone(layout):
    net = Plain()
    with pytest.raises(LayoutError, match="'block'"):
        t5fx.linearize(net, t5fx.everything, example_inputs=torch.randn(2, 21, 16), layout=layout)
    assert type(net.block) is Block
    assert not any("ttt" in key for key in net.state_dict())


def test_compiled_dynamic_sizes():
    net = converted().float()
    compiled = torch.compile(net, backend="aot_eager", fullgraph=True, dynamic=True)
    for size in ((8, 12), (12, 8), (6, 20), (20, 6)):
        image = torch.randn(2, 3, *size)
        torch.testing.assert_close(compiled(image), expected(net, image), rtol=1e-4, atol=1e-4)


def test_one_block_compiled_at_a_time():
    """The embedding runs in eager, the blocks are compiled on their own: they must see its grid."""
    net = converted().float()
    for block in net.blocks:
        block.compile(backend="aot_eager", fullgraph=True)
    for size in ((8, 12), (12, 8), (6, 20)):
        image = torch.randn(2, 3, *size)
        torch.testing.assert_close(net(image), expected(net, image), rtol=1e-4, atol=1e-4)


def test_a_given_layout_is_for_the_sites_that_can_be_converted():
    model, args, kwargs = build("diffusers/PixArt")  # its cross-attention reads 7 text tokens
    t5fx.linearize(model, t5fx.everything, example_inputs=(args, kwargs), layout=TokenLayout(grid=(8, 8)))
    assert [site.kind for site in t5fx.report(model).selected] == ["self", "self"]
