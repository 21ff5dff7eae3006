"""torch.compile(model, backend="t5"): found by entry point, equal to eager, in training and inference."""

import subprocess
import sys

import pytest
import torch
from zoo import build

import t5fx


def test_registered_without_importing_t5fx():
    code = (
        "import sys, torch\n"
        "assert 't5' in torch._dynamo.list_backends()\n"
        "assert 't5fx' not in sys.modules\n"
        "f = torch.compile(lambda x: torch.sin(x) * 2, backend='t5')\n"
        "x = torch.randn(8)\n"
        "torch.testing.assert_close(f(x), torch.sin(x) * 2)\n"
        "assert 't5fx.backend' in sys.modules\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr[-2000:]


@pytest.mark.parametrize("name", ["timm/vit_dinov2_reg4", "diffusers/SD3"])
def test_equals_eager(name):
    model, args, kwargs = build(name)
    t5fx.linearize(model, t5fx.everything, example_inputs=(args, kwargs))
    compiled = torch.compile(model, backend="t5", fullgraph=True)

    def gradients(run):
        model.zero_grad()
        out = run(*args, **kwargs)
        out = out if isinstance(out, torch.Tensor) else out[0]
        out.square().sum().backward()
        return out.detach(), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}

    out, wanted = gradients(model)
    compiled_out, found = gradients(compiled)
    torch.testing.assert_close(compiled_out, out, rtol=1e-4, atol=1e-5)
    assert set(found) == set(wanted)
    for key, gradient in wanted.items():
        torch.testing.assert_close(found[key], gradient, rtol=2e-3, atol=1e-4 * float(gradient.abs().max()) + 1e-7)


def test_mode_and_options():
    f = torch.compile(lambda x: torch.sin(x) + 1, backend="t5", options={"max_autotune": False})
    x = torch.randn(8)
    torch.testing.assert_close(f(x), torch.sin(x) + 1)
    with pytest.raises(Exception, match="no_such_option"):
        torch.compile(lambda x: x + 1, backend="t5", options={"no_such_option": 1})(x)
