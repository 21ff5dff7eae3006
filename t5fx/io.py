"""Save a linearized model as safetensors and a JSON recipe; load it into a freshly built base model.

A folder holds ``model.safetensors`` (the whole state_dict, tied tensors once) and ``t5fx.json``: which sites were
converted, with which config and layout, how their owners were called, and a fingerprint of the base model.  Loading
needs no example inputs and unpickles nothing.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import fx, nn

from .api import Record, _undo, add_recorders, record_of
from .capture.discover import GridSource
from .capture.dryrun import clear_fake_caches
from .capture.install import install, is_linearized, warm
from .capture.owner import (
    Conversion,
    SiteSpec,
    TensorSpec,
    add_entry,
    base_class,
    materialize,
    processor_type,
)
from .config import TTTConfig
from .errors import RecipeError, T5fxError
from .grid import GridState, SiteLayout
from .inner import InnerModel
from .report import Report
from .site import Refusal, Site, TokenLayout
from .weights import TTTWeights

FORMAT, VERSION = "t5fx", 1
WEIGHTS, RECIPE = "model.safetensors", "t5fx.json"
Model = TypeVar("Model", bound=nn.Module)


def save(model: nn.Module, folder: str | Path) -> Path:
    """Write a linearized model to ``folder`` (made if need be); returns the folder.

    Raises:
        T5fxError: ``model`` is not linearized, holds no data (meta device) or quantised tensors, or is a GraphModule
            (save its source instead).
    """
    record = record_of(model)
    if (empty := _on_meta(model)) is not None:
        raise T5fxError(f"there is nothing to save: {empty!r} is on the meta device")
    folder = Path(folder)
    modules = dict(model.named_modules())
    if any(isinstance(modules[owner], fx.GraphModule) for owner in record.owners):
        raise T5fxError("a traced GraphModule has no recipe: save the model that it was traced from, or torch.save it")
    plain = (torch.Tensor, nn.Parameter)
    odd = next(((k, type(t).__name__) for k, t in model.state_dict().items() if type(t) not in plain), None)
    if odd is not None:
        raise T5fxError(
            f"{odd[0]!r} is a {odd[1]}, which safetensors can't hold: save the model before it is quantised or "
            "sharded, and do that again once it is loaded"
        )
    tensors, aliases = _untied(model.state_dict())
    recipe = {
        "format": FORMAT,
        "version": VERSION,
        "base": fingerprint(model),
        "config": record.config.to_dict(),
        "report": record.report.to_dict()["sites"],
        "sources": [{**vars(s), "dims": list(s.dims)} for s in record.sources],
        "owners": [_owner_to_dict(name, modules[name]) for name in record.owners],
        "aliases": aliases,
    }
    folder.mkdir(parents=True, exist_ok=True)
    # Under other names first: whoever reads the folder meanwhile, or after a crash, finds the old pair or the new one.
    weights, text = folder / f"{WEIGHTS}.new", folder / f"{RECIPE}.new"
    save_file(tensors, weights, metadata={"format": "pt"})
    text.write_text(json.dumps(recipe, indent=1) + "\n")
    weights.replace(folder / WEIGHTS)
    text.replace(folder / RECIPE)
    return folder


def load(model: Model, folder: str | Path, *, inner: InnerModel | None = None) -> Model:
    """Convert a freshly built base model as the recipe in ``folder`` says and load its weights; returns ``model``.

    Args:
        inner: the inner model, where the recipe's is a user's own class (nothing is unpickled).

    Raises:
        RecipeError: the recipe does not fit the model; the message names the first difference.  The model is then
            as it was.
    """
    folder = Path(folder)
    recipe = _read(folder)
    if any(map(is_linearized, model.modules())):
        raise RecipeError(
            "load takes the base model, freshly built; this one is linearized already (t5fx.revert(model))"
        )
    if (empty := _on_meta(model)) is not None:
        raise RecipeError(
            f"{empty!r} is on the meta device and can't take weights: call model.to_empty(device=...) first"
        )
    try:
        model.__dict__["_t5fx"] = _apply(model, folder, recipe, inner)
    except BaseException as error:
        _undo(model)
        if isinstance(error, RecipeError) or not isinstance(error, _DAMAGE):
            raise
        what = f"{type(error).__name__}: {error}" if not isinstance(error, T5fxError) else str(error)
        raise RecipeError(f"the recipe in {folder} is damaged or does not fit this model ({what})") from error
    return model


# What a value that someone changed by hand, or a file cut short, can lead to.
_DAMAGE = (T5fxError, SafetensorError, LookupError, TypeError, ValueError, AttributeError, RuntimeError)


def _on_meta(model: nn.Module) -> str | None:
    return next((key for key, tensor in model.state_dict().items() if tensor.is_meta), None)


def _apply(model: nn.Module, folder: Path, recipe: Mapping[str, Any], inner: InnerModel | None) -> Record:
    config = TTTConfig.from_dict(recipe["config"], inner=inner)
    _compare(fingerprint(model), recipe["base"])
    modules = dict(model.named_modules())
    sources = [GridSource(**{**s, "dims": tuple(s["dims"])}) for s in recipe["sources"]]
    for kind, name in [
        *(("owner", o["name"]) for o in recipe["owners"]),
        *(("grid source", s.module) for s in sources),
    ]:
        if name not in modules:
            raise RecipeError(f"the recipe names the {kind} {name!r}; this model has no module of that name")
    with safe_open(folder / WEIGHTS, "pt") as file:
        stored = {key: tuple(file.get_slice(key).get_shape()) for key in file.keys()}  # noqa: SIM118
    sites = tuple(_site_from_dict(s) for s in recipe["report"])
    state = GridState()
    owners = {o["name"]: _install_owner(model, modules[o["name"]], o, config, state) for o in recipe["owners"]}
    add_recorders(modules, sources, state)
    for name in owners:
        _warm(modules[name])
    clear_fake_caches()
    _load_tensors(model, folder, stored, recipe["aliases"])  # last: what it writes can't be taken back
    report = Report(type(model).__name__, sites, config, converted=True, how="recipe")
    return Record(config, report, owners, sources)


def _warm(owner: nn.Module) -> None:
    """Trace the owner as the recipe says.  If not one of its calls can be, the recipe does not fit."""
    conversion: Conversion = owner._t5fx_owner  # type: ignore[assignment]
    known = list(conversion.calls)
    warm(owner)
    if known and not conversion.entries:
        call, training = known[0]
        args, kwargs = materialize(call, owner)
        add_entry(owner, conversion, args, kwargs, training)  # again, for its error


def fingerprint(model: nn.Module) -> dict[str, Any]:
    """What a recipe remembers of the base model: its class, and the shape of each of its own tensors."""
    new = {name for name, module in model.named_modules() if isinstance(module, TTTWeights)}
    tensors = {k: list(v.shape) for k, v in model.state_dict().items()
               if not any(k.startswith(n + ".") for n in new)}  # fmt: skip
    base = base_class(model)
    return {"class": f"{base.__module__}.{base.__qualname__}", "tensors": tensors}


def _compare(have: Mapping[str, Any], want: Mapping[str, Any]) -> None:
    if have["class"] != want["class"]:
        raise RecipeError(f"the recipe is of a {want['class']}, the model is a {have['class']}")
    mine, theirs = have["tensors"], want["tensors"]
    for key, shape in theirs.items():
        if key not in mine:
            raise RecipeError(f"the recipe's base model has a tensor {key!r} {shape}; this model has none of that name")
        if mine[key] != shape:
            raise RecipeError(f"tensor {key!r} is {mine[key]} in this model and {shape} in the recipe's base model")
    for key in mine:
        if key not in theirs:
            raise RecipeError(f"this model has a tensor {key!r} {mine[key]} that the recipe's base model has not")


def _read(folder: Path) -> dict[str, Any]:
    path = folder / RECIPE
    if not path.is_file():
        raise RecipeError(f"{folder} holds no {RECIPE}: it was not written by t5fx.save")
    try:
        recipe = json.loads(path.read_text())
    except ValueError as error:
        raise RecipeError(f"{path} is not JSON: {error}") from error
    if not isinstance(recipe, dict) or recipe.get("format") != FORMAT:
        raise RecipeError(f"{path} is not a recipe of t5fx")
    if recipe.get("version") != VERSION:
        raise RecipeError(
            f"{path} is a recipe of version {recipe.get('version')}; this t5fx reads version {VERSION}: update t5fx"
        )
    missing = [k for k in ("base", "config", "report", "sources", "owners", "aliases") if k not in recipe]
    if missing:
        raise RecipeError(f"{path} lacks {missing[0]!r}")
    if not (folder / WEIGHTS).is_file():
        raise RecipeError(f"{folder} holds no {WEIGHTS}")
    return recipe


def _untied(tensors: Mapping[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """safetensors takes no shared memory: keep each storage once, and remember the other names."""
    kept: dict[str, torch.Tensor] = {}
    aliases: dict[str, str] = {}
    seen: dict[tuple, str] = {}
    for key, tensor in tensors.items():
        place = (tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype)
        if tensor.numel() and place in seen:
            aliases[key] = seen[place]
        else:
            seen[place] = key
            kept[key] = tensor.detach().contiguous().clone()
    return kept, aliases


def _load_tensors(model: nn.Module, folder: Path, stored: Mapping[str, tuple], aliases: Mapping[str, str]) -> None:
    expected = {key: tuple(t.shape) for key, t in model.state_dict().items()}
    for key, shape in expected.items():
        found = stored.get(aliases.get(key, key))
        if found is None:
            raise RecipeError(f"{folder / WEIGHTS} has no tensor {key!r}")
        if found != shape:
            raise RecipeError(f"tensor {key!r} is {list(found)} in {folder / WEIGHTS} and {list(shape)} in the model")
    extra = [key for key in stored if key not in expected]
    if extra:
        raise RecipeError(f"{folder / WEIGHTS} holds a tensor {extra[0]!r} that the model has not")
    with safe_open(folder / WEIGHTS, "pt") as file, torch.no_grad():
        for key, tensor in model.state_dict(keep_vars=True).items():
            tensor.copy_(file.get_tensor(aliases.get(key, key)))


# -- owners and their calls as JSON ---------------------------------------------------------------------------


def _owner_to_dict(name: str, owner: nn.Module) -> dict[str, Any]:
    conversion: Conversion = owner._t5fx_owner  # type: ignore[assignment]
    sites = []
    for spec in conversion.sites:
        weights = owner.get_submodule(spec.ttt)
        assert isinstance(weights, TTTWeights)
        layout = weights.layout
        sites.append({
            "index": spec.index, "ttt": spec.ttt, "self_attention": spec.self_attention,
            "uniform_mask": spec.uniform_mask,
            "dwc": spec.config.dwc is not None, **weights.sizes,
            "layout": {"site": layout.site, **layout.to_dict()} if layout is not None else None,
        })  # fmt: skip
    base = base_class(owner)
    return {
        "name": name,
        "class": f"{base.__module__}.{base.__qualname__}",
        "attention_calls": conversion.attention_calls,
        "sites": sites,
        "calls": [{"training": t, "call": encoded} for c, t in conversion.calls if (encoded := _encode(c)) is not None],
    }


def _install_owner(
    model: nn.Module, owner: nn.Module, stored: Mapping[str, Any], config: TTTConfig, state: GridState
) -> list[SiteSpec]:
    base = type(owner)
    found = f"{base.__module__}.{base.__qualname__}"
    if found != stored["class"]:
        raise RecipeError(f"{stored['name']!r} is a {found}; the recipe converted a {stored['class']}")
    like = next((p for m in (owner, model) for p in m.parameters() if p.is_floating_point()), None)
    options: dict[str, Any] = {"device": like.device, "dtype": like.dtype} if like is not None else {}
    specs = []
    new: dict[str, TTTWeights] = {}
    for site in stored["sites"]:
        if not site["ttt"].isidentifier() or site["ttt"] in new or hasattr(owner, site["ttt"]):
            raise RecipeError(f"{stored['name']!r} can't take an attribute {site['ttt']!r}: that is no name, or taken")
        layout = site["layout"]
        if layout is not None:
            grid = tuple(layout["grid"]) if layout["grid"] is not None else None
            layout = SiteLayout(layout["site"], state, source=layout["source"], grid=grid,
                                prefix=layout["prefix"], suffix=layout["suffix"])  # fmt: skip
        site_config = config if site["dwc"] else config.replace(dwc=None)
        heads, head_dim, value_dim, axes = (site[k] for k in ("heads", "head_dim", "value_dim", "axes"))
        new[site["ttt"]] = TTTWeights(site_config, heads, head_dim, value_dim, layout, axes, **options)
        specs.append(SiteSpec(site["index"], site["ttt"], site["self_attention"], site_config, site["uniform_mask"]))
    processor = processor_type(owner)
    conversion = Conversion(stored["name"], tuple(specs), stored["attention_calls"], processor=processor)
    for call in stored["calls"]:
        conversion.calls.append((_decode(call["call"]), call["training"]))
    for name, weights in new.items():  # all of them or none: only an installed owner is undone
        owner.add_module(name, weights)
    install(owner, conversion)
    return specs


def _encode(tree: Any) -> Any:
    """A call's arguments as JSON, or None where something can't be written."""
    if isinstance(tree, TensorSpec):
        return {
            "tensor": list(tree.shape),
            "strides": list(tree.strides),
            "dtype": str(tree.dtype).removeprefix("torch."),
        }
    if tree is None or isinstance(tree, (bool, int, float, str)):
        return {"value": tree}
    if type(tree) in (tuple, list):
        parts = [_encode(x) for x in tree]
        return None if None in parts else {type(tree).__name__: parts}
    if type(tree) is dict and all(isinstance(k, str) for k in tree):
        items = {k: _encode(v) for k, v in tree.items()}
        return None if None in items.values() else {"dict": items}
    return None


def _decode(code: Mapping[str, Any]) -> Any:
    if "tensor" in code:
        return TensorSpec(tuple(code["tensor"]), tuple(code["strides"]), getattr(torch, code["dtype"]))
    if "value" in code:
        return code["value"]
    if "dict" in code:
        return {k: _decode(v) for k, v in code["dict"].items()}
    kind, parts = next(iter(code.items()))
    return {"tuple": tuple, "list": list}[kind](_decode(x) for x in parts)


def _site_from_dict(stored: Mapping[str, Any]) -> Site:
    values = {k: v for k, v in stored.items() if k in Site.__dataclass_fields__}
    layout, refusal = values["layout"], values["refusal"]
    values["layout"] = TokenLayout(layout["prefix"], layout["grid"], layout["suffix"]) if layout else None
    values["refusal"] = Refusal(refusal["code"], refusal["reason"]) if refusal else None
    return Site(**{**values, "notes": tuple(values["notes"])})
