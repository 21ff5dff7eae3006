"""The examples run, and what they teach is right."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import t5fx
import t5fx.passes
from t5fx.passes import registry

EXAMPLES = Path(__file__).parent.parent / "examples"


def load(name):
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def test_own_attention_runs():
    script = [sys.executable, str(EXAMPLES / "own_attention.py")]
    result = subprocess.run(script, capture_output=True, text=True, check=False, timeout=300)
    assert result.returncode == 0, result.stderr[-2000:]
    assert "t5fx sees 0 attention sites" in result.stdout
    assert "4 attention sites, 4 convertible" in result.stdout


@pytest.fixture(scope="module")
def own():
    module = load("own_attention")
    module.teach()
    yield module
    t5fx.passes.unregister(torch.ops.own_attention.flash)


@pytest.mark.parametrize("size", [(128, 96), (64, 64), (8, 200)])
def test_what_was_taught_equals_the_reference(own, size):
    model, image = own.VisionTransformer(), torch.randn(2, 3, *size)
    t5fx.linearize(model, t5fx.everything, example_inputs=torch.randn(1, 3, 64, 48))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".ttt." in name:
                parameter.normal_(std=0.3)
    x = model.patch(image).flatten(2).transpose(1, 2)
    for block in model.blocks:
        query, key, value = block.qkv(x).unflatten(-1, (3, block.heads, -1)).permute(2, 0, 3, 1, 4)
        weights = dict(block.ttt.named_parameters())
        out = t5fx.ops.ttt_attention(query, key, value, weights, t5fx.T5, grid=(size[0] // 8, size[1] // 8))
        x = x + block.proj(out.transpose(1, 2).flatten(2))
    torch.testing.assert_close(model(image), x, rtol=1e-4, atol=1e-4)
    model(image).square().sum().backward()
    assert all(p.grad is not None and p.grad.any() for p in model.parameters())


def test_a_wrong_form_is_not_registered(own):
    def wrong(query, key, value, softmax_scale):
        return own.flash_in_the_open(query, key, value, 2 * softmax_scale)

    with pytest.raises(t5fx.T5fxError, match="differ by"):
        t5fx.passes.register(torch.ops.own_attention.flash, wrong, check=own.example)
    assert registry.FUNCTIONS[torch.ops.own_attention.flash] is own.flash_in_the_open


def secret(query, key, value):
    """A Python function that a tracer can't follow: it goes through NumPy."""
    scores = torch.from_numpy((query @ key.mT).detach().numpy())
    return scores.softmax(-1) @ value


class ByName(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = torch.nn.Linear(16, 48)

    def forward(self, x):
        query, key, value = self.qkv(x).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)
        return secret(query, key, value).transpose(1, 2).flatten(2)


def test_a_function_by_name():
    model, x = ByName(), torch.randn(2, 16, 16)
    name = f"{__name__}:secret"
    original = secret
    t5fx.passes.register(name, lambda q, k, v: F.scaled_dot_product_attention(q, k, v, scale=1.0))
    try:
        assert t5fx.inspect(model, x)[0].kind == "self"
        assert secret is original
        t5fx.linearize(model, t5fx.everything, example_inputs=x)
        assert "secret" not in t5fx.code(model, "")
        assert model(x).shape == x.shape
    finally:
        t5fx.passes.unregister(name)
    with pytest.raises(t5fx.T5fxError, match="names nothing"):
        t5fx.passes.register("nowhere:at_all", original)


def test_a_module_class():
    class Hidden(ByName):
        def forward(self, x):
            raise NotImplementedError("needs a GPU")

    def in_the_open(self, x):
        query, key, value = self.qkv(x).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)
        return F.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2)

    model, x = torch.nn.Sequential(Hidden()), torch.randn(2, 16, 16)
    t5fx.passes.register(Hidden, in_the_open)
    try:
        t5fx.linearize(model, t5fx.everything, example_inputs=x)
        assert model(x).shape == x.shape
    finally:
        t5fx.passes.unregister(Hidden)


def test_entry_points(monkeypatch):
    called = []

    class Entry:
        name, value = "mine", "my_package:register_all"

        def load(self):
            return lambda: called.append(True)

    monkeypatch.setattr(registry, "entry_points", lambda group: [Entry()] if group == "t5fx.passes" else [])
    registry.load_entry_points.cache_clear()
    with registry.in_the_open(), registry.in_the_open():
        assert called == [True]
    registry.load_entry_points.cache_clear()
