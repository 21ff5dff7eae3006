"""save and load: a folder of safetensors and JSON, there and back."""

import copy
import json
import pickletools

import pytest
import torch
import torch._dynamo.testing
from safetensors import safe_open
from safetensors.torch import load_file
from torch import fx, nn
from toys import assert_same_state, fine_tune, images, louder, run, save_a_toy, state, vit
from zoo import build

import t5fx
from t5fx.errors import RecipeError, T5fxError
from t5fx.io import RECIPE, WEIGHTS


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A fine-tuned toy in a folder, an image, and what the toy answers to it."""
    return save_a_toy(tmp_path_factory.mktemp("saved"))


@pytest.mark.parametrize("name", ["timm/vit_tiny", "diffusers/SD3_dual", "transformers/ViT"])
def test_round_trip_into_a_fresh_base_model(name, tmp_path):
    model, args, kwargs = build(name)
    base = {k: v.clone() for k, v in model.state_dict().items()}
    t5fx.linearize(model, t5fx.everything, example_inputs=(args, kwargs), config=t5fx.DIT5_TTT)
    fine_tune(model, args, kwargs)
    expected = run(model, args, kwargs)
    assert t5fx.save(model, tmp_path / "made" / "here") == tmp_path / "made" / "here"

    fresh, _, _ = build(name, seed=7)
    assert any(not torch.equal(v, base[k]) for k, v in fresh.state_dict().items())
    assert t5fx.load(fresh, tmp_path / "made" / "here") is fresh
    assert torch.equal(run(fresh, args, kwargs), expected)
    tensors, original = fresh.state_dict(), model.state_dict()
    assert tensors.keys() == original.keys()
    assert all(torch.equal(tensors[k], original[k]) for k in tensors)
    moved = [k for k in base if not torch.equal(tensors[k], base[k])]
    assert len(moved) > len(base) / 2  # inherited weights were fine-tuned, and travel too
    assert t5fx.report(fresh).to_dict() == t5fx.report(model).to_dict()
    assert t5fx.report(fresh).sites == t5fx.report(model).sites
    assert [type(m) for m in fresh.modules()] == [type(m) for m in model.modules()]


def test_a_learned_rate_travels_and_a_recipe_from_before_it_loads(tmp_path):
    config = t5fx.T5.replace(inner_lr=4.0, learn_inner_lr=True)
    model = t5fx.linearize(vit(), t5fx.everything, config=config, example_inputs=images())
    weights = model.blocks[0].attn.ttt
    assert weights.inner_lr.tolist() == [4.0, 4.0]
    fine_tune(model, (images(),), {})
    assert weights.inner_lr.dtype == torch.float64
    assert (weights.inner_lr != 4).all()
    x = images()
    expected = run(model, (x,), {})
    assert torch.equal(run(copy.deepcopy(model), (x,), {}), expected)
    fresh = t5fx.load(vit(), t5fx.save(model, tmp_path))
    assert torch.equal(run(fresh, (x,), {}), expected)
    assert t5fx.report(fresh).config == config
    softmax = {k for k in model.state_dict() if ".ttt" not in k}
    assert set(t5fx.revert(model).state_dict()) == softmax

    plain = t5fx.linearize(vit(), t5fx.everything, example_inputs=images())
    folder = t5fx.save(plain, tmp_path / "before")
    recipe = json.loads((folder / RECIPE).read_text())
    del recipe["config"]["learn_inner_lr"]
    (folder / RECIPE).write_text(json.dumps(recipe))
    assert torch.equal(run(t5fx.load(vit(), folder), (x,), {}), run(plain, (x,), {}))


def test_a_loaded_model_trains_follows_new_grids_and_is_saved_again(saved, tmp_path):
    folder, x, _ = saved
    model = t5fx.load(vit(depth=3), folder)
    fine_tune(model, (images(12, 8),), {})
    with pytest.raises(t5fx.LayoutError, match=r"blocks\.\d\.attn"):
        model.blocks[1](torch.randn(2, 12, 16, dtype=torch.float64))  # past the model's forward
    t5fx.save(model, tmp_path)
    again = t5fx.load(vit(depth=3), tmp_path)
    for image in (x, images(8, 8)):
        assert torch.equal(run(again, (image,), {}), run(model, (image,), {}))


def test_revert_after_load_leaves_the_base_model_with_the_loaded_weights(saved):
    folder, x, expected = saved
    model = vit(depth=3)
    before = state(model)
    t5fx.load(model, folder)
    t5fx.revert(model)
    after = state(model)
    for part in ("classes", "hooks", "attributes", "keys"):
        assert after[part] == before[part]
    stored = load_file(folder / WEIGHTS)
    assert all(torch.equal(v, stored[k]) for k, v in model.state_dict().items())
    t5fx.load(model, folder)
    assert torch.equal(run(model, (x,), {}), expected)


@pytest.mark.parametrize("name", ["timm/vit_tiny", "diffusers/SD3_dual", "transformers/ViT"])
def test_a_loaded_model_compiles_at_once(name, tmp_path):
    """No eager call first, one graph, in eval and in train mode: the calls' shapes come with the recipe."""
    model, args, kwargs = build(name)
    t5fx.linearize(model, t5fx.everything, example_inputs=(args, kwargs))
    t5fx.save(model, tmp_path)
    fresh = t5fx.load(build(name, seed=7)[0], tmp_path)
    for training in (False, True) if name == "timm/vit_tiny" else (False,):
        torch._dynamo.reset()
        counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
        compiled = torch.compile(fresh.train(training), backend=counter, fullgraph=True)
        output = run(compiled, args, kwargs)
        assert counter.frame_count == 1
        steps = [n for n in counter.graphs[0].graph.nodes if n.target is torch.ops.t5fx.inner_step.default]
        assert len(steps) == len(t5fx.report(model).selected)
        torch.testing.assert_close(output, run(model.train(training), args, kwargs))
    assert all(len(e) == 1 for m in fresh.modules() for e in getattr(m, "_t5fx_owner", _Empty).entries.values())


class _Empty:
    entries: dict = {}  # noqa: RUF012


def test_loading_takes_the_dtype_of_the_model_it_loads_into(saved):
    folder, x, expected = saved
    model = t5fx.load(vit(depth=3).bfloat16(), folder)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    output = run(model, (x.bfloat16(),), {})
    assert output.dtype == torch.bfloat16
    torch.testing.assert_close(output.double(), expected, rtol=0.1, atol=0.1)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(run(compiled, (x.bfloat16(),), {}), output)


class Bare(nn.Module):
    """An owner without parameters of its own."""

    def forward(self, query, key, value):
        return torch.nn.functional.scaled_dot_product_attention(query, key, value)


class WithBare(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.attend = nn.Linear(16, 48), Bare()

    def forward(self, x):
        return self.attend(*self.qkv(x).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4))


class Plain(nn.Module):
    """What ``symbolic_trace`` can trace."""

    def forward(self, x):
        return torch.nn.functional.scaled_dot_product_attention(x, x, x)


def test_an_owner_without_parameters_gets_the_models_dtype(tmp_path):
    x = torch.randn(2, 9, 16, dtype=torch.float64)
    model = t5fx.linearize(WithBare().double(), t5fx.everything, example_inputs=x)
    t5fx.save(model, tmp_path)
    fresh = t5fx.load(WithBare().double(), tmp_path)
    assert {p.dtype for p in fresh.parameters()} == {torch.float64}
    assert torch.equal(fresh(x), model(x))


def test_tied_weights_are_stored_once_and_stay_tied(tmp_path):
    def tied():
        model = vit()
        model.blocks[1].mlp.weight = model.blocks[0].mlp.weight
        return model

    model = tied()
    t5fx.linearize(model, t5fx.everything, example_inputs=images())
    fine_tune(model, (images(),), {})
    t5fx.save(model, tmp_path)
    with safe_open(tmp_path / WEIGHTS, "pt") as file:
        assert set(model.state_dict()) - set(file.keys()) == {"blocks.1.mlp.weight"}
    x = images()
    fresh = t5fx.load(tied(), tmp_path)
    assert fresh.blocks[1].mlp.weight is fresh.blocks[0].mlp.weight
    loose = t5fx.load(vit(), tmp_path)  # a model that does not tie them gets both
    assert torch.equal(run(fresh, (x,), {}), run(model, (x,), {}))
    assert torch.equal(run(loose, (x,), {}), run(model, (x,), {}))


class Cubic:
    """A user's inner model."""

    def init(self, heads, head_dim, value_dim, hidden, *, std, device=None, dtype=None, generator=None):
        weight = torch.empty(heads, head_dim, value_dim, device=device, dtype=dtype)
        return {"m": nn.init.trunc_normal_(weight, std=std, generator=generator)}

    def apply(self, weights, x):
        return (x @ weights["m"]) ** 3


class Quartic(Cubic):
    pass


def test_a_custom_inner_model_must_be_handed_in(tmp_path):
    x = images()
    model = vit()
    t5fx.linearize(model, t5fx.everything, config=t5fx.TTTConfig(inner=Cubic()), example_inputs=x)
    louder(model)
    t5fx.save(model, tmp_path)
    fresh = vit()
    before = state(fresh)
    for inner, message in ((None, r"Cubic.*inner="), (Quartic(), r"Cubic.*Quartic")):
        with pytest.raises(RecipeError, match=message):
            t5fx.load(fresh, tmp_path, inner=inner)
        assert_same_state(before, state(fresh))
    t5fx.load(fresh, tmp_path, inner=Cubic())
    assert torch.equal(run(fresh, (x,), {}), run(model, (x,), {}))


def test_a_folder_holds_json_and_safetensors_and_no_pickle(saved):
    folder, _, _ = saved
    assert sorted(f.name for f in folder.iterdir()) == [WEIGHTS, RECIPE]
    recipe = json.loads((folder / RECIPE).read_text())
    assert (recipe["format"], recipe["version"]) == ("t5fx", 1)
    for file in folder.iterdir():
        content = file.read_bytes()
        assert b"torch_utils" not in content
        with pytest.raises(ValueError, match=r"opcode|pickle|exhausted"):
            list(pickletools.genops(content))
    assert set(load_file(folder / WEIGHTS)) == set(t5fx.load(vit(depth=3), folder).state_dict())


def test_a_model_that_cant_be_saved_says_why(tmp_path):
    with pytest.raises(T5fxError, match="not linearized"):
        t5fx.save(vit(), tmp_path)
    x = torch.randn(2, 2, 9, 16)
    graph = fx.symbolic_trace(Plain())
    t5fx.linearize(graph, t5fx.everything, example_inputs=x)
    with pytest.raises(T5fxError, match="GraphModule"):
        t5fx.save(graph, tmp_path / "graph")
    with pytest.raises(T5fxError, match="meta device"):
        t5fx.save(t5fx.linearize(vit(), example_inputs=images()).to("meta"), tmp_path / "meta")
    assert not list(tmp_path.iterdir())


def test_a_copy_of_a_loaded_model_is_its_own(saved):
    folder, x, expected = saved
    model = t5fx.load(vit(depth=3), folder)
    twin = copy.deepcopy(model)
    t5fx.revert(model)
    assert torch.equal(run(twin, (x,), {}), expected)
