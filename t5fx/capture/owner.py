"""One owner: trace its forward, rewrite its sites, turn the graph into code, and remember for which calls.

Graphs are kept by the structure of the call: which arguments there are, which of them are tensors and of how many
axes, the values of the others, and train or eval.
"""

from __future__ import annotations

import copy
import linecache
import types
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from ..config import TTTConfig
from ..errors import CaptureError
from ..passes.canonicalize import AttentionCall, bind, canonicalize, occurrences
from ..passes.match import match, value_of
from ..passes.registry import FORWARDS
from ..passes.replace import sweep
from ..passes.rewrite import rewrite
from ..passes.written import Obstacle
from ..site import Refusal
from .dryrun import fake_buffers, new_fake_mode, preserved, to_fake
from .trace import Traced, is_hole, trace


@dataclass(frozen=True)
class SiteSpec:
    """One converted site of an owner.

    ``index``: which of the owner's attention calls; ``ttt``: where its weights are, seen from the owner;
    ``self_attention``: queries and keys are the same tokens; ``config``: without ``dwc`` where there is no grid;
    ``uniform_mask``: its boolean mask is spread over the queries, and compared in every call.
    """

    index: int
    ttt: str
    self_attention: bool
    config: TTTConfig
    uniform_mask: bool = False


class Entry:
    """Generated code for one kind of call, and the owner's attributes that it was traced with."""

    def __init__(self, function: Callable, attributes: tuple[tuple[str, bool, Any], ...], source: str) -> None:
        self.function, self.attributes, self.source = function, attributes, source
        self.holds: list[Any] = []

    def __deepcopy__(self, memo: dict) -> Entry:
        return self  # code takes the module as an argument: copies of a model share it


@dataclass
class Conversion:
    """What was done to one owner; lives on it as ``_t5fx_owner``.

    ``calls`` are the owner's calls as they were traced, with (shape, dtype) in place of tensors, so that a copy or a
    loaded model can trace them again.
    """

    name: str
    sites: tuple[SiteSpec, ...]
    attention_calls: int
    entries: dict[Any, list[Entry]] = field(default_factory=dict)
    calls: list[tuple[Any, bool]] = field(default_factory=list)
    original_graph: fx.Graph | None = None
    processor: type | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "entries": {}, "original_graph": None}

    def __deepcopy__(self, memo: dict) -> Conversion:
        entries = {key: list(kept) for key, kept in self.entries.items()}
        return replace(self, entries=entries, calls=list(self.calls))


@dataclass(frozen=True)
class TensorSpec:
    """Stands for a tensor argument of a call."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: Tensor) -> TensorSpec:
        return cls(tuple(map(int, tensor.shape)), tuple(map(int, tensor.stride())), tensor.dtype)


def call_key(spec: Any, leaves: list, training: bool) -> tuple:
    """The structure of a call: equal keys can share a graph."""
    kinds = tuple(
        ("tensor", x.dim()) if isinstance(x, Tensor) else type(x).__name__ if is_hole(x) else _constant(x)
        for x in leaves
    )
    return spec, kinds, training


def _constant(x: Any) -> Any:
    if x is None or isinstance(x, (bool, float, str, torch.dtype, torch.device)):
        return x
    return ("object", id(x))


_PLAIN = (bool, int, float, str, type(None), torch.dtype, types.FunctionType)


def unchanged(module: Any, attributes: tuple[tuple[str, bool, Any], ...]) -> bool:
    for name, by_value, known in attributes:
        value = getattr(module, name, None)
        if (value != known) if by_value else (type(value) is not known):
            return False
    return True


def _attributes(owner: nn.Module) -> tuple[tuple[str, bool, Any], ...]:
    """The attributes that a forward may branch on: plain values, and the types of other objects (processors)."""
    skip = {"training", *nn.Module().__dict__, "_t5fx_owner", "_t5fx"}
    found: list[tuple[str, bool, Any]] = []
    for name, value in owner.__dict__.items():
        if name in skip or isinstance(value, (Tensor, types.MethodType)):
            continue
        if isinstance(value, (list, tuple, dict, set)):
            if all(isinstance(leaf, _PLAIN) for leaf in tree_leaves(value)):
                found.append((name, True, copy.copy(value)))
            continue
        by_value = isinstance(value, _PLAIN)
        found.append((name, by_value, value if by_value else type(value)))
    if "processor" in owner._modules:  # a processor may be a module; other submodules may change as they like
        found.append(("processor", False, type(owner._modules["processor"])))
    return tuple(found)


def processor_type(owner: nn.Module) -> type | None:
    """The class of the object that computes a diffusers module's attention."""
    processor = getattr(owner, "processor", None)
    return None if processor is None else type(processor)


def base_class(owner: nn.Module) -> Any:
    return getattr(type(owner), "_t5fx_base", type(owner))


def trace_owner(owner: nn.Module, args: tuple, kwargs: dict[str, Any], training: bool) -> Traced:
    """Trace the owner's own forward on fakes of ``args`` and ``kwargs``, in train or eval mode.

    Raises:
        CaptureError: it can't be traced.
    """
    mode = new_fake_mode()
    args, kwargs = to_fake((args, kwargs), mode)
    if isinstance(owner, fx.GraphModule):
        return trace_graph(owner, args, kwargs, mode)
    base = base_class(owner)
    with preserved(owner):
        owner.__dict__["training"] = training
        fake_buffers(owner, mode)
        return trace(owner, FORWARDS.get(base.forward, base.forward), args, kwargs, mode)


def trace_graph(owner: fx.GraphModule, args: tuple, kwargs: dict[str, Any], mode: Any) -> Traced:
    """A graph that the user traced needs no trace: a copy of it, with the value of every node."""
    graph = fx.Graph()
    mapping: dict[fx.Node, fx.Node] = {}
    output = graph.graph_copy(owner.graph, mapping)
    graph.output(output)
    graph._codegen = owner.graph._codegen
    values: dict[fx.Node, Any] = {}

    class Recorder(fx.Interpreter):
        def run_node(self, n: fx.Node) -> Any:
            value = super().run_node(n)
            if n in mapping:
                values[mapping[n]] = value
            return value

    try:
        with preserved(owner), mode, torch.no_grad():
            fake_buffers(owner, mode)
            Recorder(owner).run(*_placeholders(owner, args, kwargs))
    except Exception as error:
        raise CaptureError(f"the graph does not run on the example inputs: {type(error).__name__}: {error}") from error
    for old, new in mapping.items():
        new.meta = dict(old.meta)
    return Traced(graph, values, mode)


def _placeholders(owner: fx.GraphModule, args: tuple, kwargs: dict[str, Any]) -> list[Any]:
    """Arguments in the order of the graph's placeholders (an Interpreter takes no keywords)."""
    names = [n for n in owner.graph.nodes if n.op == "placeholder"]
    if not kwargs and len(args) >= len([n for n in names if not n.args]):
        return list(args)
    rest = names[len(args) :]
    by_name = {str(n.target).lstrip("*"): n for n in rest}
    unknown = [k for k in kwargs if k not in by_name]
    if unknown:
        raise CaptureError(f"the graph has no input {unknown[0]!r}; it has {list(by_name)}")
    return [*args, *(kwargs[name] if name in kwargs else n.args[0] for name, n in by_name.items())]


def attention_calls(traced: Traced, owner: nn.Module) -> list[AttentionCall | Refusal]:
    """The attention of a traced owner in order of execution, with example values as operands; the graph stays.

    What begins like attention and is not of a known form is a Refusal.
    """
    graph = fx.Graph()
    mapping: dict[fx.Node, fx.Node] = {}
    graph.output(graph.graph_copy(traced.graph, mapping))
    values = {new: traced.values[old] for old, new in mapping.items() if old in traced.values}
    calls: list[AttentionCall | Refusal] = []
    for node in occurrences(graph, values, owner.get_submodule):
        try:
            calls.append(_operands(canonicalize(graph, node, values, owner.get_submodule, traced.mode), values))
        except Obstacle as obstacle:
            calls.append(Refusal("form", f"attention of a form that t5fx does not know: {obstacle}"))
    return calls


def _operands(node: fx.Node, values: dict[fx.Node, Any]) -> AttentionCall:
    bound = bind(node.args, node.kwargs)
    return AttentionCall(**{k: value_of(v, values) for k, v in vars(bound).items()})


def rewrite_owner(traced: Traced, conversion: Conversion, owner: nn.Module) -> fx.Graph:
    """Rewrite the converted sites in a traced owner's graph.

    Raises:
        CaptureError: this kind of call makes another number of attention calls, or one of them in a way that can't
            be converted (a mask, ``is_causal``); the message names the site.
    """
    graph, values = traced.graph, traced.values
    nodes = occurrences(graph, values, owner.get_submodule)
    if len(nodes) != conversion.attention_calls:
        raise CaptureError(
            f"{conversion.name!r} was linearized with {conversion.attention_calls} attention call(s), but called like "
            f"this (or with its present settings) it makes {len(nodes)}: a changed attention processor or "
            "implementation, or output_attentions=True, does that. Undo the change, or t5fx.revert(model) first"
        )
    matched = []
    for spec in conversion.sites:
        try:
            node = canonicalize(graph, nodes[spec.index], values, owner.get_submodule, traced.mode)
            call = _operands(node, values)
            # A mask that was not there at conversion may be spread over the queries (transformers does that under
            # torch.export): key_padding compares the numbers of one of four axes in every call.
            uniform = spec.uniform_mask or (isinstance(call.attn_mask, Tensor) and call.attn_mask.dim() == 4)
            found: Any = match(call, drop_bias=spec.config.drop_bias, uniform_mask=uniform)
        except Obstacle as obstacle:
            found = Refusal("form", str(obstacle))
        if isinstance(found, Refusal):
            raise CaptureError(
                f"{conversion.name!r} is linearized, and this call can't be: {found.reason}. Leave this site out of "
                "the selection if the model needs such calls"
            )
        matched.append((node, found, spec))
    for node, found, spec in matched:
        rewrite(graph, node, found, spec.config, spec.ttt, spec.self_attention)
    sweep(graph)
    return graph


def add_entry(owner: nn.Module, conversion: Conversion, args: tuple, kwargs: dict[str, Any], training: bool,
              traced: Traced | None = None) -> Entry:  # fmt: skip
    """Trace (unless done), rewrite and compile the owner's forward for one kind of call, and keep it."""
    leaves, spec = tree_flatten((args, kwargs))
    if processor_type(owner) is not conversion.processor:
        names = [getattr(kind, "__name__", "none") for kind in (conversion.processor, processor_type(owner))]
        raise CaptureError(
            f"the attention processor of {conversion.name!r} was {names[0]} when it was linearized and is {names[1]} "
            "now: a processor computes softmax attention, and this module no longer does. Put the old one back, or "
            "t5fx.revert(model), set the processor and linearize again"
        )
    traced = traced or trace_owner(owner, args, kwargs, training)
    entry = generate(rewrite_owner(traced, conversion, owner), conversion.name, _attributes(owner))
    entry.holds = [x for x in leaves if not is_hole(x)]  # objects whose ids are in the key must stay alive
    key = call_key(spec, leaves, training)
    conversion.entries.setdefault(key, []).insert(0, entry)
    while sum(map(len, conversion.entries.values())) > _MOST_GRAPHS:
        oldest = next(iter(conversion.entries))
        conversion.entries[oldest].pop()
        if not conversion.entries[oldest]:
            del conversion.entries[oldest]
    described = [TensorSpec.of(x) if isinstance(x, Tensor) else x for x in leaves]
    call = (tree_unflatten(described, spec), training)
    if call not in conversion.calls and all(
        isinstance(x, (TensorSpec, int, float, str, type(None))) for x in described
    ):
        conversion.calls.append(call)
    return entry


_MOST_GRAPHS = 64  # of one owner: calls with ever new objects among their arguments would grow without end
_generated = 0


def generate(graph: fx.Graph, name: str, attributes: tuple) -> Entry:
    """Compile the graph's code, with its source where tracebacks and debuggers look for it."""
    global _generated
    _generated += 1
    code = graph.python_code("self")
    filename = f"<t5fx {name} #{_generated}>"
    linecache.cache[filename] = (len(code.src), None, code.src.splitlines(keepends=True), filename)
    namespace: dict[str, Any] = dict(code.globals)
    exec(compile(code.src, filename, "exec"), namespace)
    return Entry(namespace["forward"], attributes, code.src)


def materialize(call: Any, owner: nn.Module) -> tuple[tuple, dict[str, Any]]:
    """Fake tensors for the :class:`TensorSpec` of a call, where the owner's parameters are."""
    device = next((p.device for p in owner.parameters()), torch.device("cpu"))
    mode = new_fake_mode()

    def make(leaf: Any) -> Any:
        if not isinstance(leaf, TensorSpec):
            return leaf
        with mode:
            return torch.empty_strided(leaf.shape, leaf.strides, dtype=leaf.dtype, device=device)

    return tree_map(make, call, is_leaf=lambda x: isinstance(x, TensorSpec))
