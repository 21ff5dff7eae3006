"""TTTConfig: what it accepts, what it refuses and why, and its way to JSON and back."""

import copy
import json
import pickle

import pytest
import torch

from t5fx.config import DIT5_TTT, T5, TTTConfig
from t5fx.errors import ConfigError, RecipeError
from t5fx.inner import SwiGLU


class Linear:
    """The smallest inner model: one matrix."""

    def __init__(self, gain: float = 1.0):
        self.gain = gain

    def init(self, heads, head_dim, value_dim, hidden, *, std, device=None, dtype=None, generator=None):
        weight = torch.empty(heads, head_dim, value_dim, device=device, dtype=dtype)
        return {"w": torch.nn.init.trunc_normal_(weight, std=std, generator=generator)}

    def apply(self, weights, x):
        return self.gain * (x @ weights["w"])


def test_presets_are_the_published_ones():
    published = {
        "inner_lr": 1.0,
        "hidden_ratio": 1.0,
        "key_norm": True,
        "key_norm_eps": 1.0,
        "init_std": 0.02,
    }
    assert TTTConfig("swiglu", "dot", **published, dwc=3) == T5
    assert (DIT5_TTT.inner, DIT5_TTT.loss, DIT5_TTT.dwc) == ("mlp", "mse", 3)


@pytest.mark.parametrize("loss", ["l1", "mae", "L1"])
def test_losses_without_a_gradient_to_the_values_are_refused_by_name(loss):
    with pytest.raises(ConfigError, match=rf"{loss}.*mixed second derivative.*no gradient"):
        TTTConfig(loss=loss)


def test_the_reason_for_that_refusal_is_true():
    """d2L/(dy dv): zero for the absolute error, not for the losses that are accepted."""
    y, v = torch.randn(7, dtype=torch.float64), torch.randn(7, dtype=torch.float64)

    def mixed(loss):
        slope = torch.func.grad(lambda y, v: loss(y, v).sum(), argnums=0)
        return torch.func.jacrev(slope, argnums=1)(y, v)

    assert mixed(lambda y, v: (y - v).abs()).abs().max() == 0
    assert mixed(lambda y, v: -y * v).abs().max() == 1
    assert mixed(lambda y, v: 0.5 * (y - v) ** 2).abs().max() == 1


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("inner", "gru"), ("inner", 3), ("inner", SwiGLU), ("loss", "huber"), ("loss", None),
        ("inner_lr", 0.0), ("inner_lr", float("nan")), ("inner_lr", "1"), ("hidden_ratio", -1),
        ("hidden_ratio", True), ("key_norm", 1), ("key_norm_eps", 0), ("init_std", float("inf")),
        ("learn_inner_lr", 1), ("dwc", 4), ("dwc", 1), ("dwc", 3.0), ("dwc", True), ("dwc", 0),
    ],
)  # fmt: skip
def test_a_value_that_cant_be_used_is_refused_and_shown(field, value):
    with pytest.raises(ConfigError) as error:
        TTTConfig(**{field: value})
    assert field in str(error.value)
    shown = "SwiGLU" if value is SwiGLU else "int" if field == "inner" and value == 3 else repr(value)
    assert shown in str(error.value)


def test_replace_gives_a_changed_copy_and_names_a_field_that_is_not_there():
    changed = T5.replace(inner_lr=4, dwc=None)
    assert (changed.inner_lr, changed.dwc, T5.inner_lr, T5.dwc) == (4.0, None, 1.0, 3)
    with pytest.raises(ConfigError, match=r"learning_rate.*inner_lr"):
        T5.replace(learning_rate=2)
    with pytest.raises(ConfigError, match="dwc"):
        T5.replace(dwc=2)


def test_hidden():
    assert T5.hidden(72) == 72
    assert TTTConfig(hidden_ratio=1.5).hidden(5) == 8
    assert TTTConfig(hidden_ratio=0.01).hidden(16) == 1


@pytest.mark.parametrize(
    "config", [T5, DIT5_TTT, TTTConfig(dwc=None, key_norm=False, hidden_ratio=2, learn_inner_lr=True)]
)
def test_json_round_trip(config):
    assert TTTConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


def test_an_instance_of_a_built_in_is_that_built_in():
    config = TTTConfig(inner=SwiGLU())
    assert config.inner_name == "swiglu"
    assert config.to_dict() == T5.to_dict()


def test_json_round_trip_of_a_custom_inner_model():
    inner = Linear(gain=2.0)
    written = json.loads(json.dumps(TTTConfig(inner=inner, loss="mse").to_dict()))
    assert written["inner"] == {"custom": f"{__name__}:Linear"}
    assert TTTConfig.from_dict(written, inner=inner) == TTTConfig(inner=inner, loss="mse")
    with pytest.raises(RecipeError, match=r"Linear.*pass an instance"):
        TTTConfig.from_dict(written)
    with pytest.raises(RecipeError, match=r"Linear.*SwiGLU"):
        TTTConfig.from_dict(written, inner=SwiGLU())


def test_from_dict_refuses_what_it_would_have_to_ignore():
    with pytest.raises(RecipeError, match="warp"):
        TTTConfig.from_dict({**T5.to_dict(), "warp": 9})
    with pytest.raises(RecipeError, match=r"built-in.*swiglu"):
        TTTConfig.from_dict(T5.to_dict(), inner=Linear())
    with pytest.raises(RecipeError, match="custom"):
        TTTConfig.from_dict({**T5.to_dict(), "inner": {"builtin": "mlp"}})


def test_a_recipe_from_before_the_learned_rate():
    written = T5.to_dict()
    del written["learn_inner_lr"]
    assert TTTConfig.from_dict(written) == T5


def test_a_weight_that_is_called_as_the_learned_rate_is_refused():
    class Named(Linear):
        def init(self, *sizes, **options):
            return {"inner_lr": super().init(*sizes, **options)["w"]}

        def apply(self, weights, x):
            return x @ weights["inner_lr"]

    assert not TTTConfig(inner=Named()).learn_inner_lr
    with pytest.raises(ConfigError, match="inner_lr"):
        TTTConfig(inner=Named(), learn_inner_lr=True)


def test_configs_are_values():
    assert hash(T5) == hash(TTTConfig())
    assert pickle.loads(pickle.dumps(DIT5_TTT)) == DIT5_TTT
    with pytest.raises(AttributeError):
        T5.loss = "mse"  # type: ignore[misc]


def test_copies_of_a_custom_inner_model_keep_its_operator_name():
    config = TTTConfig(inner=Linear(gain=3.0))
    assert copy.deepcopy(config).inner_name == config.inner_name
    assert pickle.loads(pickle.dumps(config)).inner_name == config.inner_name
    assert TTTConfig(inner=Linear(gain=4.0)).inner_name != config.inner_name
