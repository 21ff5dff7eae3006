"""linearize, inspect, report, revert: the four verbs."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, TypeVar

import torch
from torch import nn
from torch.fx.graph_module import _USER_PRESERVED_ATTRIBUTES_KEY as _KEPT

from .capture.discover import GridSource
from .capture.dryrun import clear_fake_caches
from .capture.inputs import normalize
from .capture.install import RefuseMaps, install, is_linearized, uninstall
from .capture.owner import Conversion, SiteSpec, add_entry, processor_type, rewrite_owner
from .config import T5, TTTConfig
from .errors import ConfigError, T5fxError
from .grid import GridRecorder, GridState, PackedRecorder
from .layout import UserLayout, grid_axes, source_name
from .plan import Plan, PlannedSite, make_plan
from .report import Report
from .select import choose, every_other
from .weights import TTTWeights

Model = TypeVar("Model", bound=nn.Module)


@dataclasses.dataclass
class Record:
    """What was done to a model; lives on it as ``_t5fx``.

    ``owners`` maps each converted module to its sites; ``sources`` are the modules that tell the token grid.
    """

    config: TTTConfig
    report: Report
    owners: dict[str, list[SiteSpec]]
    sources: list[GridSource]


def linearize(
    model: Model,
    select: Any = every_other,
    *,
    config: TTTConfig = T5,
    example_inputs: Any = None,
    layout: UserLayout = None,
) -> Model:
    """Convert softmax attention sites of ``model`` into test-time-training sites, in place.

    All weights stay; each chosen site gains new parameters under ``<owner>.ttt``.  The sites are found in one dry run
    on fake tensors.  A call that fails leaves the model as it was.

    Args:
        model: any ``nn.Module``, also an ``fx.GraphModule``.
        select: which sites: a selector of :mod:`t5fx.select`, or any ``Callable[[Site], bool]``.
        config: what a site becomes; see :class:`t5fx.TTTConfig`.
        example_inputs: a tensor, a tuple, a dict of keywords, or ``(args, kwargs)``.  None: inferred, for timm,
            transformers and diffusers models.
        layout: a :class:`t5fx.TokenLayout`, or a callable from Site to one (or to None: find out).  Left out, each
            site's layout is found out from where its tokens come from.

    Returns:
        ``model`` itself.

    Raises:
        SelectionError: nothing to convert is selected.
        InputError: no example inputs, or the model does not run with them.
        LayoutError: a layout does not add up.
        CaptureError: an owner's forward can't be rewritten.
        T5fxError: the model is linearized already.
    """
    _check(model, config)
    plan = make_plan(model, *normalize(model, example_inputs), config, layout)
    names = {site.name for site in choose([planned.site for planned in plan.sites], select)}
    chosen = [planned for planned in plan.sites if planned.site.name in names]
    _apply(model, plan, chosen)
    return model


def _check(model: nn.Module, config: TTTConfig) -> None:
    if not isinstance(model, nn.Module):
        raise T5fxError(
            f"expected an nn.Module, not {type(model).__name__}: of a diffusers pipeline pass pipeline.transformer (or "
            ".unet), of an ExportedProgram pass .module()"
        )
    if not isinstance(config, TTTConfig):
        raise ConfigError(f"config must be a t5fx.TTTConfig such as t5fx.T5, not {type(config).__name__}")


def _apply(model: nn.Module, plan: Plan, chosen: Sequence[PlannedSite]) -> None:
    """rewrite -> install.  Everything that can fail is done before the model is touched."""
    modules = dict(model.named_modules())
    state = GridState()
    by_owner: dict[str, list[PlannedSite]] = {}
    for planned in chosen:
        by_owner.setdefault(planned.owner, []).append(planned)
    conversions: dict[str, Conversion] = {}
    graphs: dict[str, Any] = {}
    weights: list[tuple[nn.Module, str, TTTWeights]] = []
    for owner, sites in by_owner.items():
        specs = []
        for planned in sites:
            parent = modules[planned.site.owner]
            name = _free_name(parent, [n for m, n, _ in weights if m is parent])
            site_config = plan.config if planned.rule is not None else plan.config.replace(dwc=None)
            weights.append((parent, name, _new_weights(model, parent, planned, site_config, state)))
            path = planned.site.owner.removeprefix(owner).lstrip(".")
            ttt = f"{path}.{name}" if path else name
            same = planned.site.kind in ("self", "window")
            specs.append(SiteSpec(planned.site.index, ttt, same, site_config, planned.uniform_mask))
        conversions[owner] = Conversion(
            owner, tuple(specs), len(plan.calls[owner]), processor=processor_type(modules[owner])
        )
        for args, kwargs, training, traced in plan.traces[owner]:
            if isinstance(modules[owner], torch.fx.GraphModule):
                graphs[owner] = rewrite_owner(traced, conversions[owner], modules[owner])
            else:
                add_entry(modules[owner], conversions[owner], args, kwargs, training, traced)
    clear_fake_caches()
    rules = [p.rule for p in chosen if p.rule is not None and plan.config.dwc is not None]
    sources = list(dict.fromkeys(r.source for r in rules if r.source is not None))
    names = {planned.site.name for planned in chosen}
    described = tuple(p.site.replace(selected=p.site.name in names) for p in plan.sites)
    report = Report(type(model).__name__, described, plan.config, converted=True, how=plan.how)
    owners = {owner: list(c.sites) for owner, c in conversions.items()}
    record = Record(plan.config, report, owners, sources)
    try:
        for parent, name, new in weights:
            parent.add_module(name, new)
        for owner, conversion in conversions.items():
            install(modules[owner], conversion, graphs.get(owner))
        add_recorders(modules, record.sources, state)
        model.__dict__["_t5fx"] = record
        if isinstance(model, torch.fx.GraphModule):
            model.meta.setdefault(_KEPT, {})["_t5fx"] = record
    except BaseException:
        _undo(model)
        for parent, name, _ in weights:
            parent._modules.pop(name, None)
        raise


def _new_weights(
    model: nn.Module, parent: nn.Module, planned: PlannedSite, config: TTTConfig, state: GridState
) -> TTTWeights:
    """The site's new parameters, with the device and dtype of its owner's (else its model's) parameters."""
    site, rule = planned.site, planned.rule
    like = next((p for m in (parent, model) for p in m.parameters() if p.is_floating_point()), None)
    device = like.device if like is not None else None
    dtype = like.dtype if like is not None else None
    layout = rule.site_layout(site.name, state) if rule is not None and config.dwc is not None else None
    sizes = (site.heads, site.head_dim, site.value_dim)
    return TTTWeights(config, *sizes, layout, grid_axes(site.layout), device=device, dtype=dtype)


def _free_name(parent: nn.Module, taken: Sequence[str]) -> str:
    """``ttt``, or ``ttt_1``, ``ttt_2``... where the owner has that already."""
    number = 0
    while True:
        name = f"ttt_{number}" if number else "ttt"
        if name not in taken and not hasattr(parent, name):
            return name
        number += 1


def add_recorders(modules: dict[str, nn.Module], sources: Sequence[GridSource], state: GridState) -> None:
    """Hook the modules that tell the token grid, and a model that would miss the attention maps."""
    if hasattr(modules[""], "_can_record_outputs"):
        modules[""].register_forward_pre_hook(RefuseMaps(), with_kwargs=True)
    for source in sources:
        recorder: GridRecorder
        if source.path:
            recorder = PackedRecorder(state, source_name(source), source.path)
        else:
            recorder = GridRecorder(state, source_name(source), source.leaf, source.dims, source.side == "input")
        module = modules[source.module]
        if source.side == "output":
            module.register_forward_hook(recorder)
        else:
            module.register_forward_pre_hook(recorder, with_kwargs=True)


def inspect(model: nn.Module, example_inputs: Any = None, config: TTTConfig = T5) -> Report:
    """List the attention sites of ``model``: what each is, what it costs, and whether it can be converted.

    Changes nothing and computes nothing (one dry run on fake tensors); also works on the meta device.

    Raises:
        InputError: no example inputs, or the model does not run with them.
    """
    _check(model, config)
    if any(map(is_linearized, model.modules())):
        return report(model)
    plan = make_plan(model, *normalize(model, example_inputs), config)
    return Report(type(model).__name__, tuple(planned.site for planned in plan.sites), config, how=plan.how)


def report(model: nn.Module) -> Report:
    """The report of a linearized model: the sites as they were found, with those that were converted.

    Raises:
        T5fxError: ``model`` was not linearized.
    """
    return record_of(model).report


def record_of(model: nn.Module) -> Record:
    """The record that ``linearize`` or ``load`` left on ``model``."""
    record = model.__dict__.get("_t5fx")
    if not isinstance(record, Record):
        inside = next((name for name, m in model.named_modules() if isinstance(m.__dict__.get("_t5fx"), Record)), None)
        hint = f" (its submodule {inside!r} is: pass that)" if inside else ": call t5fx.linearize(model) first"
        raise T5fxError(f"{type(model).__name__} is not linearized{hint}")
    return record


def code(model: nn.Module, owner: str) -> str:
    """The Python code that a converted module runs (of its last traced kind of call), to read.

    Raises:
        T5fxError: ``owner`` names no converted module; the message lists them.
    """
    owners = {name: module for name, module in model.named_modules() if is_linearized(module)}
    if owner not in owners:
        raise T5fxError(f"{owner!r} is no converted module of {type(model).__name__}; those are {list(owners)}")
    module = owners[owner]
    if isinstance(module, torch.fx.GraphModule):
        return str(module.code)
    conversion: Conversion = module._t5fx_owner
    graphs = [entry for entries in conversion.entries.values() for entry in entries]
    if not graphs:
        raise T5fxError(f"{owner!r} was not traced yet: run the model once")
    return graphs[-1].source


def revert(model: Model) -> Model:
    """Undo ``linearize`` (or ``load``): class, forward, hooks and parameters as before; new parameters are dropped.

    Inherited weights keep whatever training made of them.

    Raises:
        T5fxError: ``model`` was not linearized.
    """
    record_of(model)
    _undo(model)
    return model


def _undo(model: nn.Module) -> None:
    for module in list(model.modules()):
        if is_linearized(module):
            uninstall(module)
    for module in model.modules():
        for table in (module._forward_hooks, module._forward_pre_hooks):
            for key in [key for key, hook in table.items() if isinstance(hook, (GridRecorder, RefuseMaps))]:
                del table[key]
                for extra in (module._forward_pre_hooks_with_kwargs, module._forward_hooks_with_kwargs):
                    extra.pop(key, None)
    model.__dict__.pop("_t5fx", None)
