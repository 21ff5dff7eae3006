"""Recognise attention that is written out, and write it as one SDPA node instead.

    scores = query @ key.transpose(-2, -1) * scale  (+ mask)        matmul, bmm, baddbmm or einsum; scaled anywhere
    probabilities = softmax(scores)  (dropout)
    out = probabilities @ value

From every softmax the graph is walked back to the product of query and key and on to the product with value.  What
lies between must be understood: a factor, a mask, a cast, a dropout.  Anything else (heads that are mixed, a map that
is pooled) is an :class:`Obstacle`, and the site is refused with it.  :mod:`t5fx.passes.canonicalize` then runs both
forms on random numbers (what is not equal is not trusted), and :mod:`t5fx.passes.replace` writes the SDPA node.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, fx, nn


class Obstacle(Exception):
    """Why something that begins like written-out attention is not the form that is known."""


@dataclass
class Mask:
    """A mask on the scores: ``kind`` is "float" (added), "keep" or "hide" (where it is True); ``scores`` are the scores
    as they were then (a reshape of the product, in shifted windows)."""

    kind: str
    node: fx.Node
    scores: fx.Node


@dataclass
class Written:
    """The parts of a written-out attention: nodes of the graph.  ``chain`` are the nodes that it consists of."""

    softmax: fx.Node
    out: fx.Node
    query: fx.Node
    key: fx.Node
    value: fx.Node
    key_transposed: bool
    scale: Any = 1.0
    masks: list[Mask] = field(default_factory=list)
    product: fx.Node | None = None
    dropout: Any = 0.0
    chain: list[fx.Node] = field(default_factory=list)
    map_users: list[fx.Node] = field(default_factory=list)
    factors: list[fx.Node] = field(default_factory=list)  # numbers that the scale was computed from


CASTS = {"to", "float", "half", "bfloat16", "double", "type_as", "contiguous", "clone", "type", "_to_copy"}
VIEWS = {"view", "reshape", "flatten", "unflatten", "unsafe_view"}
PRODUCTS = {"matmul", "bmm", "baddbmm", "einsum"}


def name_of(node: fx.Node, modules: Callable[[str], nn.Module] | None = None) -> str:
    """The operation of a node, whether function, operator, method, ATen overload or module: "matmul", "softmax"..."""
    if node.op == "call_method":
        name = str(node.target)
    elif node.op == "call_function":
        packet = getattr(node.target, "overloadpacket", None)
        name = getattr(packet or node.target, "__name__", "")
    elif node.op == "call_module" and modules is not None:
        name = type(modules(str(node.target))).__name__.lower()
    else:
        return ""
    name = name.strip("_")
    if name.startswith("r") and name[1:] in ("matmul", "mul", "add"):
        name = name[1:]
    if name.startswith("i") and name[1:] in ("add", "mul", "truediv"):
        name = name[1:]
    return {"truediv": "div", "true_divide": "div", "multiply": "mul", "divide": "div"}.get(name, name)


def without_factors(node: Any, written: Written, values: dict[fx.Node, Any]) -> Any:
    """The tensor that ``node`` is numbers times; these go to the scale of the scores."""
    while name_of(node) in ("mul", "div") and len(node.args) == 2:
        first, second = node.args
        number = values.get(second, second) if isinstance(second, fx.Node) else second
        if not isinstance(number, (int, float)) or not isinstance(first, fx.Node):
            break
        if isinstance(second, fx.Node):
            written.factors.append(second)
        written.scale = written.scale / number if name_of(node) == "div" else written.scale * number
        node = first
    return node


class Recognizer:
    """Finds written-out attention in a graph whose nodes have example values."""

    def __init__(self, graph: fx.Graph, values: dict[fx.Node, Any], modules: Callable[[str], nn.Module]) -> None:
        self.graph, self.values, self.modules = graph, values, modules

    def name(self, node: Any) -> str:
        return name_of(node, self.modules) if isinstance(node, fx.Node) else ""

    def is_tensor(self, x: Any) -> bool:
        return isinstance(x, fx.Node) and isinstance(self.values.get(x), Tensor)

    def _is_activation(self, x: Any) -> bool:
        return self.is_tensor(x) and x.op != "get_attr"

    def softmaxes(self) -> list[fx.Node]:
        """The softmaxes between two products: attention of some form."""
        return [
            node
            for node in self.graph.nodes
            if self.name(node) in ("softmax", "safe_softmax")
            and self.is_tensor(node)
            and self._leads_to_product(node)
            and self._reaches_product(node)
        ]

    def around(self, softmax: fx.Node) -> Written:
        """The written-out attention around a softmax.

        Raises:
            Obstacle: it is of another form.
        """
        written = Written(softmax, softmax, softmax, softmax, softmax, False)
        source = softmax.args[0] if softmax.args else softmax.kwargs.get("input")
        assert isinstance(source, fx.Node)
        self._back(source, written)
        self._forth(softmax, written)
        dim = softmax.args[1] if len(softmax.args) > 1 else softmax.kwargs.get("dim")
        if softmax.op == "call_module":
            dim = getattr(self.modules(str(softmax.target)), "dim", None)
        if dim not in (-1, self.values[softmax].dim() - 1):
            raise Obstacle(f"the softmax runs over axis {dim}, not over the keys")
        return written

    def _leads_to_product(self, node: fx.Node, depth: int = 12) -> bool:
        """Whether the scores come, through whatever, from a product of two activations."""
        if self.name(node) in PRODUCTS and sum(self._is_activation(a) for a in self._operands(node)) >= 2:
            return True
        if depth == 0 or node.op in ("placeholder", "get_attr"):
            return False
        shape = self.values[node].shape if self.is_tensor(node) else ()
        same = self.values[node].numel() if self.is_tensor(node) else -1
        inputs = [a for a in node.all_input_nodes if self.is_tensor(a)]
        inputs = [a for a in inputs if self.values[a].dim() >= len(shape) or self.values[a].numel() == same]
        return any(self._leads_to_product(a, depth - 1) for a in inputs)

    def _reaches_product(self, node: fx.Node, depth: int = 8) -> bool:
        for user in node.users:
            if self.name(user) in PRODUCTS and self._operands(user)[0] is node:
                return True
            if depth and self.is_tensor(user) and self._reaches_product(user, depth - 1):
                return True
        return False

    def _operands(self, node: Any) -> list[Any]:
        args = list(node.args) + list(node.kwargs.values())
        if self.name(node) == "einsum":
            rest = args[1:]
            return list(rest[0]) if len(rest) == 1 and isinstance(rest[0], (list, tuple)) else rest
        return args[1:3] if self.name(node) == "baddbmm" else args[:2]

    # -- from the softmax back to query and key ----------------------------------------------------------

    def _back(self, node: Any, written: Written) -> None:
        while True:
            written.chain.append(node)
            name = self.name(node)
            args: list[Any] = list(node.args)
            if name in PRODUCTS:
                written.product = node
                return self._product(node, written)
            if name in CASTS or name in VIEWS:
                node = args[0]
            elif name in ("mul", "div") and len(args) == 2:
                node = self._factor(name, args, written)
            elif name == "add" and len(args) == 2:
                node, mask = self._scores_first(args)
                if written.scale != 1:  # walking back, a factor that was met first applies to the mask as well
                    raise Obstacle("the scores are scaled after a mask was added")
                written.masks.append(Mask("float", mask, node))
            elif name == "masked_fill" and self._is_minus_infinity(args[2] if len(args) > 2 else None):
                node, mask = args[0], args[1]
                written.masks.append(Mask("hide", mask, node))
            elif name == "where" and len(args) == 3 and isinstance(args[0], fx.Node):
                keep = self.is_tensor(args[1]) and self._leads_to_product(args[1])
                fill = args[2] if keep else args[1]
                if not self._is_minus_infinity(fill):
                    raise Obstacle("torch.where replaces scores by something else than minus infinity")
                node = args[1] if keep else args[2]
                written.masks.append(Mask("keep" if keep else "hide", args[0], node))
            else:
                raise Obstacle(f"{name or node.op} ({node.name}) stands between the scores and the softmax")
            if not isinstance(node, fx.Node):
                raise Obstacle("the scores are not computed from a query and a key")

    def _scores_first(self, args: list[Any]) -> tuple[fx.Node, fx.Node]:
        first, second = args
        if self.is_tensor(first) and self._leads_to_product(first):
            if not self.is_tensor(second):
                raise Obstacle("a number is added to the scores")
            return first, second
        if not self.is_tensor(first):
            raise Obstacle("a number is added to the scores")
        return second, first

    def _factor(self, name: str, args: list[Any], written: Written) -> fx.Node:
        first, second = args
        if name == "mul" and not (self.is_tensor(first) and self._leads_to_product(first)):
            first, second = second, first
        written.scale = self._times(written, second, name == "div")
        return first

    def _times(self, written: Written, factor: Any, divide: bool) -> Any:
        scale = written.scale
        value = self.values.get(factor, factor) if isinstance(factor, fx.Node) else factor
        if isinstance(value, Tensor):
            raise Obstacle("the scores are scaled by a tensor (a learned temperature)")
        if isinstance(factor, fx.Node):
            written.factors.append(factor)
        number = float(value)
        return scale / number if divide else scale * number

    def _is_minus_infinity(self, fill: Any) -> bool:
        value = self.values.get(fill, fill) if isinstance(fill, fx.Node) else fill
        return isinstance(value, (int, float)) and value <= -1e4

    def _product(self, node: Any, written: Written) -> None:
        operands = self._operands(node)
        if len(operands) != 2 or not all(map(self.is_tensor, operands)):
            raise Obstacle("the scores are not the product of two tensors")
        query, key = operands
        written.key_transposed = True
        if self.name(node) == "einsum":
            written.key_transposed = self._scores_equation(str(node.args[0]))
        if self.name(node) == "baddbmm":
            settings = {**{"beta": 1, "alpha": 1}, **node.kwargs}
            if settings["beta"] != 0:
                written.masks.append(Mask("float", node.args[0], node))
            written.scale = self._times(written, settings["alpha"], False)
        written.query, written.key = query, key
        for side in ("query", "key"):  # a factor on query or key is a factor on the scores
            setattr(written, side, without_factors(getattr(written, side), written, self.values))

    @staticmethod
    def _scores_equation(equation: str) -> bool:
        """``b h i d, b h j d -> b h i j``; True if the key comes with its channels before its tokens."""
        left, _, out = equation.replace(" ", "").partition("->")
        query, _, key = left.partition(",")
        if len(out) < 2 or query[:-1] != out[:-1]:
            raise Obstacle(f"einsum {equation!r} is not query times key")
        channel, tokens = query[-1], out[-1]
        if key == f"{out[:-2]}{tokens}{channel}":
            return False
        if key == f"{out[:-2]}{channel}{tokens}":
            return True
        raise Obstacle(f"einsum {equation!r} is not query times key")

    # -- from the softmax forth to the product with value ------------------------------------------------

    def _forth(self, node: fx.Node, written: Written) -> None:
        while True:
            written.chain.append(node)
            product = next((u for u in node.users if self.name(u) in PRODUCTS and self._operands(u)[0] is node), None)
            if product is not None:
                break
            step = next((u for u in node.users if self.name(u) in CASTS or "dropout" in self.name(u)), None)
            if step is None:
                step = next((u for u in node.users if self.name(u) == "identity"), None)
            if step is None:
                users = ", ".join(u.name for u in node.users) or "nothing"
                raise Obstacle(f"the attention map is used by {users}, not multiplied with a value")
            written.map_users += [u for u in node.users if u is not step]
            if "dropout" in self.name(step):
                written.dropout = self._dropout(step)
            node = step
        written.map_users += [u for u in node.users if u is not product]
        operands = self._operands(product)
        if self.name(product) == "einsum":
            self._value_equation(str(product.args[0]))
        if self.name(product) == "baddbmm" or not self.is_tensor(operands[1]):
            raise Obstacle("the attention map is not multiplied with a value")
        written.value, written.out = operands[1], product

    def _dropout(self, node: fx.Node) -> float:
        if node.op == "call_module":
            module: Any = self.modules(str(node.target))
            return module.p if module.training else 0.0
        p: Any = node.args[1] if len(node.args) > 1 else node.kwargs.get("p", 0.5)
        training = node.args[2] if len(node.args) > 2 else node.kwargs.get("training", True)
        return float(self.values.get(p, p)) if training else 0.0

    @staticmethod
    def _value_equation(equation: str) -> None:
        left, _, out = equation.replace(" ", "").partition("->")
        probabilities, _, value = left.partition(",")
        if out != probabilities[:-1] + value[-1:] or value != f"{probabilities[:-2]}{probabilities[-1]}{value[-1:]}":
            raise Obstacle(f"einsum {equation!r} is not the attention map times a value")
