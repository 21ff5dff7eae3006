"""torch.export, ONNX and AOTInductor: a converted model leaves, gives the same numbers, and needs no t5fx any more."""

import collections
import subprocess
import sys

import onnx
import onnxruntime
import pytest
import torch
from torch.utils._pytree import tree_leaves
from toys import first_tensor, louder, run
from zoo import build

import t5fx

NAMES = ["timm/vit_tiny", "diffusers/DiT"]
PER_SITE = {"key_norm": 1, "dwc": 2, "inner_step": 1, "inner_apply": 1}


def converted(name):
    model, args, kwargs = build(name)
    softmax = run(model, args, kwargs)
    louder(t5fx.linearize(model, t5fx.everything, example_inputs=(args, kwargs)))
    out = run(model, args, kwargs)
    assert not torch.allclose(out, softmax, atol=1e-3)
    return model, args, kwargs, out


def export(model, args, kwargs, **options):
    with torch.no_grad():
        return torch.export.export(model, args, kwargs, strict=False, **options)


def operators(program):
    """How often the TTT operators are in an exported graph, by name."""
    targets = [str(node.target) for node in program.graph.nodes]
    return dict(collections.Counter(t.split(".")[1] for t in targets if t.startswith("t5fx.")))


def elsewhere(folder, script, args, kwargs):
    """Run ``script`` in a process that has no t5fx, with ``args`` and ``kwargs``; returns the tensor ``out``."""
    torch.save((args, kwargs), folder / "inputs.pt")
    code = (
        f"import os, sys, torch\nos.chdir({str(folder)!r})\n"
        "sys.modules['t5fx'] = None  # an import of it fails\n"
        "args, kwargs = torch.load('inputs.pt')\n"
        f"{script}\n"
        "out = out if isinstance(out, torch.Tensor) else out[0]\n"
        "assert not [name for name in sys.modules if name.startswith('t5fx.')]\n"
        "torch.save(out.detach(), 'out.pt')\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr[-3000:]
    return torch.load(folder / "out.pt")


def close(a, b):
    torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_export(name, tmp_path):
    model, args, kwargs, out = converted(name)
    program = export(model, args, kwargs)
    sites = len(t5fx.report(model).selected)
    assert operators(program) == {operator: n * sites for operator, n in PER_SITE.items()}
    assert not any("scaled_dot_product" in str(node.target) for node in program.graph.nodes)
    close(first_tensor(program.module()(*args, **kwargs)), out)

    plain = program.run_decompositions()
    assert not operators(plain)
    torch.export.save(plain, tmp_path / "model.pt2")
    script = "out = torch.export.load('model.pt2').module()(*args, **kwargs)"
    close(elsewhere(tmp_path, script, args, kwargs), out)


def test_export_with_a_dynamic_batch():
    model, (x,), _, out = converted("timm/vit_tiny")
    program = export(model, (x,), {}, dynamic_shapes=({0: torch.export.Dim("batch", min=2)},))
    close(program.module()(x), out)
    five = torch.randn(5, *x.shape[1:])
    close(program.module()(five), run(model, (five,), {}))


@pytest.mark.parametrize("name", NAMES)
def test_onnx(name, tmp_path):
    model, args, kwargs, out = converted(name)
    with torch.no_grad():
        torch.onnx.export(model, args, tmp_path / "model.onnx", kwargs=kwargs, dynamo=True, verbose=False)
    onnx.checker.check_model(tmp_path / "model.onnx")
    graph = onnx.load(tmp_path / "model.onnx").graph
    assert {node.domain for node in graph.node} <= {"", "ai.onnx"}  # no operator of ours
    assert not any(node.op_type == "Softmax" for node in graph.node)

    session = onnxruntime.InferenceSession(tmp_path / "model.onnx")
    values = [leaf.numpy() for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    names = [i.name for i in session.get_inputs()]
    close(torch.from_numpy(session.run(None, dict(zip(names, values, strict=True)))[0]), out)

    script = (
        "import onnxruntime\nfrom torch.utils._pytree import tree_leaves\n"
        "session = onnxruntime.InferenceSession('model.onnx')\n"
        "values = [x.numpy() for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]\n"
        "names = [i.name for i in session.get_inputs()]\n"
        "out = torch.from_numpy(session.run(None, dict(zip(names, values)))[0])"
    )
    close(elsewhere(tmp_path, script, args, kwargs), out)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_aot_inductor(name, tmp_path):
    model, args, kwargs, out = converted(name)
    program = export(model, args, kwargs)
    torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "model.pt2"))
    script = "out = torch._inductor.aoti_load_package('model.pt2')(*args, **kwargs)"
    close(elsewhere(tmp_path, script, args, kwargs), out)
