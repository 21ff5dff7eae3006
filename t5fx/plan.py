"""capture -> match: look at a model and decide, site by site, what can be converted.  Nothing is changed.

:func:`make_plan` is all that ``inspect`` does and the first half of ``linearize``; both see the same sites and the
same refusals because they run the same code, traces included.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn
from torch.nn.utils.parametrize import is_parametrized

from .blocks import assign_blocks
from .capture.discover import Discovery, Seen, discover
from .capture.dryrun import clear_fake_caches
from .capture.install import is_linearized
from .capture.owner import attention_calls, trace_owner
from .capture.trace import Traced
from .config import TTTConfig
from .cost import site_cost
from .errors import CaptureError, T5fxError
from .layout import Found, LayoutRule, UserLayout, find, kind_of
from .passes.canonicalize import AttentionCall, occurrences
from .passes.match import Match, mask_kind, match
from .site import Refusal, Site

_KIND_REFUSALS = {
    "cross": "cross attention: {queries} queries read {keys} tokens from elsewhere, so its cost is linear in the "
    "queries already and TTT has nothing to win",
    "pooling": "attention pooling: {queries} learned or single quer{y} read the tokens, so its cost is linear already",
    "channel": "attention over channels (XCA), not over tokens: its cost is linear already",
    "unknown": "queries and keys come through an operator that t5fx does not know, so it can't tell self- from "
    "cross-attention: pass layout= to say that they are the same tokens",
}


@dataclass
class PlannedSite:
    """A site with what is needed to convert it."""

    site: Site
    owner: str  # the module that is traced and installed; site.owner lies in it (a GraphModule holds many)
    rule: LayoutRule | None = None
    uniform_mask: bool = False


@dataclass
class Plan:
    """All sites of a model in order of execution, and its owners' traces (train and eval) by name."""

    config: TTTConfig
    sites: list[PlannedSite]
    traces: dict[str, list[tuple[tuple, dict[str, Any], bool, Traced]]] = field(default_factory=dict)
    calls: dict[str, list[AttentionCall | Refusal]] = field(default_factory=dict)
    training_calls: dict[str, list[AttentionCall | Refusal]] = field(default_factory=dict)
    how: str = "dry run"


def make_plan(
    model: nn.Module,
    args: tuple,
    kwargs: dict[str, Any],
    config: TTTConfig,
    layout: UserLayout = None,
) -> Plan:
    """Discover, trace and match.

    Raises:
        InputError: the model does not run with these inputs.
        LayoutError: a given layout does not fit.
        T5fxError: the model is linearized already, or its weights are offloaded by hooks.
    """
    if any(is_linearized(module) for module in model.modules()):
        raise T5fxError(
            f"{type(model).__name__} is linearized already: t5fx.report(model) shows how; to choose other sites call "
            "t5fx.revert(model) first"
        )
    if (offloaded := _offloaded(model)) is not None:
        raise T5fxError(
            f"{type(model).__name__} has offloading hooks of accelerate or diffusers (on {offloaded!r}): its weights "
            "are not where its forward expects them. Linearize first, add the hooks afterwards "
            "(accelerate.hooks.remove_hook_from_module(model, recurse=True) takes accelerate's away)"
        )
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else []
    with torch.random.fork_rng(devices):  # a forward may draw numbers, even pretended ones
        return _make_plan(model, args, kwargs, config, layout)


def _offloaded(model: nn.Module) -> str | None:
    """A module whose weights come only when its forward is called, and go when it returns."""
    for name, module in model.named_modules():
        hook = module.__dict__.get("_hf_hook")
        if any(getattr(h, "offload", False) for h in (hook, *getattr(hook, "hooks", ()))):
            return name
        if any("group_offloading" in h for h in getattr(module.__dict__.get("_diffusers_hook"), "hooks", ())):
            return name
    return None


def _make_plan(model: nn.Module, args: tuple, kwargs: dict[str, Any], config: TTTConfig, layout: UserLayout) -> Plan:
    discovery = discover(model, args, kwargs)
    modules = dict(model.named_modules())
    plan = Plan(config, [], how=discovery.how)
    problems: dict[str, Refusal] = {}
    for owner in dict.fromkeys(seen.owner for seen in discovery.seen):
        try:
            plan.traces[owner] = _traces(modules[owner], discovery, owner)
            calls = _calls(plan.traces[owner], modules[owner], discovery, owner)
            plan.calls[owner], plan.training_calls[owner] = calls[0], calls[-1]
        except CaptureError as error:
            problems[owner] = Refusal(error.code, str(error))
    for owner in discovery.maps_used:
        problems[owner] = Refusal("map", "its attention map is used elsewhere in the model, and TTT has none")
    for seen in discovery.seen:
        planned = _plan_site(seen, modules, plan, layout)
        problem = problems.get(seen.owner)
        if problem is not None and planned.site.convertible:
            planned.site = planned.site.replace(refusal=problem)
        plan.sites.append(planned)
    classes = {name: type(module).__name__ for name, module in modules.items()}
    grouped = assign_blocks([planned.site for planned in plan.sites], classes)
    for planned, site in zip(plan.sites, grouped, strict=True):
        planned.site = site
    discovery.seen.clear()
    clear_fake_caches()
    return plan


def _traces(owner: nn.Module, discovery: Discovery, name: str) -> list:
    """(args, kwargs, training, trace) for each kind of call, in eval and in train mode."""
    if "forward" in owner.__dict__ and not isinstance(owner, fx.GraphModule):
        raise CaptureError(
            f"the forward of {name!r} was replaced on the instance (as accelerate's hooks do), so a class can't take "
            "effect: linearize first, add such hooks afterwards"
        )
    if is_parametrized(owner):
        raise CaptureError(
            f"{name!r} has parametrizations of its own parameters, which swap its class as linearize does; those of "
            "its submodules are fine"
        )
    traces, seen = [], set()
    for args, kwargs in discovery.owner_calls[name][:4]:
        for training in (False, True) if not isinstance(owner, fx.GraphModule) else (False,):
            traced = trace_owner(owner, args, kwargs, training)
            text = (str(traced.graph), training)
            if text not in seen:
                seen.add(text)
                traces.append((args, kwargs, training, traced))
    return traces


def _calls(traces: list, owner: nn.Module, discovery: Discovery, name: str) -> list[list[AttentionCall | Refusal]]:
    """The owner's attention calls in each of its traces, if all agree with the dry run on how many there are."""
    calls = [attention_calls(traced, owner) for *_, traced in traces]
    seen = sum(s.owner == name for s in discovery.seen)
    counts = sorted({len(c) for c in calls})
    if counts != [seen]:
        raise CaptureError(
            f"{name!r} makes {seen} attention call(s) when it runs, but {counts} in its traced graphs: its "
            "forward takes different ways, in train and eval or from call to call"
        )
    return calls


def _plan_site(seen: Seen, modules: dict[str, nn.Module], plan: Plan, layout: UserLayout) -> PlannedSite:
    """Describe one site and decide on it."""
    call = seen.call
    found: Match | Refusal | None = None
    if seen.owner in plan.calls:
        traced = plan.calls[seen.owner][seen.index]
        if isinstance(traced, Refusal):
            found = traced
        else:
            found = match(traced, drop_bias=plan.config.drop_bias, uniform_mask=seen.mask_is_uniform)
            call = traced
    owner, index = _place(seen, modules, plan)
    query, key, value = call.query.shape, call.key.shape, call.value.shape
    name = owner if index == 0 else f"{owner}:{index}"
    site = Site(
        name=name or "(model)",
        owner=owner,
        index=seen.index,
        form=seen.form,
        kind=kind_of(seen),
        batch=int(query[0]) if len(query) > 3 else 1,
        heads=int(query[-3]) if len(query) > 2 else 1,
        queries=int(query[-2]),
        keys=int(key[-2]),
        head_dim=int(query[-1]),
        value_dim=int(value[-1]),
        mask="key padding" if seen.mask_is_uniform else mask_kind(call),
        notes=_notes(seen, plan) if isinstance(found, Match) else (),
    )
    if site.kind == "unknown" and layout is not None and site.queries == site.keys:
        site = site.replace(kind="self")
    refusal = _refusal(site, found)
    # A layout that the user gave is for the sites that can be converted: it need not fit the others.
    layout_found = find(seen, site, layout if refusal is None else None)
    if refusal is None and isinstance(layout_found, Refusal) and plan.config.dwc is not None:
        refusal = layout_found
    if refusal is None and any(not _same_use(other, seen, site, layout_found) for other in seen.others):
        refusal = Refusal(
            "calls",
            "the module is called more than once in a forward pass, with tokens of different origin or layout: one "
            "set of new weights can't serve both",
        )
    rule = None
    if isinstance(layout_found, Found):
        site = site.replace(layout=layout_found.layout, layout_from=layout_found.words)
        rule = layout_found.rule
    cost = site_cost(
        batch=site.batch,
        heads=site.heads,
        queries=site.queries,
        keys=site.keys,
        head_dim=site.head_dim,
        value_dim=site.value_dim,
        config=plan.config,
        grid_tokens=site.layout.grid_tokens if site.layout else 0,
        element_size=call.query.element_size(),
        grid_axes=len(site.layout.grid) if site.layout and site.layout.grid else 2,
    )
    site = site.replace(
        softmax_flops=cost.softmax_flops,
        ttt_flops=cost.ttt_flops,
        break_even_tokens=cost.break_even_tokens,
        refusal=refusal,
    )
    return PlannedSite(site, seen.owner, rule, seen.mask_is_uniform)


def _notes(seen: Seen, plan: Plan) -> tuple[str, ...]:
    """What the match has to say, in training too (attention dropout)."""
    settings = {"drop_bias": plan.config.drop_bias, "uniform_mask": seen.mask_is_uniform}
    notes: dict[str, None] = {}
    for calls in (plan.calls, plan.training_calls):
        call = calls[seen.owner][seen.index]
        found = match(call, **settings) if not isinstance(call, Refusal) else call
        notes |= dict.fromkeys(found.notes if isinstance(found, Match) else ())
    return tuple(notes)


def _same_use(other: Seen, seen: Seen, site: Site, layout: Found | Refusal) -> bool:
    """Whether another call of the same module attends in the same way, over the same kind of tokens."""
    if kind_of(other) != kind_of(seen):
        return False
    if isinstance(layout, Refusal) or layout.words.startswith("given"):
        return True
    theirs = find(other, site.replace(keys=int(other.call.key.shape[-2])), None)
    if isinstance(theirs, Refusal) or (theirs.rule is None) != (layout.rule is None):
        return False
    return layout.rule is None or theirs.rule is None or theirs.rule.agrees(layout.rule)


def _refusal(site: Site, found: Match | Refusal | None) -> Refusal | None:
    """The most telling reason first: what the site is, then how it is written and what its operands are."""
    if site.kind in _KIND_REFUSALS:
        ending = "y" if site.queries == 1 else "ies"
        return Refusal(site.kind, _KIND_REFUSALS[site.kind].format(queries=site.queries, keys=site.keys, y=ending))
    return found if isinstance(found, Refusal) else None


def _place(seen: Seen, modules: dict[str, nn.Module], plan: Plan) -> tuple[str, int]:
    """Owner and index to show.  In a GraphModule the nodes remember whose forward they were traced from."""
    owner = modules[seen.owner]
    if not isinstance(owner, fx.GraphModule) or seen.owner not in plan.traces:
        return seen.owner, seen.index
    traced = plan.traces[seen.owner][0][3]
    nodes = occurrences(traced.graph, traced.values, owner.get_submodule)
    paths = [_stack_path(node, owner) for node in nodes]
    path = paths[seen.index]
    prefix = f"{seen.owner}." if seen.owner and path else seen.owner
    return prefix + path, paths[: seen.index].count(path)


def _stack_path(node: fx.Node, root: fx.GraphModule) -> str:
    """The innermost submodule of ``root`` that ``node`` was traced in, as far as ``root`` still has it."""
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    paths = [entry[0] if isinstance(entry, tuple) else str(entry) for entry in stack]
    names = {name for name, _ in root.named_modules()}
    for path in reversed(paths):
        path = path.removeprefix("L['self'].")
        if path in names:
            return path
    return ""
