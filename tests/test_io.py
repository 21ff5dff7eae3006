"""save and load: a folder of safetensors and JSON, and a recipe that does not fit changes nothing."""

import copy
import json
import pickletools

import pytest
import torch
import torch._dynamo.testing
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import fx, nn
from toys import ViT, assert_same_state, images, louder, state, vit
from zoo import build

import t5fx
from t5fx.errors import RecipeError, T5fxError
from t5fx.io import RECIPE, WEIGHTS


def first_tensor(output):
    if isinstance(output, torch.Tensor):
        return output
    return output[0] if isinstance(output, tuple) else output.last_hidden_state


def run(model, args, kwargs):
    with torch.no_grad():
        return first_tensor(model(*args, **kwargs))


def fine_tune(model, args, kwargs):
    """Two steps that move every parameter."""
    optimizer = torch.optim.AdamW(t5fx.param_groups(model, 1e-3))
    for _ in range(2):
        optimizer.zero_grad()
        first_tensor(model(*args, **kwargs)).square().mean().backward()
        optimizer.step()
    return model


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A fine-tuned toy in a folder, and what it answers; tests that tamper work on a copy."""
    torch.manual_seed(1)
    folder = tmp_path_factory.mktemp("saved")
    model = vit(depth=3)
    t5fx.linearize(model, t5fx.last(2), example_inputs=images())
    fine_tune(model, (images(),), {})
    x = images()
    t5fx.save(model, folder)
    return folder, x, run(model, (x,), {})


def copied(folder, to):
    to.mkdir()
    for file in folder.iterdir():
        (to / file.name).write_bytes(file.read_bytes())
    return to


def tamper(folder, change):
    recipe = json.loads((folder / RECIPE).read_text())
    change(recipe)
    (folder / RECIPE).write_text(json.dumps(recipe))
    return folder


# ---- there and back ---------------------------------------------------------------------------------------------


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
    for training in (False, True):
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


# ---- recipes that do not fit ------------------------------------------------------------------------------------


class Other(ViT):
    pass


def renamed():
    model = vit(depth=3)
    model.tail = model._modules.pop("head")
    return model


def extra():
    model = vit(depth=3)
    model.more = nn.Linear(2, 2)
    return model


class Swapped(type(vit().blocks[0].attn)):
    """Has the same parameters as the attention that was converted."""


def swapped():
    model = vit(depth=3)
    model.blocks[2].attn = Swapped().double()
    return model


MODELS = {
    "another class": (lambda: Other(depth=3), r"ViT.*Other"),
    "fewer blocks": (lambda: vit(depth=2), r"'blocks\.2\.norm\.weight'.*none of that name"),
    "more blocks": (lambda: vit(depth=4), r"'blocks\.3\.norm\.weight'.*has not"),
    "another width": (lambda: vit(depth=3, dim=32), r"'cls' is \[1, 1, 32\].*\[1, 1, 16\]"),
    "a renamed module": (renamed, r"'head\.weight'"),
    "one tensor more": (extra, r"'more\.weight'"),
    "another owner": (swapped, r"'blocks\.2\.attn' is a .*Swapped.*Attention"),
    "on the meta device": (lambda: vit(depth=3).to("meta"), r"'cls' is on the meta device.*to_empty"),
    "linearized": (
        lambda: t5fx.linearize(vit(depth=3), example_inputs=images()), r"linearized already.*revert",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", MODELS)
def test_a_model_that_does_not_fit_is_refused_and_left_as_it_was(case, saved):
    make, message = MODELS[case]
    model = make()
    before = state(model)
    with pytest.raises(RecipeError, match=message):
        t5fx.load(model, saved[0])
    assert_same_state(before, state(model), but=("rng",))


def site(recipe, owner=1):
    return recipe["owners"][owner]["sites"][0]


def inside(path, value):
    """A change of the recipe: set what the path leads to."""

    def change(recipe):
        *way, last = path
        for step in way:
            recipe = recipe[step]
        recipe[last] = value

    return change


def without(*path):
    def change(recipe):
        *way, last = path
        for step in way:
            recipe = recipe[step]
        del recipe[last]

    return change


RECIPES = {
    "another format": (inside(["format"], "x"), "not a recipe"),
    "a newer version": (inside(["version"], 2), r"version 2.*reads version 1.*update"),
    "no owners": (without("owners"), "lacks 'owners'"),
    "an unknown owner": (inside(["owners", 1, "name"], "blocks.9.attn"), r"owner 'blocks\.9\.attn'"),
    "an owner that is no attention": (inside(["owners", 1, "name"], "blocks.2.norm"), r"'blocks\.2\.norm' is a"),
    "another owner class": (inside(["owners", 1, "class"], "os.system"), r"'blocks\.2\.attn' is a .*os\.system"),
    "an unknown grid source": (inside(["sources", 0, "module"], "stem"), r"grid source 'stem'"),
    "a config field": (inside(["config", "warp"], 1), "warp"),
    "a config value": (inside(["config", "dwc"], 4), "dwc"),
    "another config": (inside(["config", "inner"], "mlp"), r"w2.*\[2, 8, 8\]|w3"),
    "a wider inner model": (inside(["config", "hidden_ratio"], 2.0), r"ttt\.w1' is \[2, 8, 8\].*\[2, 8, 16\]"),
    "other heads": (inside(["owners", 1, "sites", 0, "heads"], 4), r"blocks\.2\.attn\.ttt\.w1"),
    "a taken name": (inside(["owners", 1, "sites", 0, "ttt"], "qkv"), "qkv"),
    "a name with a dot": (inside(["owners", 1, "sites", 0, "ttt"], "a.b"), "a.b"),
    "no index": (without("owners", 1, "sites", 0, "index"), "index"),
    "an index too far": (inside(["owners", 1, "sites", 0, "index"], 3), "recipe"),
    "more attention calls": (inside(["owners", 1, "attention_calls"], 2), r"blocks\.2\.attn.*attention"),
    "an unknown dtype": (inside(["owners", 1, "calls", 0, "call"], {"tensor": [1], "strides": [1], "dtype": "f"}), "f"),
    "a call of another kind": (inside(["owners", 1, "calls", 0, "call"], {"object": ["os"]}), "object"),
    "owners as a number": (inside(["owners"], 3), "recipe"),
    "a report of nothing": (inside(["report"], [{}]), "recipe"),
    "a base tensor": (inside(["base", "tensors", "cls"], [1, 1, 8]), r"'cls'.*\[1, 1, 8\]"),
    "no base class": (without("base", "class"), "class"),
}  # fmt: skip


@pytest.mark.parametrize("case", RECIPES)
def test_a_recipe_that_was_changed_is_refused_and_the_model_left_as_it_was(case, saved, tmp_path):
    change, message = RECIPES[case]
    folder = tamper(copied(saved[0], tmp_path / "copy"), change)
    model = vit(depth=3)
    x = images()
    expected = model(x)
    before = state(model)
    with pytest.raises(RecipeError, match=message):
        t5fx.load(model, folder)
    assert_same_state(before, state(model), but=("rng",))
    assert torch.equal(model(x), expected)


def rewrite_tensors(folder, change):
    tensors = load_file(folder / WEIGHTS)
    change(tensors)
    save_file(tensors, folder / WEIGHTS)


FILES = {
    "no recipe": (lambda f: (f / RECIPE).unlink(), r"t5fx\.json"),
    "broken JSON": (lambda f: (f / RECIPE).write_text('{"format": "t5fx", '), "not JSON"),
    "binary": (lambda f: (f / RECIPE).write_bytes(b"\x80\x04\xff"), "not JSON"),
    "a list": (lambda f: (f / RECIPE).write_text("[]"), "not a recipe"),
    "no weights": (lambda f: (f / WEIGHTS).unlink(), r"model\.safetensors"),
    "cut weights": (lambda f: (f / WEIGHTS).write_bytes((f / WEIGHTS).read_bytes()[:-100]), "damaged"),
    "a tensor missing": (
        lambda f: rewrite_tensors(f, lambda t: t.pop("blocks.1.attn.ttt.w2")), r"no tensor 'blocks\.1\.attn\.ttt\.w2'",
    ),
    "a tensor too many": (
        lambda f: rewrite_tensors(f, lambda t: t.update(more=torch.zeros(1))), r"'more'",
    ),
    "another shape": (
        lambda f: rewrite_tensors(f, lambda t: t.update(cls=torch.zeros(1, 2))), r"'cls' is \[1, 2\].*\[1, 1, 16\]",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", FILES)
def test_a_folder_that_is_not_whole_is_refused_and_the_model_left_as_it_was(case, saved, tmp_path):
    damage, message = FILES[case]
    folder = copied(saved[0], tmp_path / "copy")
    damage(folder)
    model = vit(depth=3)
    before = state(model)
    with pytest.raises(RecipeError, match=message):
        t5fx.load(model, folder)
    assert_same_state(before, state(model), but=("rng",))


def test_a_model_that_runs_another_attention_is_refused(tmp_path):
    """The class fits, but this instance makes no attention call that could be replaced."""
    model, args, kwargs = build("timm/vit_tiny")
    t5fx.linearize(model, t5fx.everything, example_inputs=(args, kwargs))
    t5fx.save(model, tmp_path)
    fresh, _, _ = build("timm/vit_tiny")
    fresh.blocks[1].attn.fused_attn = False
    before = state(fresh)
    with pytest.raises(RecipeError, match=r"blocks\.1\.attn.*0"):
        t5fx.load(fresh, tmp_path)
    assert_same_state(before, state(fresh), but=("rng",))


def test_a_copy_of_a_loaded_model_is_its_own(saved):
    folder, x, expected = saved
    model = t5fx.load(vit(depth=3), folder)
    twin = copy.deepcopy(model)
    t5fx.revert(model)
    assert torch.equal(run(twin, (x,), {}), expected)
