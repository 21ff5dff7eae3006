"""Selectors: which sites they choose, how they combine, and errors that list the sites there are."""

import re

import pytest
import torch
from toys import images, vit
from zoo import build

import t5fx
from t5fx.blocks import assign_blocks
from t5fx.errors import SelectionError
from t5fx.select import choose, list_sites
from t5fx.site import Refusal, Site


def site(name, *, keys=64, refusal=None, block="", index=0, blocks=6, softmax=10, ttt=5):
    return Site(
        name=name, owner=name.split(":")[0], index=0, form="sdpa", kind="self", batch=1, heads=2, queries=keys,
        keys=keys, head_dim=8, value_dim=8, block=block, block_index=index, blocks=blocks, softmax_flops=softmax,
        ttt_flops=ttt, refusal=refusal,
    )  # fmt: skip


def row(count, **options):
    return [site(f"blocks.{i}.attn", block=f"blocks.{i}", index=i, blocks=count, **options) for i in range(count)]


def indices(sites, select):
    return [s.block_index for s in choose(sites, select)]


NO = Refusal("causal", "causal attention")


@pytest.mark.parametrize(
    ("select", "expected"),
    [
        (t5fx.everything, [0, 1, 2, 3, 4, 5, 6]),
        (t5fx.every_other, [1, 3, 5]),
        (t5fx.every(3), [0, 3, 6]),
        (t5fx.every(2, start=3), [3, 5]),
        (t5fx.first(2), [0, 1]),
        (t5fx.first(99), [0, 1, 2, 3, 4, 5, 6]),
        (t5fx.last(2), [5, 6]),
        (t5fx.last(99), [0, 1, 2, 3, 4, 5, 6]),
        (t5fx.names("blocks.2.*", "blocks.4*"), [2, 4]),
        (t5fx.names("*[35].attn"), [3, 5]),
        (t5fx.names(re.compile(r"\.[06]\.")), [0, 6]),
        (t5fx.names("blocks.1"), [1]),  # the block's name does too
        ("blocks.3.*", [3]),  # a string is a glob
        (lambda s: s.block_index > 4, [5, 6]),
    ],
    ids=lambda value: "lambda" if type(value).__name__ == "function" else str(value),
)
def test_what_a_selector_chooses(select, expected):
    assert indices(row(7), select) == expected


def test_fraction_spreads_evenly():
    for count in (2, 6, 12, 24):
        assert indices(row(count), t5fx.fraction(0.5)) == indices(row(count), t5fx.every_other)
    assert indices(row(7), t5fx.fraction(1)) == list(range(7))
    assert indices(row(12), t5fx.fraction(0.25)) == [3, 7, 11]
    for count in range(2, 30):
        for share in (0.2, 0.3, 0.75):
            if not (expected := round(share * count)):
                continue
            chosen = indices(row(count), t5fx.fraction(share))
            assert len(chosen) == expected
            gaps = [b - a for a, b in zip([-1, *chosen], chosen, strict=False)]
            assert max(gaps) - min(gaps) <= 1
            assert chosen[-1] == count - 1


def test_min_tokens_and_cheaper_look_at_the_example():
    sites = [site("a", keys=64), site("b", keys=256), site("c", keys=257, softmax=5, ttt=5)]
    assert [s.name for s in choose(sites, t5fx.min_tokens(256))] == ["b", "c"]
    assert [s.name for s in choose(sites, t5fx.cheaper)] == ["a", "b"]


def test_and_or_not():
    sites = row(8)
    early, odd = t5fx.first(4), t5fx.every_other
    assert indices(sites, early & odd) == [1, 3]
    assert indices(sites, early | odd) == [0, 1, 2, 3, 5, 7]
    assert indices(sites, ~early & ~odd) == [4, 6]
    assert indices(sites, ~(early | odd)) == [4, 6]
    last_two = lambda s: s.block_index >= 6  # noqa: E731
    assert indices(sites, odd | last_two) == indices(sites, last_two | odd) == [1, 3, 5, 6, 7]
    assert indices(sites, last_two & odd) == [7]
    assert indices(sites, ~t5fx.names("blocks.0.*") & "blocks.[01].*") == [1]
    assert repr(early & ~odd) == "(first(4) & ~every_other)"
    assert repr(t5fx.names("a*", re.compile("b"))) == "names('a*', /b/)"


def test_a_refused_site_is_never_chosen():
    sites = [site("a", index=0), site("b", index=-1, refusal=NO), site("c", index=1)]
    for select in (t5fx.everything, t5fx.names("?"), ~t5fx.names("a") | t5fx.names("a"), lambda s: True):
        assert [s.name for s in choose(sites, select)] == ["a", "c"]
    assert [s.name for s in choose(sites, t5fx.every_other)] == ["c"]
    assert [s.name for s in choose(sites, t5fx.last(9))] == ["a", "c"]


@pytest.mark.parametrize("inverted", [False, True])
@pytest.mark.parametrize("pattern", ["nothing*", re.compile("^attn$")], ids=str)
def test_a_name_that_matches_nothing_is_an_error_that_lists_the_sites(pattern, inverted):
    """Also under ``~`` and beside a name that matches: a typing error must not pass for "all others"."""
    select = ~t5fx.names(pattern) if inverted else t5fx.names("a") | t5fx.names(pattern)
    with pytest.raises(SelectionError) as error:
        choose([site("a"), site("b", refusal=NO)], select)
    message = str(error.value)
    assert (pattern if isinstance(pattern, str) else pattern.pattern) in message
    assert "a (convertible)" in message
    assert "b (refused: causal attention)" in message


def test_an_empty_selection_is_an_error_that_lists_the_sites():
    with pytest.raises(SelectionError, match=r"min_tokens\(1000\).*a \(convertible\); b \(refused: causal"):
        choose([site("a"), site("b", refusal=NO)], t5fx.min_tokens(1000))
    with pytest.raises(SelectionError, match=r"names\('b'\).*refused: causal"):
        choose([site("a"), site("b", refusal=NO)], t5fx.names("b"))
    with pytest.raises(SelectionError, match="no attention call"):
        choose([], t5fx.everything)


def test_a_long_list_of_sites_is_cut():
    message = list_sites(row(41))
    assert message.startswith("The model's 41 sites: blocks.0.attn (convertible); ")
    assert message.endswith("and 1 more")
    assert "blocks.40" not in message


@pytest.mark.parametrize(
    "make",
    [
        lambda: t5fx.every(0), lambda: t5fx.every(2, -1), lambda: t5fx.every(True), lambda: t5fx.first(0),
        lambda: t5fx.last(1.0), lambda: t5fx.fraction(0), lambda: t5fx.fraction(1.5), lambda: t5fx.fraction("half"),
        lambda: t5fx.min_tokens(0), lambda: t5fx.names(), lambda: t5fx.names(3), lambda: choose(row(2), 7),
    ],
)  # fmt: skip
def test_a_selector_that_makes_no_sense_is_refused_when_it_is_made(make):
    with pytest.raises(SelectionError):
        make()


# ---- blocks -------------------------------------------------------------------------------------------------


def grouped(classes, *owners, refused=()):
    sites = [site(name, refusal=NO if name in refused else None) for name in owners]
    return [(s.block, s.block_index, s.blocks) for s in assign_blocks(sites, classes)]


def test_a_block_is_the_nearest_repeated_list_element():
    classes = {f"layers.{i}": "Layer" for i in range(2)}
    classes |= {f"layers.{i}.{a}": "Attention" for i in range(2) for a in ("attn", "attn2")}
    owners = ["layers.0.attn", "layers.0.attn2", "layers.1.attn", "layers.1.attn2"]
    assert grouped(classes, *owners) == [("layers.0", 0, 2)] * 2 + [("layers.1", 1, 2)] * 2


def test_stages_of_blocks_are_not_blocks():
    owners = [f"stages.{s}.blocks.{b}.attn" for s in range(2) for b in range(2)]
    classes = dict.fromkeys(owners, "Attention") | {o[:-5]: "Block" for o in owners}
    classes |= {"stages.0": "Stage", "stages.1": "Stage"}
    assert [g[0] for g in grouped(classes, *owners)] == [o[:-5] for o in owners]


def test_blocks_that_are_attributes_and_a_lone_owner():
    classes = {
        "block_a": "Block",
        "block_b": "Block",
        "block_a.attn": "A",
        "block_b.attn": "A",
        "pool": "Pool",
    }
    found = grouped(classes, "block_a.attn", "block_b.attn", "pool")
    assert found == [("block_a", 0, 3), ("block_b", 1, 3), ("pool", 2, 3)]
    assert grouped({"": "Model"}, "") == [("", 0, 1)]


def test_only_blocks_with_a_convertible_site_are_counted():
    classes = {f"blocks.{i}": "Block" for i in range(4)}
    owners = [f"blocks.{i}" for i in range(4)]
    assert [g[1:] for g in grouped(classes, *owners, refused=("blocks.1",))] == [
        (0, 3),
        (-1, 3),
        (1, 3),
        (2, 3),
    ]


def test_in_a_unet_a_block_is_a_transformer_block_and_cross_attention_stays():
    model, args, kwargs = build("diffusers/UNet2DCondition")
    report = t5fx.inspect(model, (args, kwargs))
    selfs = [s for s in report if s.kind == "self"]
    assert [s.block_index for s in selfs] == [0, 1, 2, 3]
    assert all(s.block.endswith("transformer_blocks.0") and s.name == f"{s.block}.attn1" for s in selfs)
    assert all(s.refusal.code == "cross" for s in report if s.kind != "self")
    assert [s.name for s in choose(report.sites, t5fx.every_other)] == [selfs[1].name, selfs[3].name]
    assert choose(report.sites, t5fx.names("down_blocks.*")) == [s for s in selfs if s.name.startswith("down")]


def test_the_sites_of_one_block_go_together():
    """SD3.5 has two attention calls in some blocks."""
    model, args, kwargs = build("diffusers/SD3_dual")
    report = t5fx.inspect(model, (args, kwargs))
    first, second = "transformer_blocks.0", "transformer_blocks.1"
    assert [(s.block, s.block_index, s.blocks) for s in report] == [
        (first, 0, 2),
        (first, 0, 2),
        (second, 1, 2),
    ]
    assert len(choose(report.sites, t5fx.first(1))) == 2
    assert len(choose(report.sites, t5fx.every_other)) == 1


def test_linearize_converts_what_is_selected_and_a_wrong_selection_changes_nothing():
    model, x = vit(depth=3), images()
    before, keys = model(x), list(model.state_dict())
    for select in ("blocks.7*", t5fx.min_tokens(12), t5fx.cheaper):
        with pytest.raises(SelectionError, match=r"blocks\.2\.attn"):
            t5fx.linearize(model, select, example_inputs=x)
    assert torch.equal(model(x), before)
    assert list(model.state_dict()) == keys
    t5fx.linearize(model, t5fx.every(2) & t5fx.min_tokens(11), example_inputs=x)
    assert [s.name for s in t5fx.report(model).selected] == ["blocks.0.attn", "blocks.2.attn"]
    new = {k for k in model.state_dict() if k not in keys}
    assert {k.split(".ttt.")[0] for k in new} == {"blocks.0.attn", "blocks.2.attn"}
