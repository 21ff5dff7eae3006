"""The benchmarks run and write what they measured. What they measure is nobody's business here: tests never time."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))
from benchmarks import measure, model, results  # noqa: E402


def test_competitors_take_turns():
    order = []
    runs = {name: lambda name=name: order.append(name) for name in "abc"}
    seconds = measure.alternate(runs, repeats=2, warmup=1)
    assert "".join(order) == "abc" + "abcabc"
    assert set(seconds) == {"a", "b", "c"}
    assert all(s >= 0 for s in seconds.values())


def test_peak_memory_counts_what_a_call_holds():
    held = measure.peak_above(lambda: torch.ones(16 * 2**20))  # 64 MiB
    assert 60 * 2**20 < held < 90 * 2**20


def test_a_section_is_replaced_and_the_rest_stays(tmp_path):
    file = tmp_path / "results.md"
    file.write_text("before\n<!-- op: begin -->\nold\n<!-- op: end -->\nafter\n")
    for text in ("new \\1", "newer"):
        results.put("op", text, file)
    assert file.read_text() == "before\n<!-- op: begin -->\nnewer\n<!-- op: end -->\nafter\n"
    with pytest.raises(ValueError, match="no section"):
        results.put("other", "", file)


def test_every_section_is_in_the_results():
    text = results.FILE.read_text()
    assert all(f"<!-- {name}: begin -->" in text for name in ("op", "model", "compile", "linearize"))


def test_the_bound_has_no_attention():
    """Values pass where converted attention was, and nothing of the sites is left."""
    from zoo import build

    import t5fx

    net, args, kwargs = build("timm/vit_tiny")
    t5fx.linearize(net, t5fx.everything, example_inputs=(args, kwargs))
    graphs = []

    def look(graph, inputs):
        graphs.append(graph)
        return model.without_attention(graph, inputs)

    torch._dynamo.reset()
    with torch.no_grad():
        out = torch.compile(net, backend=look)(*args, **kwargs)
    assert out.shape == net(*args, **kwargs).shape
    assert not any("t5fx" in str(node.target) for node in graphs[0].graph.nodes)


def test_op_prints_tables():
    sizes = ["--tokens", "16", "--backward", "16", "--heads", "2", "--head-dim", "16", "--repeats", "1"]
    command = [sys.executable, "-m", "benchmarks", "op", *sizes, "--dtypes", "fp32", "--malloc", "default"]
    env = {**os.environ, "T5FX_KERNEL": "reference"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "| fp32 | default | 16 |" in done.stdout
    assert "Forward and backward" in done.stdout


@pytest.mark.slow
def test_the_gpu_script_runs_where_there_is_none():
    sizes = [
        "--tokens",
        "16",
        "64",
        "--heads",
        "2",
        "--head-dim",
        "16",
        "--repeats",
        "1",
        "--dtypes",
        "fp32",
        "--sizes",
    ]
    command = [sys.executable, "-m", "benchmarks", "gpu", "--device", "cpu", "--dtypes", "fp32", *sizes]
    env = {**os.environ, "T5FX_KERNEL": "reference"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "TFLOP/s, of a matmul" in done.stdout
    refused = subprocess.run([*command[:4], "--sizes"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert torch.cuda.is_available() or "needs a GPU" in refused.stderr
