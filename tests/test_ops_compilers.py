"""The four operators under Dynamo, export, meta tensors and dispatch modes."""

import pytest
import torch
import torch._dynamo.testing
from ops_cases import GATED, B, D, H, a_mask, each_site, make_params, randn
from torch import nn

from t5fx.config import TTTConfig
from t5fx.errors import CaptureError
from t5fx.ops import ttt_attention

op = torch.ops.t5fx


def captured(function, *arguments, **options):
    """The targets of the call_function nodes that Dynamo hands to a backend, in one graph."""
    graphs = []

    def backend(module, _):
        graphs.append([n.target for n in module.graph.nodes if n.op == "call_function"])
        return module.forward

    torch._dynamo.reset()
    torch.compile(function, fullgraph=True, backend=backend, **options)(*arguments)
    (graph,) = graphs
    return graph


@each_site
def test_dynamo_sees_one_node_for_each_operator(inner, loss):
    config = TTTConfig(inner=inner, loss=loss)
    params, qkv = make_params(config), randn(3, B, H, 12, D)
    graph = captured(lambda q, k, v: ttt_attention(q, k, v, params, config, grid=(3, 4)), *qkv)
    ours = [target for target in graph if "t5fx" in str(target)]
    assert ours == [
        op.key_norm.default, op.dwc.default, op.dwc.default, op.inner_step.default, op.inner_apply.default
    ]  # fmt: skip
    assert all(target.__name__ == "getitem" for target in graph if target not in ours)


@each_site
def test_compiled_equals_eager_with_gradients(inner, loss):
    """aot_eager knows no operator of ours: they dissolve into aten."""
    config = TTTConfig(inner=inner, loss=loss)
    params, mask = make_params(config), a_mask(9, 12, tokens=12)

    def site(qkv):
        return ttt_attention(*qkv.unbind(0), params, config, grid=(3, 4), mask=mask)

    torch._dynamo.reset()
    compiled = torch.compile(site, fullgraph=True, backend="aot_eager")
    qkv = randn(3, B, H, 12, D).requires_grad_()
    results = []
    for run in (site, compiled):
        output = run(qkv)
        results.append((output, *torch.autograd.grad(output.square().sum(), [qkv, *params.values()])))
    for eager, traced in zip(*results, strict=True):
        torch.testing.assert_close(traced, eager, rtol=0, atol=1e-11)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert compiled(qkv.float()).dtype == torch.bfloat16
    with torch.inference_mode():
        torch.testing.assert_close(compiled(qkv.detach()), results[0][0].detach(), rtol=0, atol=1e-11)


@pytest.mark.parametrize("config", [TTTConfig(), TTTConfig(inner=GATED, dwc=None)], ids=["t5", "custom"])
@torch._dynamo.config.patch(specialize_float=True)  # else the config's floats make the compiler start twice
def test_one_dynamic_graph_serves_other_batches_and_grids(config):
    params = make_params(config)

    def site(qkv, image):
        query, key, value = qkv.unbind(0)
        return ttt_attention(query, key, value, params, config, prefix=1, grid=image.shape)

    # Dynamo takes sizes that are equal at first for equal for ever: 6, 5, 7 meet no other size here.
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(site, fullgraph=True, backend=counter, dynamic=True)
    for batch, height, width in ((6, 5, 7), (3, 6, 4), (5, 7, 8)):
        qkv, image = randn(3, batch, H, 1 + height * width, D), torch.empty(height, width)
        torch.testing.assert_close(compiled(qkv, image), site(qkv, image), rtol=0, atol=1e-12)
    assert counter.frame_count == 1


class Site(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = config
        for name, param in make_params(config, dtype=torch.float32).items():
            self.register_parameter(name.replace(".", "_"), nn.Parameter(param.detach()))

    def forward(self, qkv):
        params = {n.replace("_weight", ".weight").replace("_bias", ".bias"): p for n, p in self.named_parameters()}
        query, key, value = qkv.unbind(0)
        return ttt_attention(query, key, value, params, self.config, grid=(query.shape[2] // 4, 4))


@pytest.mark.parametrize("inner", ["swiglu", "mlp", GATED], ids=["swiglu", "mlp", "custom"])
def test_export(inner):
    site = Site(TTTConfig(inner=inner, loss="mse"))
    batch, rows = torch.export.Dim("batch"), torch.export.Dim("rows", min=2)
    exported = torch.export.export(
        site, (randn(3, 2, H, 12, D, dtype=torch.float32),), dynamic_shapes={"qkv": {1: batch, 3: 4 * rows}}
    )
    assert sum("t5fx" in str(node.target) for node in exported.graph.nodes) == 5
    other = randn(3, 3, H, 20, D, dtype=torch.float32)
    torch.testing.assert_close(exported.module()(other), site(other))
    if inner is GATED:  # torch.func does not work where run_decompositions takes an operator apart
        with pytest.raises(CaptureError, match=r"Gated.*torch\.func"):
            exported.run_decompositions()
        return
    dissolved = exported.run_decompositions()
    assert not any("t5fx" in str(node.target) for node in dissolved.graph.nodes)
    torch.testing.assert_close(dissolved.module()(other), site(other))


@each_site
def test_meta_tensors_have_the_shapes_and_dtypes_of_real_ones(inner, loss):
    config = TTTConfig(inner=inner, loss=loss)
    params, qkv = make_params(config, dtype=torch.bfloat16), randn(3, B, H, 13, D, dtype=torch.bfloat16)
    real = ttt_attention(*qkv, params, config, prefix=1, grid=(3, 4))
    meta = ttt_attention(*qkv.to("meta"), {n: p.to("meta") for n, p in params.items()}, config, prefix=1, grid=(3, 4))
    assert (meta.shape, meta.dtype, meta.device.type) == (real.shape, real.dtype, "meta")


def test_a_custom_model_under_a_dispatch_mode_in_inference_mode_is_refused_not_wrong():
    from torch.utils.flop_counter import FlopCounterMode

    config = TTTConfig(inner=GATED, dwc=None)
    params, qkv = make_params(config), randn(3, B, H, 12, D)
    with torch.inference_mode(), FlopCounterMode(display=False), pytest.raises(CaptureError, match="no_grad"):
        ttt_attention(*qkv, params, config)
