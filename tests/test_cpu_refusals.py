"""What the fused CPU kernel declines, and how it is built."""

import os
import subprocess
import sys

import pytest
import torch
from cpu_cases import Case

from t5fx.kernels import cpu_build
from t5fx.kernels.problem import Problem


class TestRefusals:
    def test_none_on_fake_tensors(self):
        from torch._subclasses import FakeTensorMode

        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            case = Case(grid=(7, 10))
            case.query, case.key, case.value = (mode.from_tensor(t) for t in (case.query, case.key, case.value))
            assert case.refusal() is None

    def test_float64(self):
        assert "float64" in Case(dtype=torch.float64).refusal()
        assert "float64" in Case(weight_dtype=torch.float64).refusal()

    def test_dtypes_that_differ(self):
        case = Case()
        case.value = case.value.bfloat16()
        assert "differ in dtype" in case.refusal()

    def test_other_devices(self):
        case = Case()
        case.key = case.key.to("meta")
        assert "key is on meta" in case.refusal()

    def test_custom_inner_model(self):
        case = Case()
        case.problem = Problem("mine:Model@0", "dot", 1.0, 0, (), True)
        assert "mine:Model" in case.refusal()

    def test_large_heads(self):
        assert "head_dim 1024" in Case(dim=1024).refusal()

    def test_no_keys(self):
        assert "no keys" in Case(tokens=0).refusal()

    def test_no_bfloat16_instructions(self, monkeypatch):
        monkeypatch.setattr("t5fx.kernels.cpu.has_bfloat16", lambda: False)
        assert "AVX512_BF16" in Case(dtype=torch.bfloat16).refusal()
        assert Case().refusal() is None

    def test_another_cpu(self, monkeypatch, fresh_build):
        monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
        assert "AVX-512" in Case().refusal()

    def test_no_compiler(self, monkeypatch, fresh_build):
        def none():
            raise RuntimeError("nothing here")

        monkeypatch.setattr("torch._inductor.cpp_builder.get_cpp_compiler", none)
        assert "no C++ compiler was found (set CXX): nothing here" in Case().refusal()

    def test_a_compiler_that_fails(self, monkeypatch, fresh_build):
        monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(fresh_build))
        monkeypatch.setattr("torch._inductor.cpp_builder.get_cpp_compiler", lambda: "false")
        assert "false failed" in Case().refusal()
        assert not list(fresh_build.rglob("*.so"))

    def test_a_folder_that_can_not_be_written(self, monkeypatch, fresh_build):
        (fresh_build / "t5fx").write_text("in the way")
        monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(fresh_build))
        assert "can't be written or loaded" in Case().refusal()


@pytest.fixture
def fresh_build(tmp_path):
    cpu_build._outcome.cache_clear()
    yield tmp_path
    cpu_build._outcome.cache_clear()


def test_two_processes_build_at_once(tmp_path):
    code = "import torch\nfrom t5fx.kernels.cpu_build import library\nprint('built', bool(library().t5fx_forward))\n"
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-c", code]
    running = [subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    assert all("built True" in process.communicate()[0] for process in running)
    assert len(list(tmp_path.rglob("*.so"))) == 1
    assert [path.name for path in tmp_path.glob("t5fx/*") if path.suffix != ".so"] == []
