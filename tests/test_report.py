"""inspect and report: what they print, what they hand on, and that looking changes nothing."""

import io
import json

import pytest
import torch
from rich.console import Console
from torch import nn
from toys import ViT, assert_same_state, images, state, vit
from zoo import build

import t5fx
from t5fx.errors import InputError, T5fxError
from t5fx.report import count


def test_the_table_has_a_row_for_each_site_with_all_that_is_promised():
    text = str(t5fx.inspect(vit(depth=3), images()))
    lines = text.splitlines()
    assert lines[0].strip() == "ViT: 3 attention sites, 3 convertible"
    for word in ("site", "TTT", "kind", "tokens", "layout", "x dim", "mask", "FLOPs", "even"):
        assert word in lines[2]
    (row,) = [line.split() for line in lines if "blocks.1.attn" in line]
    # 2 heads of 8, 11 tokens, batch 2: 2 * 2 * 2 * 11 * 11 * (8 + 8) = 15.5 k
    assert row[:9] == ["blocks.1.attn", "yes", "self", "11", "1", "+", "2x5", "2x8", "none"]
    assert row[9] == "15.5k"
    assert len(row) == 12


def test_the_table_of_a_linearized_model_tells_what_was_selected():
    model = t5fx.linearize(vit(depth=3), example_inputs=images())
    report = t5fx.report(model)
    assert [s.selected for s in report] == [False, True, False]
    assert report.converted
    lines = str(report).splitlines()
    assert "3 attention sites, 1 converted" in lines[0]
    assert [line.split()[1] for line in lines if "blocks." in line] == ["left", "yes", "left"]
    assert str(t5fx.inspect(model, images())) == str(report)  # to look at it again gives the same


def test_refused_sites_carry_their_reasons():
    model, args, kwargs = build("diffusers/UNet2DCondition")
    report = t5fx.inspect(model, (args, kwargs))
    assert len(report) == 8
    assert len(report.convertible) == 4
    cross = next(s for s in report if s.kind == "cross")
    assert cross.refusal.code == "cross"
    assert "linear" in cross.refusal.reason
    text = " ".join(str(report).split())
    assert text.count(" no [1] cross 64<7 ") == 4
    assert f"[1] {cross.refusal.reason}" in text  # said once, below the table
    assert text.count("[1]") == 5


@pytest.mark.parametrize(
    ("options", "mask", "code"),
    [
        ({"is_causal": True}, None, "causal"),
        ({}, torch.zeros(11, 11, dtype=torch.float64), "float-mask"),
        ({}, torch.ones(11, 11, dtype=torch.bool).tril(), "query-mask"),
        ({}, torch.ones(2, 2, 1, 11, dtype=torch.bool), "query-mask"),  # differs between heads
        ({}, torch.ones(2, 1, 1, 11, dtype=torch.bool), None),
        ({}, torch.ones(2, 1, 1, 11, dtype=torch.bool).expand(2, 2, 11, 11), None),
        ({}, torch.ones(1, 11, dtype=torch.bool), None),
    ],
)
def test_masks_are_told_apart(options, mask, code):
    model = vit(**options)
    report = t5fx.inspect(model, (images(), mask) if mask is not None else images())
    assert {s.refusal.code if s.refusal else None for s in report} == {code}
    assert {s.mask for s in report} == {
        {"causal": "causal", "float-mask": "float", "query-mask": "boolean", None: "key padding"}[code]
    }
    if code is not None:
        with pytest.raises(t5fx.SelectionError, match=r"refused: .*(causal|float|boolean)"):
            t5fx.linearize(model, t5fx.everything, example_inputs=(images(), mask))


def test_as_data_it_is_json_with_totals():
    for report in (
        t5fx.inspect(vit(), images()),
        t5fx.report(t5fx.linearize(vit(), example_inputs=images())),
    ):
        data = json.loads(json.dumps(report.to_dict()))
        assert data == report.to_dict()
        assert (data["model"], data["converted"], len(data["sites"])) == ("ViT", report.converted, 2)
        assert data["config"] == t5fx.T5.to_dict()
        softmax, ttt = report[0].softmax_flops, report[0].ttt_flops
        assert softmax != ttt
        one = int(report.converted)
        assert data["totals"] == {
            "sites": one,
            "softmax_flops": 2 * softmax,
            "flops": 2 * softmax + one * (ttt - softmax),
        }


def test_totals_of_a_choice_of_sites():
    report = t5fx.inspect(vit(depth=4), images())
    half = t5fx.inspect(vit(depth=4), images()).sites[1::2]  # equal sites of another look count as well
    softmax, ttt = report[0].softmax_flops, report[0].ttt_flops
    assert report.totals(half) == {"sites": 2, "softmax_flops": 4 * softmax, "flops": 2 * softmax + 2 * ttt}
    assert report.totals(report.sites)["flops"] == 4 * ttt
    assert report.totals([])["flops"] == 4 * softmax


def test_a_report_is_a_sequence_with_names():
    report = t5fx.inspect(vit(), images())
    assert [s.name for s in report] == ["blocks.0.attn", "blocks.1.attn"]
    assert report["blocks.1.attn"] is report[1]
    with pytest.raises(KeyError, match=r"blocks\.0\.attn"):
        report["blocks.9.attn"]


def test_remarks_are_numbered_and_brackets_in_them_are_not_read_as_markup():
    first, second, third = t5fx.inspect(vit(depth=3), images())
    first = first.replace(refusal=t5fx.Refusal("x", "axes [batch, heads] [red]"))
    second = second.replace(notes=("a note",))
    third = third.replace(notes=("a note",), layout_from="assumed square")
    text = str(t5fx.Report("M", (first, second, third), t5fx.T5))
    rows = [line for line in text.splitlines() if "blocks." in line]
    assert [row.split("self")[0].split(maxsplit=1)[1].strip() for row in rows] == [
        "no [1]",
        "yes [2]",
        "yes [2] [3]",
    ]
    remarks = text.splitlines()[-3:]
    assert remarks[:2] == ["[1] axes [batch, heads] [red]", "[2] a note"]
    assert "layout=" in remarks[2]


def test_rich_may_choose_the_width():
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(t5fx.inspect(vit(), images()))
    lines = console.export_text().splitlines()
    assert max(map(len, lines)) <= 80
    assert sum("blocks." in line for line in lines) == 2


def test_count_is_short():
    numbers = (0, 999, 1000, 1234567, 2.5e9, 7e13, 3e15)
    assert [count(n) for n in numbers] == ["0", "999", "1k", "1.23M", "2.5G", "70T", "3P"]


def test_report_of_a_model_that_is_not_linearized_says_what_to_call():
    model = vit()
    with pytest.raises(T5fxError, match=r"ViT is not linearized: call t5fx\.linearize"):
        t5fx.report(model)
    whole = nn.Sequential(t5fx.linearize(model, example_inputs=images()))
    with pytest.raises(T5fxError, match=r"submodule '0'"):
        t5fx.report(whole)


# ---- nothing changes --------------------------------------------------------------------------------------------

LOOKED_AT = {
    "timm/vit_tiny": True,
    "timm/eva02_tiny": False,
    "diffusers/SD3_dual": True,
    "diffusers/UNet2DCondition": False,
    "transformers/Dinov3ViT": False,
}


@pytest.mark.parametrize(("name", "training"), LOOKED_AT.items())
def test_inspect_changes_nothing(name, training):
    model, args, kwargs = build(name)
    model.train(training)
    next(m for m in model.modules() if not list(m.children())).train(not training)  # a mode of its own
    for parameter in list(model.parameters())[:3]:
        parameter.requires_grad_(False)
    inputs = [t for t in (*args, *kwargs.values()) if isinstance(t, torch.Tensor)]
    copies = [t.clone() for t in inputs]
    before = state(model)
    report = t5fx.inspect(model, (args, kwargs))
    assert len(report) > 0
    assert_same_state(before, state(model))
    assert all(torch.equal(a, b) for a, b in zip(inputs, copies, strict=True))
    assert all(p.grad is None for p in model.parameters())


class Busy(ViT):
    """Writes on itself at each forward, as caches and statistics do."""

    def __init__(self, branches):
        super().__init__()
        self.branches = branches
        self.calls, self.seen, self.last = 0, [], None
        self.bn = nn.BatchNorm2d(3)
        self.drop = nn.Dropout(0.5)
        self.register_buffer("total", torch.zeros(()))

    def forward(self, image):
        self.calls += 1
        self.seen.append(image)
        self.last = image
        self.total += 1
        if self.branches and image.sum() > 1e9:
            raise AssertionError
        return super().forward(self.drop(self.bn(image + torch.rand_like(image))))


@pytest.mark.parametrize("branches", [False, True])
def test_a_forward_that_writes_on_its_module_leaves_nothing_behind(branches):
    """With ``branches`` the forward asks for a number, so a dry run can't do and a real one is made."""
    model, inputs = Busy(branches).train(), images().float()
    before = state(model)
    report = t5fx.inspect(model, inputs)
    assert report.how == ("real run" if branches else "dry run")
    assert len(report.convertible) == 2
    after = state(model)
    assert_same_state(before, after, but=("versions",))  # a pretended write counts as one
    assert (model.calls, model.seen, model.last, model.total.item()) == (0, [], None, 0)


def test_a_failed_inspect_changes_nothing_and_says_what_it_was_given():
    model = Busy(False).train()
    before = state(model)
    with pytest.raises(InputError, match=r"Busy does not run .*float32\[2, 4, 8, 8\]"):
        t5fx.inspect(model, torch.zeros(2, 4, 8, 8))
    assert_same_state(before, state(model), but=("versions",))
    assert model.total.item() == 0


@pytest.mark.parametrize("name", ["timm/vit_tiny", "timm/vit_dinov2_reg4", "diffusers/SD3_dual", "transformers/ViT"])
def test_inspect_on_the_meta_device_sees_the_same(name):
    model, args, kwargs = build(name)
    real = t5fx.inspect(model, (args, kwargs))
    model.to("meta")
    before = state(model)
    report = t5fx.inspect(model, (args, kwargs))  # the inputs may stay where they are
    assert report.to_dict() == real.to_dict()
    assert_same_state(before, state(model))
    inferred = t5fx.inspect(model)
    assert [s.name for s in inferred] == [s.name for s in real]


def test_other_configs_cost_otherwise():
    model, x = vit(), images()
    swiglu, mlp = t5fx.inspect(model, x), t5fx.inspect(model, x, config=t5fx.TTTConfig(inner="mlp", dwc=None))
    assert mlp[0].ttt_flops < swiglu[0].ttt_flops
    assert mlp[0].softmax_flops == swiglu[0].softmax_flops
    with pytest.raises(t5fx.ConfigError, match=r"t5fx\.T5"):
        t5fx.inspect(model, x, config="T5")
