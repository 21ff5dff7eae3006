"""Site, TokenLayout and Refusal: plain values, checked when they are made, and JSON-able."""

import dataclasses
import json

import numpy as np
import pytest
import torch

from t5fx.errors import LayoutError
from t5fx.site import Refusal, Site, TokenLayout

SITE = Site(
    name="blocks.0.attn:1", owner="blocks.0.attn", index=1, form="sdpa", kind="self", batch=2, heads=3, queries=17,
    keys=17, head_dim=8, value_dim=4, layout=TokenLayout(1, (4, 4)), layout_from="given", block="blocks.0",
    block_index=0, blocks=12, softmax_flops=7, ttt_flops=5, break_even_tokens=46, notes=("a note",),
)  # fmt: skip


@pytest.mark.parametrize(
    ("layout", "grid_tokens", "tokens", "text"),
    [
        (TokenLayout(1, (4, 6)), 24, 25, "1 + 4x6"),
        (TokenLayout(grid=(2, 3, 4), suffix=7), 24, 31, "2x3x4 + 7"),
        (TokenLayout(5, [1, 1], 2), 1, 8, "5 + 1x1 + 2"),
    ],
)
def test_a_layout_counts_its_tokens(layout, grid_tokens, tokens, text):
    assert layout.grid_tokens == grid_tokens
    assert layout.holds(tokens)
    assert not layout.holds(tokens - 1)
    assert not layout.holds(tokens + 1)
    assert str(layout) == text


def test_a_layout_without_a_grid_holds_any_number_of_tokens_from_its_prefix_on():
    layout = TokenLayout(prefix=3)
    assert (layout.grid_tokens, str(layout)) == (0, "no grid")
    assert layout.holds(3)
    assert layout.holds(1000)
    assert not layout.holds(2)


@pytest.mark.parametrize(
    "fields",
    [
        {"prefix": -1}, {"suffix": -1}, {"prefix": 1.5}, {"suffix": "2"}, {"prefix": None}, {"grid": (4,)},
        {"grid": (2, 2, 2, 2)}, {"grid": ()}, {"grid": (4, 0)}, {"grid": (4, -4)}, {"grid": (4.5, 4)}, {"grid": 16},
        {"grid": "4x4"}, {"grid": (4, None)},
    ],
)  # fmt: skip
def test_a_layout_that_makes_no_sense_is_refused_and_shown(fields):
    ((name, value),) = fields.items()
    with pytest.raises(LayoutError) as error:
        TokenLayout(**fields)
    assert name in str(error.value)
    assert repr(value) in str(error.value)


def test_a_layout_takes_the_integers_of_other_libraries_and_is_a_value():
    layout = TokenLayout(np.int64(1), torch.Size([2, 3]), torch.tensor(0))
    assert layout == TokenLayout(1, (2, 3), 0)
    assert hash(layout) == hash(TokenLayout(1, (2, 3), 0))
    assert {type(n) for n in (layout.prefix, *layout.grid, layout.suffix)} == {int}
    assert json.loads(json.dumps(layout.to_dict())) == {"prefix": 1, "grid": [2, 3], "suffix": 0}
    assert TokenLayout().to_dict() == {"prefix": 0, "grid": None, "suffix": 0}


def test_a_site_as_json_has_every_attribute():
    written = json.loads(json.dumps(SITE.to_dict()))
    assert set(written) == {f.name for f in dataclasses.fields(Site)} | {"tokens", "convert"}
    for name in ("name", "owner", "index", "blocks", "value_dim", "break_even_tokens", "mask"):
        assert written[name] == getattr(SITE, name)
    assert written["tokens"] == SITE.tokens == 17
    assert written["layout"] == {"prefix": 1, "grid": [4, 4], "suffix": 0}
    assert written["refusal"] is None
    assert written["convert"] is True
    assert written["notes"] == ["a note"]


def test_a_refused_site_says_so():
    refused = SITE.replace(refusal=Refusal("causal", "each query sees other keys"), layout=None)
    assert SITE.convertible
    assert not refused.convertible
    written = json.loads(json.dumps(refused.to_dict()))
    assert written["convert"] is False
    assert written["refusal"] == {"code": "causal", "reason": "each query sees other keys"}
    assert written["layout"] is None
    assert str(refused.refusal) == "each query sees other keys"


def test_sites_are_values():
    assert SITE.replace() == SITE
    assert SITE.replace(keys=9).tokens == 9
    assert SITE.keys == 17
    with pytest.raises(dataclasses.FrozenInstanceError):
        SITE.keys = 3
