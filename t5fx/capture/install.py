"""Put rewritten graphs into the live model, and take them out again.

The model stays the object it was.  An owner's class is swapped for a subclass of its own class whose forward runs
code generated from the rewritten graph, as ``torch.nn.utils.parametrize`` does; hooks, config, methods, state_dict
keys and isinstance checks stay.  Graphs are kept by the structure of the call (which arguments, which of them tensors
of how many axes, the other values, train or eval); a call that no graph foresaw is traced when it comes.
"""

from __future__ import annotations

import contextlib
import functools
import linecache
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.overrides import _len_torch_function_stack, _pop_mode, _push_mode
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_flatten

from ..config import TTTConfig
from ..errors import CaptureError, T5fxError
from ..passes.canonicalize import AttentionCall, attention_nodes, bind
from ..passes.match import match, value_of
from ..passes.rewrite import rewrite
from ..site import Refusal
from .dryrun import clear_fake_caches, new_fake_mode, preserved, to_fake
from .trace import Retrace, Traced, is_hole, trace


@dataclass(frozen=True)
class SiteSpec:
    """One converted site of an owner.

    ``index``: which of the owner's attention calls; ``ttt``: where its weights are, seen from the owner;
    ``self_attention``: queries and keys are the same tokens; ``config``: without ``dwc`` where there is no grid.
    """

    index: int
    ttt: str
    self_attention: bool
    config: TTTConfig


class Entry:
    """Generated code for one kind of call, and the owner's attributes that it was traced with."""

    def __init__(self, function: Callable, attributes: tuple[tuple[str, bool, Any], ...], source: str) -> None:
        self.function, self.attributes, self.source = function, attributes, source

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
        ("tensor", x.dim()) if isinstance(x, Tensor) else "int" if is_hole(x) else _constant(x) for x in leaves
    )
    return spec, kinds, training


def _constant(x: Any) -> Any:
    if x is None or isinstance(x, (bool, float, str, torch.dtype, torch.device)):
        return x
    return ("object", id(x))


class Linearized:
    """Mixed into an owner's class: forward runs the graph that fits the call."""

    _t5fx_base: type
    _t5fx_owner: Conversion
    training: bool

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        leaves, spec = tree_flatten((args, kwargs))
        key = call_key(spec, leaves, self.training)
        holes = [leaf for leaf in leaves if is_hole(leaf)]
        for entry in self._t5fx_owner.entries.get(key, ()):
            if _unchanged(self, entry.attributes):
                try:
                    return entry.function(self, *holes)
                except Retrace:
                    continue
        entry = _trace_now(self, args, kwargs)
        try:
            return entry.function(self, *holes)
        except Retrace as error:
            raise CaptureError(
                f"{self._t5fx_owner.name!r}: its forward decides on something that changes between a trace and the call ({error})"
            ) from error

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _new_linearized, (type(self)._t5fx_base,), self.__getstate__()  # type: ignore[attr-defined]

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__.copy()

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[misc]
        if not self._t5fx_owner.entries:  # from a pickle; a deepcopy brings them
            warm(self)  # type: ignore[arg-type]


def _unchanged(module: Any, attributes: tuple[tuple[str, bool, Any], ...]) -> bool:
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
        if name in skip or isinstance(value, (Tensor, list, dict, types.MethodType)):
            continue
        by_value = isinstance(value, (bool, int, float, str, type(None), torch.dtype, types.FunctionType))
        found.append((name, by_value, value if by_value else type(value)))
    return tuple(found)


@functools.cache
def linearized_class(base: type) -> type:
    """The subclass of ``base`` that an owner gets."""
    forward = functools.wraps(base.forward)(lambda self, *args, **kwargs: Linearized.forward(self, *args, **kwargs))
    namespace = {"_t5fx_base": base, "forward": forward, "__module__": base.__module__, "__doc__": base.__doc__}
    return type(f"Linearized{base.__name__}", (Linearized, base), namespace)


def _new_linearized(base: type) -> Any:
    cls = linearized_class(base)
    return cls.__new__(cls)


# -- tracing and rewriting an owner ---------------------------------------------------------------------------


def base_class(owner: nn.Module) -> type:
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
        return trace(owner, base.forward, args, kwargs, mode)


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
            Recorder(owner).run(*_placeholders(owner, args, kwargs))
    except Exception as error:
        raise CaptureError(f"the graph does not run on the example inputs: {type(error).__name__}: {error}") from error
    for old, new in mapping.items():
        new.meta = dict(old.meta)
    return Traced(graph, values)


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


def calls_of(traced: Traced) -> list[AttentionCall]:
    """The attention calls of a traced owner, with example values as operands."""
    calls = []
    for node in attention_nodes(traced.graph):
        bound = bind(node.args, node.kwargs)
        calls.append(AttentionCall(**{k: value_of(v, traced.values) for k, v in vars(bound).items()}))
    return calls


def rewrite_owner(traced: Traced, conversion: Conversion) -> fx.Graph:
    """Rewrite the converted sites in a traced owner's graph.

    Raises:
        CaptureError: this kind of call makes another number of attention calls, or one of them in a way that can't
            be converted (a mask, ``is_causal``); the message names the site.
    """
    nodes, calls = attention_nodes(traced.graph), calls_of(traced)
    if len(nodes) != conversion.attention_calls:
        raise CaptureError(
            f"{conversion.name!r} was linearized with {conversion.attention_calls} attention call(s), but called like "
            f"this (or with its present settings) it makes {len(nodes)}: a changed attention processor or "
            "implementation, or output_attentions=True, does that. Undo the change, or t5fx.revert(model) first"
        )
    for spec in conversion.sites:
        found = match(calls[spec.index])
        if isinstance(found, Refusal):
            raise CaptureError(
                f"{conversion.name!r} is linearized, and this call can't be: {found.reason}. Leave this site out of "
                "the selection if the model needs such calls"
            )
        rewrite(traced.graph, nodes[spec.index], found, spec.config, spec.ttt, spec.self_attention)
    return traced.graph


def add_entry(owner: nn.Module, conversion: Conversion, args: tuple, kwargs: dict[str, Any], training: bool,
              traced: Traced | None = None) -> Entry:  # fmt: skip
    """Trace (unless done), rewrite and compile the owner's forward for one kind of call, and keep it."""
    leaves, spec = tree_flatten((args, kwargs))
    traced = traced or trace_owner(owner, args, kwargs, training)
    entry = _generate(rewrite_owner(traced, conversion), conversion.name, _attributes(owner))
    key = call_key(spec, leaves, training)
    conversion.entries.setdefault(key, []).insert(0, entry)
    described = [TensorSpec.of(x) if isinstance(x, Tensor) else x for x in leaves]
    call = (torch.utils._pytree.tree_unflatten(described, spec), training)
    if call not in conversion.calls and all(isinstance(x, (TensorSpec, int, float, str, type(None))) for x in described):
        conversion.calls.append(call)
    return entry


_generated = 0


def _generate(graph: fx.Graph, name: str, attributes: tuple) -> Entry:
    """Compile the graph's code, with its source where tracebacks and debuggers look for it."""
    global _generated
    _generated += 1
    code = graph.python_code("self")
    filename = f"<t5fx {name} #{_generated}>"
    linecache.cache[filename] = (len(code.src), None, code.src.splitlines(keepends=True), filename)
    namespace: dict[str, Any] = dict(code.globals)
    exec(compile(code.src, filename, "exec"), namespace)
    return Entry(namespace["forward"], attributes, code.src)


@contextlib.contextmanager
def _outside_modes() -> Iterator[None]:
    """Leave the dispatch and function modes that are on: inside them (torch.export's, for one) a trace would leave
    its own operators in their graph."""
    popped = [_pop_mode() for _ in range(_len_torch_function_stack())]
    try:
        with _disable_current_modes():
            yield
    finally:
        for mode in reversed(popped):
            _push_mode(mode)


@torch.compiler.disable(
    reason="a module converted by t5fx met a kind of call that it has not seen: run the model once in eager mode with "
    "such inputs before compiling it with fullgraph=True"
)
def _trace_now(module: Any, args: tuple, kwargs: dict[str, Any]) -> Entry:
    with _outside_modes():
        entry = add_entry(module, module._t5fx_owner, args, kwargs, module.training)
        clear_fake_caches()
        return entry


def warm(owner: nn.Module) -> None:
    """Trace an owner's known calls again (after unpickling or loading); one that fails is left for its first use."""
    conversion: Conversion = owner._t5fx_owner  # type: ignore[assignment]
    known, conversion.calls = conversion.calls, []
    for call, training in known:
        with contextlib.suppress(T5fxError):
            args, kwargs = materialize(call, owner)
            add_entry(owner, conversion, args, kwargs, training)


def materialize(call: Any, owner: nn.Module) -> tuple[tuple, dict[str, Any]]:
    """Fake tensors for the :class:`TensorSpec` of a call, where the owner's parameters are."""
    device = next((p.device for p in owner.parameters()), torch.device("cpu"))
    mode = new_fake_mode()

    def make(leaf: Any) -> Any:
        if not isinstance(leaf, TensorSpec):
            return leaf
        with mode:
            return torch.empty_strided(leaf.shape, leaf.strides, dtype=leaf.dtype, device=device)

    return torch.utils._pytree.tree_map(make, call, is_leaf=lambda x: isinstance(x, TensorSpec))


# -- into the model and out again -----------------------------------------------------------------------------


def install(owner: nn.Module, conversion: Conversion, graph: fx.Graph | None = None) -> None:
    """Make ``owner`` run its rewritten graphs; a GraphModule gets the new ``graph`` instead."""
    owner.__dict__["_t5fx_owner"] = conversion
    if isinstance(owner, fx.GraphModule):
        assert graph is not None
        conversion.original_graph = owner.graph
        owner.graph = graph
        owner.recompile()
    else:
        owner.__class__ = linearized_class(type(owner))


def uninstall(owner: nn.Module) -> None:
    """Give ``owner`` its class (or graph) back and drop its new parameters."""
    conversion: Conversion = owner.__dict__.pop("_t5fx_owner")
    if isinstance(owner, fx.GraphModule):
        if conversion.original_graph is None:
            raise CaptureError("a copied or unpickled GraphModule does not remember its original graph: revert the one it came from")
        owner.graph = conversion.original_graph
        owner.recompile()
    else:
        owner.__class__ = base_class(owner)
    for spec in conversion.sites:
        parent, _, name = spec.ttt.rpartition(".")
        delattr(owner.get_submodule(parent), name)


def is_linearized(module: nn.Module) -> bool:
    """Whether this very module (not one inside) was converted."""
    return "_t5fx_owner" in module.__dict__
