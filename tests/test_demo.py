"""The demo runs from beginning to end, its page stands alone, and its claims hold."""

import argparse
import base64
import importlib.util
import io
import json
import subprocess
import sys
from html.parser import HTMLParser

import numpy as np
import pytest
import torch
from PIL import Image

import t5fx
from t5fx import demo
from t5fx.cli import main
from t5fx.demo import costs, digits, photos, script, training


def arguments(*given):
    parser = argparse.ArgumentParser()
    demo.add_arguments(parser)
    return parser.parse_args(given)


class Page(HTMLParser):
    """What a browser would fetch for the page, and the text of its table cells."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.addresses, self.cells, self.inside = set(), [], [], False
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        self.addresses += [value for name, value in attrs if name in ("src", "href", "srcset", "data", "action")]
        if tag in ("td", "th"):
            self.inside = True
            self.cells.append("")

    def handle_endtag(self, tag):
        self.inside = self.inside and tag not in ("td", "th")

    def handle_data(self, data):
        if self.inside:
            self.cells[-1] += data


@pytest.fixture(scope="module")
def quick(tmp_path_factory):
    """The folder that ``t5fx demo --quick`` fills, without the photos' weights."""
    folder = tmp_path_factory.mktemp("demo")
    threads = torch.get_num_threads()
    status = main(["demo", "--quick", "--threads", "1", "--out", str(folder), "--weights", str(folder / "none")])
    torch.set_num_threads(threads)
    assert status == 0
    return folder


def test_page_stands_alone(quick):
    text = (quick / "report.html").read_text(encoding="utf-8")
    page = Page(text)
    assert not page.tags & {"script", "link", "iframe", "object", "embed"}
    assert len(page.addresses) >= 60
    for address in page.addresses:
        kind, _, data = address.partition(",")
        assert kind == "data:image/png;base64"
        Image.open(io.BytesIO(base64.b64decode(data, validate=True))).verify()
    assert "url(" not in text
    assert "@import" not in text
    assert "http" not in text


def test_page_holds_what_was_measured(quick):
    results = json.loads((quick / "results.json").read_text())
    cells = Page((quick / "report.html").read_text(encoding="utf-8")).cells
    assert [stage["converted"] for stage in results["stages"]] == [0, 2, 4]
    for stage in results["stages"]:
        row = cells.index(stage["name"])
        assert cells[row + 1] == f"{stage['converted']} of 4"
        calibrated = "" if stage["calibrated"] is None else f"{stage['calibrated']:.1f}"
        assert (stage["calibrated"] is None) == (stage["name"] == "softmax")
        assert cells[row + 3 : row + 6] == [f"{stage['at_once']:.1f}", calibrated, f"{stage['tuned']:.1f}"]
    for cost in results["costs"]:
        row = cells.index(f"{cost['size']} px")
        assert cells[row + 2 : row + 5] == [f"{cost[key] / 1e9:,.1f}" for key in ("softmax", "half", "all")]
    assert "Photos skipped" in (quick / "report.html").read_text(encoding="utf-8")
    assert results["cosines"] == {}


def test_saved_model_is_the_measured_one(quick):
    results = json.loads((quick / "results.json").read_text())
    loaded = t5fx.load(digits.build(), quick / "model")
    data = digits.load()
    assert digits.accuracy(loaded, data) == results["stages"][2]["tuned"]
    # A model that was only built and converted is another one.
    other = t5fx.linearize(digits.build(), t5fx.everything)
    assert not torch.equal(other(data.test_images), loaded(data.test_images))


def test_a_wrong_reload_is_an_error(quick, tmp_path, monkeypatch):
    model = t5fx.load(digits.build(), quick / "model").eval()
    stage = training.Stage("all converted", model, 4, 4, 0, 0.0)
    script.save_and_load(stage, digits.load(), tmp_path)
    load = t5fx.load

    def careless(model, folder):
        model = load(model, folder)
        with torch.no_grad():
            model.head.bias += 1e-3
        return model

    monkeypatch.setattr(t5fx, "load", careless)
    with pytest.raises(t5fx.T5fxError, match="other outputs"):
        script.save_and_load(stage, digits.load(), tmp_path)


@pytest.mark.parametrize(
    ("half", "whole", "answers"),
    [(97.2, 96.0, ["yes", "yes"]), (96.8, 96.2, ["no", "yes"]), (98.5, 95.9, ["yes", "no"])],
)
def test_verdict(half, whole, answers):
    pairs = ((0, 98.0), (2, half), (4, whole))
    stages = [training.Stage(str(n), digits.build(), n, 4, 0, 0, tuned=tuned) for n, tuned in pairs]
    assert [line.split("]")[1].split("[")[0] for line in script.verdict(stages).splitlines()] == answers


def test_split_and_augmentation():
    data = digits.load()
    assert len(data.train_images) + len(data.test_images) == 1797
    everything = torch.cat([data.train_images, data.test_images]).flatten(1)
    assert len(everything.unique(dim=0)) == 1797  # so no image is in both
    images = data.train_images[:32]
    moved = digits.augment(images, data.background, torch.Generator().manual_seed(1))
    again = digits.augment(images, data.background, torch.Generator().manual_seed(1))
    assert torch.equal(moved, again)
    assert not torch.equal(moved, images)
    empty = torch.full_like(images, data.background)
    torch.testing.assert_close(digits.augment(empty, data.background, torch.Generator()), empty)


def test_schedule():
    rates = [training.schedule(step / 100, 0.2) for step in range(1, 101)]
    assert max(rates) == rates[19] == 1
    assert rates[9] == pytest.approx(0.5)
    assert rates[-1] == pytest.approx(0)


def test_pca_pictures():
    torch.manual_seed(0)
    height, width, channels = 4, 6, 12
    directions = torch.linalg.qr(torch.randn(channels, channels))[0][:3]
    # Three patterns on three directions, each weaker than the one before: the components in their order.
    rows, columns = torch.meshgrid(torch.linspace(-1, 1, height), torch.linspace(-1, 1, width), indexing="ij")
    patterns = torch.stack([9 * columns, 3 * rows, rows * columns]).flatten(1)
    clean = (patterns.T @ directions)[None].repeat(2, 1, 1) + 5
    noise = torch.randn(2, height * width, channels)
    pictures = photos.pca_pictures(
        {"softmax": clean, "same": clean.clone(), "noise": noise}, "softmax", (height, width)
    )
    red, green = (pictures["softmax"][0, ..., channel].astype(int) for channel in (0, 1))
    assert pictures["softmax"].shape == (2, height, width, 3)
    assert pictures["softmax"].dtype == np.uint8
    assert {red.min(), red.max()} == {0, 255}
    assert len(set(np.sign(np.diff(red, axis=1)).flatten())) == 1  # red runs from left to right
    assert len(set(np.sign(np.diff(green, axis=0)).flatten())) == 1  # green from top to bottom
    assert np.array_equal(pictures["same"], pictures["softmax"])
    assert not np.array_equal(pictures["noise"], pictures["softmax"])
    # The projection is the reference's, whatever else is shown.
    alone = photos.pca_pictures({"softmax": clean}, "softmax", (height, width))
    assert np.array_equal(alone["softmax"], pictures["softmax"])


def test_costs_agree_with_the_flop_counter():
    """At 518 px the difference that inspect sees is the one that torch counts on the converted network."""
    from torch.utils.flop_counter import FlopCounterMode

    cost = costs.at_size(518)
    with torch.device("meta"):
        model = costs.timm.create_model(costs.MODEL, pretrained=False, num_classes=0, img_size=518).eval()
        image = torch.empty(1, 3, 518, 518)
    t5fx.linearize(model, t5fx.every_other, example_inputs=image)
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(image)
    assert counter.get_total_flops() == cost.network_half
    assert cost.all < cost.half < cost.softmax


def test_weights_file(tmp_path):
    assert photos.find_weights(tmp_path / "none.safetensors") is None
    (tmp_path / "some.safetensors").touch()
    assert photos.find_weights(tmp_path / "some.safetensors") == tmp_path / "some.safetensors"


def test_missing_package_is_named(monkeypatch, capsys):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "sklearn" else find(name))
    with pytest.raises(t5fx.T5fxError, match=r"scikit-learn: pip install t5fx\[demo\]"):
        demo.run(arguments())


def test_importing_is_cheap():
    code = "import sys, t5fx.demo; sys.exit(bool({'timm', 'sklearn', 'matplotlib'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_quality_comes_back(tmp_path, seed):
    """The README's promise: at least 96 %, half converted within 1 point of the softmax model, all within 2."""
    demo.run(arguments("--out", str(tmp_path), "--seed", str(seed), "--weights", str(tmp_path / "none")))
    results = json.loads((tmp_path / "results.json").read_text())
    control, half, whole = (stage["tuned"] for stage in results["stages"])
    assert results["softmax_accuracy"] >= 96
    assert half >= max(control, results["softmax_accuracy"]) - 1
    assert whole >= max(control, results["softmax_accuracy"]) - 2
