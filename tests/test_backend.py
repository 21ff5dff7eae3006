"""torch.compile(model, backend="t5"): found by entry point, equal to eager, in training and inference."""

import os
import subprocess
import sys

import pytest
import torch
from torch._inductor.utils import run_and_get_code
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


CACHED = """
import sys, torch, t5fx, t5fx.backend, timm
from torch._dynamo.utils import counters
torch.manual_seed(0)
model = timm.create_model("vit_tiny_patch16_224", img_size=64, depth=2, num_classes=3)
t5fx.linearize(model, t5fx.everything)
if sys.argv[1] == "changed":
    t5fx.backend.source_hash = lambda: "other"
compiled = torch.compile(model, backend="t5", fullgraph=True)
x = torch.randn(2, 3, 64, 64)
out, wanted = compiled(x), model(x)
torch.testing.assert_close(out, wanted, rtol=1e-4, atol=1e-5)
out.sum().backward()
found = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
model.zero_grad()
wanted.sum().backward()
for name, gradient in found.items():
    wanted_gradient = dict(model.named_parameters())[name].grad
    torch.testing.assert_close(gradient, wanted_gradient, rtol=1e-3, atol=1e-4 * float(wanted_gradient.abs().max()))
print("hits", counters["aot_autograd"]["autograd_cache_hit"] + counters["inductor"]["fxgraph_cache_hit"])
"""


@pytest.mark.slow
def test_caches_warm_cold_and_when_files_change(tmp_path):
    def run(how, **env):
        result = subprocess.run(
            [sys.executable, "-c", CACHED, how], capture_output=True, text=True, check=False,
            env={**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path), "HF_HUB_OFFLINE": "1", **env},
        )  # fmt: skip
        assert result.returncode == 0, result.stderr[-3000:]
        return int(result.stdout.split("hits")[1])

    assert run("cold") == 0
    assert run("warm") > 0
    assert run("changed") == 0  # an artifact does not outlive a change of our files
    assert run("warm", T5FX_KERNEL="reference") == 0  # nor is one kernel's taken for another's


def test_logs_say_what_became_of_each_site(monkeypatch, caplog):
    torch._dynamo.reset()
    model, args, kwargs = build("timm/vit_dinov2_reg4")
    t5fx.linearize(model, t5fx.everything, example_inputs=(args, kwargs))
    options = {"t5fx.kernel": "reference"}
    with caplog.at_level("INFO", logger="t5fx.backend"), torch.no_grad():
        torch.compile(model, backend="t5", options=options)(*args, **kwargs)
    said = [r.message for r in caplog.records if r.name == "t5fx.backend"]
    assert said[:2] == [f"blocks.{i}.attn: fused into the reference kernel" for i in range(2)]

    caplog.clear()
    monkeypatch.setenv("T5FX_KERNEL", "none")
    monkeypatch.setattr("t5fx.backend._said", set())
    for _ in range(2):
        torch._dynamo.reset()
        with torch.no_grad():
            torch.compile(model, backend="t5")(*args, **kwargs)
    warnings = [r.message for r in caplog.records if r.name == "t5fx.backend" and r.levelname == "WARNING"]
    assert len(warnings) == 1
    assert "not fused: none: T5FX_KERNEL says so (said once" in warnings[0]


def test_a_model_without_sites_compiles_as_under_inductor():
    model, x = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU()), torch.randn(4, 8)
    codes = []
    for backend in ("inductor", "t5"):
        torch._dynamo.reset()
        with torch.no_grad(), torch._inductor.config.patch(force_disable_caches=True):
            codes.append(run_and_get_code(torch.compile(model, backend=backend), x)[1][0])
    strip = [[line for line in code.splitlines() if not line.startswith("#") and "ID" not in line] for code in codes]
    assert strip[0] == strip[1]
