"""load refuses what does not fit, naming the first difference, and leaves the model as it was."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from toys import Attention, ViT, assert_same_state, images, save_a_toy, state, vit

import t5fx
from t5fx.errors import RecipeError
from t5fx.io import RECIPE, WEIGHTS


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A fine-tuned toy in a folder, an image, and what the toy answers to it."""
    return save_a_toy(tmp_path_factory.mktemp("saved"))


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


class Skips(Attention):
    """May leave the attention call out."""

    skip = False

    def forward(self, x, mask=None):
        return self.out(self.heads_of(x)[2]) if self.skip else super().forward(x, mask)


def skipping(skip):
    model = vit()
    model.blocks[1].attn = Skips().double()
    model.blocks[1].attn.skip = skip
    return model


def test_a_model_whose_owner_makes_no_attention_call_is_refused(tmp_path):
    """Class and tensors fit, but this instance's forward takes another way."""
    t5fx.save(t5fx.linearize(skipping(False), example_inputs=images()), tmp_path)
    fresh = skipping(True)
    before = state(fresh)
    with pytest.raises(RecipeError, match=r"blocks\.1\.attn.*makes 0"):
        t5fx.load(fresh, tmp_path)
    assert_same_state(before, state(fresh), but=("rng",))
