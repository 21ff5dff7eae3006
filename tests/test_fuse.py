"""Fusing: one operator a site in forward and backward, no copies on the way in, reasons where not."""

import pytest
import torch
from torch import nn
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch._inductor.utils import run_and_get_code
from zoo import build

import t5fx
from t5fx.config import TTTConfig
from t5fx.errors import ConfigError
from t5fx.kernels import dispatch
from t5fx.ops import ttt_attention
from t5fx.passes.fuse import fuse

ops = torch.ops.t5fx
FUSED = ["diffusers/DiT", "diffusers/SD3", "timm/vit_dinov2_reg4", "diffusers/Wan"]
VIEWS = {"view", "_unsafe_view", "permute", "transpose", "select", "slice", "expand", "squeeze", "unsqueeze",
         "split", "split_with_sizes", "unbind", "t", "alias", "reshape"}  # fmt: skip


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Keep(CustomGraphPass):
    """Keeps the graphs that Inductor is about to lower."""

    def __init__(self):
        self.graphs = []

    def __call__(self, graph):
        self.graphs.append([(n.target, source_kinds(n)) for n in graph.nodes if n.op == "call_function"])

    def uuid(self):
        return None  # not to be cached


def source_kinds(node):
    """For a fused node: the operators that made query, key and value, looking through views."""
    if node.target is not ops.ttt.default:
        return None
    kinds = []
    for x in node.args[:3]:
        while x.op == "call_function" and (str(x.target).split(".")[-2:][0] in VIEWS or "getitem" in str(x.target)):
            x = x.args[0]
        kinds.append(str(x.target))
    return kinds


def converted(name):
    model, args, kwargs = build(name)
    t5fx.linearize(model, t5fx.everything, example_inputs=(args, kwargs))
    return model, args, kwargs, sum(isinstance(m, t5fx.weights.TTTWeights) for m in model.modules())


@pytest.mark.parametrize("name", FUSED)
def test_one_node_a_site_each_way_and_no_copies(name):
    model, args, kwargs, sites = converted(name)
    keep = Keep()
    options = {"t5fx.kernel": "reference", "post_grad_custom_post_pass": keep}
    compiled = torch.compile(model, backend="t5", fullgraph=True, options=options)
    out = compiled(*args, **kwargs)
    out = out if isinstance(out, torch.Tensor) else out[0]
    out.float().square().sum().backward()
    forward, backward = keep.graphs

    def count(graph, target):
        return sum(found is target for found, _ in graph)

    assert sites
    assert (count(forward, ops.ttt.default), count(forward, ops.ttt_backward.default)) == (sites, 0)
    assert (count(backward, ops.ttt.default), count(backward, ops.ttt_backward.default)) == (0, sites)
    assert not any("inner_" in str(target) for target, _ in forward)
    for _, kinds in forward:
        assert not any("clone" in kind or "copy" in kind for kind in kinds or ())


def test_query_key_and_value_are_views_of_one_matmul():
    model, args, kwargs, sites = converted("timm/vit_dinov2_reg4")
    compiled = torch.compile(model, backend="t5", options={"t5fx.kernel": "reference", "fx_graph_cache": False})
    with torch.no_grad():
        _, [code] = run_and_get_code(compiled, *args, **kwargs)
    calls = [line for line in code.splitlines() if "torch.ops.t5fx.ttt.default(" in line]
    assert len(calls) == sites
    for call in calls:
        views = call.split("(", 1)[1].split("reinterpret_tensor(")[1:4]
        assert len({view.split(",")[0] for view in views}) == 1


@pytest.mark.parametrize("dynamic", [None, True])
def test_equals_eager_at_two_sizes(dynamic):
    model, args, kwargs = build("timm/vit_dynamic_size")
    t5fx.linearize(model, t5fx.everything, example_inputs=(args, kwargs))
    compiled = torch.compile(model, backend="t5", dynamic=dynamic, options={"t5fx.kernel": "reference"})
    for size in (args[0].shape[-1], args[0].shape[-1] * 2):
        x = torch.randn(2, 3, size, size)
        torch.testing.assert_close(compiled(x), model(x), rtol=1e-4, atol=1e-5)


class Block(nn.Module):
    """A site without a model around it."""

    def __init__(self, config, heads=2, dim=8):
        super().__init__()
        self.config, self.heads, self.dim = config, heads, dim
        inner = t5fx.inner.resolve(config.inner)
        weights = inner.init(heads, dim, dim, config.hidden(dim), std=0.3)
        if config.learn_inner_lr:
            weights["inner_lr"] = torch.full((heads,), 2.0)
        self.names = list(weights)
        for name, weight in weights.items():
            self.register_parameter(name, nn.Parameter(weight))
        self.conv = nn.ModuleDict({n: nn.Conv2d(heads * dim, heads * dim, 3, groups=heads * dim) for n in "qk"})

    def forward(self, query, key, value, mask=None, grid=(3, 4)):
        params = {name: getattr(self, name) for name in self.names}
        for name, conv in self.conv.items():
            params |= {f"dwc_{name}.weight": conv.weight, f"dwc_{name}.bias": conv.bias}
        return ttt_attention(query, key, value, params, self.config, grid=grid, mask=mask)


def qkv(dtype=torch.float32, dim=8):
    return [torch.randn(2, 2, 12, dim, dtype=dtype, requires_grad=True) for _ in range(3)]


def fused_names(block, *inputs, **kwargs):
    return [str(fusion) for fusion in t5fx.explain(block, ((*inputs,), kwargs), kernel="reference").sites]


CONFIGS = {
    "t5": TTTConfig(),
    "mlp-mse": TTTConfig(inner="mlp", loss="mse"),
    "no-norm": TTTConfig(key_norm=False),
    "no-dwc": TTTConfig(dwc=None),
    "learned-lr": TTTConfig(inner="mlp", loss="mse", learn_inner_lr=True, key_norm_eps=1e-5),
}


@pytest.mark.parametrize("masked", [False, True], ids=["", "masked"])
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_equals_the_operators(config, masked):
    block = Block(config)
    inputs = qkv()
    mask = torch.arange(12) < torch.tensor([[9], [12]]) if masked else None
    wanted = block(*inputs, mask)
    leaves = [*inputs, *(p for n, p in block.named_parameters() if config.dwc or "conv" not in n)]
    wanted_grads = torch.autograd.grad(wanted.square().sum(), leaves)
    compiled = torch.compile(block, backend="t5", fullgraph=True, options={"t5fx.kernel": "reference"})
    found = compiled(*inputs, mask)
    found_grads = torch.autograd.grad(found.square().sum(), leaves)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
    for a, b in zip(found_grads, wanted_grads, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4 * float(b.abs().max()))


def test_autocast_and_mixed_dtypes():
    block = Block(TTTConfig())
    query, key, value = qkv()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        wanted = block(query, key, value.bfloat16())
        compiled = torch.compile(block, backend="t5", fullgraph=True, options={"t5fx.kernel": "reference"})
        found = compiled(query, key, value.bfloat16())
    assert found.dtype == wanted.dtype == torch.bfloat16
    torch.testing.assert_close(found, wanted, rtol=2e-2, atol=2e-2)


class TwoMasks(Block):
    def forward(self, query, key, value, mask, other):
        key = ops.key_norm(key, 1.0, mask)
        weights = [self.w1, self.w2, self.w3]
        fast = ops.inner_step(key, value, weights, "swiglu", "dot", 1.0, 1.0, other)
        return ops.inner_apply(query, fast, "swiglu")


class SwappedWeights(Block):
    def forward(self, query, key, value):
        weights = [self.w1, self.w2, self.w3]
        fast = ops.inner_step(key, value, weights, "swiglu", "dot", 1.0, 1.0)
        return ops.inner_apply(query, [fast[1], fast[0], fast[2]], "swiglu")


class TwoGrids(Block):
    def forward(self, query, key, value):
        conv = self.conv["q"]
        query = ops.dwc(query, conv.weight, conv.bias, 0, (3, 4))
        key = ops.dwc(key, conv.weight, conv.bias, 0, (4, 3))
        weights = [self.w1, self.w2, self.w3]
        fast = ops.inner_step(key, value, weights, "swiglu", "dot", 1.0, 1.0)
        return ops.inner_apply(query, fast, "swiglu")


class Twice(Block):
    """Normed keys that are needed beside the site."""

    def forward(self, query, key, value):
        normed = ops.key_norm(key, 1.0)
        weights = [self.w1, self.w2, self.w3]
        fast = ops.inner_step(normed, value, weights, "swiglu", "dot", 1.0, 1.0)
        return ops.inner_apply(query, fast, "swiglu") + normed + fast[0].sum()


MASKS = [torch.ones(2, 12, dtype=torch.bool), torch.arange(12).expand(2, 12) < 5]


@pytest.mark.parametrize(
    ("kind", "extra", "reason"),
    [(TwoMasks, MASKS, "the same mask"), (SwappedWeights, [], "one inner step"), (TwoGrids, [], "the same grid")],
)
def test_what_does_not_belong_together_is_left_alone(kind, extra, reason):
    block, inputs = kind(TTTConfig()), [*qkv(), *extra]
    [fusion] = t5fx.explain(block, tuple(inputs), kernel="reference").sites
    assert fusion.choice.kernel is None
    assert reason in str(fusion)
    compiled = torch.compile(block, backend="t5", options={"t5fx.kernel": "reference"})
    torch.testing.assert_close(compiled(*inputs), block(*inputs), rtol=1e-4, atol=1e-5)


def test_what_others_need_stays():
    block, inputs = Twice(TTTConfig()), qkv()
    assert t5fx.explain(block, tuple(inputs), kernel="reference").sites[0].choice.kernel == "reference"
    compiled = torch.compile(block, backend="t5", options={"t5fx.kernel": "reference"})
    torch.testing.assert_close(compiled(*inputs), block(*inputs), rtol=1e-4, atol=1e-5)


def test_a_custom_inner_model_is_left_to_inductor():
    class Plain:
        def init(self, heads, head_dim, value_dim, hidden, *, std, device=None, dtype=None, generator=None):
            return {"w": torch.randn(heads, head_dim, value_dim, device=device, dtype=dtype, generator=generator)}

        def apply(self, weights, x):
            return torch.tanh(x @ weights["w"])

    block = Block(TTTConfig(inner=Plain()))
    [fusion] = t5fx.explain(block, tuple(qkv())).sites
    assert "no kernel computes the custom inner model" in str(fusion)


def test_explain_names_modules_and_reads_well():
    model, args, kwargs, sites = converted("timm/vit_dinov2_reg4")
    explanation = t5fx.explain(model, (args, kwargs), kernel="reference")
    assert [fusion.site for fusion in explanation.sites] == [f"blocks.{i}.attn" for i in range(sites)]
    assert str(explanation).splitlines()[0] == "blocks.0.attn  fused into the reference kernel"
    assert str(explanation).endswith(f"{sites} sites in one graph")
    assert "no converted site" in str(t5fx.explain(nn.Linear(2, 2), torch.randn(1, 2)))


def test_a_switch_turns_it_off(monkeypatch):
    monkeypatch.setenv(dispatch.SWITCH, "none")
    [fusion] = t5fx.explain(Block(TTTConfig()), tuple(qkv())).sites
    assert fusion.choice.kernel is None


def test_options_that_do_not_exist():
    block, inputs = Block(TTTConfig()), qkv()
    with pytest.raises(Exception, match=r"no option t5fx\.kernle") as error:
        torch.compile(block, backend="t5", options={"t5fx.kernle": "cpu"})(*inputs)
    assert isinstance(error.value.__cause__, ConfigError) or "ConfigError" in str(error.value)
    torch._dynamo.reset()
    with pytest.raises(Exception, match="no kernel is called 'fats'"):
        torch.compile(block, backend="t5", options={"t5fx.kernel": "fats"})(*inputs)


def test_aot_graphs_fuse_too():
    """Values may be under "val", as in exported programs."""
    block = Block(TTTConfig(dwc=None)).eval()
    program = torch.export.export(block, tuple(x.detach() for x in qkv()))
    [fusion] = fuse(program.graph_module, kernel="reference")
    assert fusion.choice.kernel == "reference"
    program.graph_module.graph.lint()
