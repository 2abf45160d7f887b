"""Operators by domain, type and opset, each declaring all that it honours.

Whatever a node carries beyond its operator's declaration (an attribute, a value of it, a non-empty optional
input, an element type) is a named problem, never ignored.
"""

import enum
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import numpy as np

from onnx_import.graph import Node, Tensor
from onnx_import.protocols import Attention, FixedSpec, FixedState

FLOATS = frozenset(("float32", "float16", "bfloat16"))
INTEGERS = frozenset(("int32", "int64"))
FLOATING = FLOATS | frozenset(("bfloat16",))
NUMBERS = FLOATING | INTEGERS | frozenset(("int8", "int16", "uint8", "uint16", "uint32"))
"""Element types that standard operators take: whatever JAX holds without its 64-bit mode (int64 as int32)."""
TENSORS = NUMBERS | frozenset(("bool",))
REQUIRED = object()


class Role(enum.Enum):
    """How an operator uses one of its inputs."""

    VALUE = "value"
    """An activation, or a constant used as it is."""
    WEIGHT = "weight"
    """A constant that the operator lays out its own way when loading."""
    OPERAND = "operand"
    """A weight where it is a constant that `weights` plans, else a value."""
    STATIC = "static"
    """Integers that shape the program: a small constant, or folded from constants and shapes."""
    UNREAD = "unread"
    """Never read: the caller's attention knows better (masks, lengths, caches)."""
    REFUSED = "refused"
    """Known, and not implemented: must be absent."""


@dataclass(frozen=True)
class Input:
    """One input of an operator; `dtypes` binds constants only, activations follow from them.

    A `variadic` one comes last and stands for any number of inputs, which arrive as name_0, name_1, ...
    """

    name: str
    role: Role = Role.VALUE
    optional: bool = False
    dtypes: frozenset[str] = FLOATS
    variadic: bool = False


@dataclass(frozen=True)
class Attribute:
    """An honoured attribute: its default, and where not every value is honoured, the ones that are.

    `of` is the type of its values where the default doesn't tell; a required one is an integer unless it says more.
    """

    default: Any = REQUIRED
    only: tuple[Any, ...] | None = None
    of: type | None = None

    @property
    def kind(self) -> type:
        """The type that a value has as read from a file."""
        return self.of or (int if self.default is REQUIRED or self.default is None else type(self.default))


@dataclass(frozen=True)
class WeightPlan:
    """How one parameter is made from tensors of the file: known without reading any of them.

    `struct` is a pytree of jax.ShapeDtypeStruct, `build` turns the sources' arrays into that pytree.
    """

    key: str
    struct: Any
    sources: tuple[Tensor, ...]
    build: Callable[..., Any]

    @staticmethod
    def plain(tensor: Tensor) -> "WeightPlan":
        """The tensor as it is."""
        return WeightPlan(tensor.key, jax.ShapeDtypeStruct(tensor.shape, tensor.dtype), (tensor,), np.asarray)


@dataclass(frozen=True)
class Call:
    """A node checked against its operator: attributes with defaults, static inputs as integers.

    `layer` is that of an attention node, -1 for others; `fixed` says which fixed state the node reads, if any.
    """

    node: Node
    attributes: Mapping[str, Any]
    statics: Mapping[str, tuple[int, ...]]
    layer: int
    fixed: FixedSpec | None = None


@dataclass(frozen=True)
class Environment:
    """What a step gives to operators besides their inputs.

    `limits` int32 [tokens] is how many tokens each token's sequence may come to hold, or None where nobody said.
    `staged` and `staged_fixed` collect what the callables hand back, by attention layer and by fixed state's name;
    `evidence` collects what must not depend on how many tokens are packed: the sizes that calls combine along and the
    folded values that they compute with.
    """

    positions: jax.Array
    attention: Attention
    fixed: FixedState | None = None
    limits: jax.Array | None = None
    staged: dict[int, Any] = field(default_factory=dict)
    staged_fixed: dict[str, Any] = field(default_factory=dict)
    evidence: dict[str, Any] = field(default_factory=dict)


Arguments = Mapping[str, Any]
Results = tuple[jax.Array | np.ndarray | None, ...]
Combines = Callable[[Call, Arguments], Iterable[int]]
Run = Callable[[Call, Arguments, Environment], Results]


@dataclass(frozen=True)
class Operator:
    """An operator as implemented from opset `since` on.

    `check` yields problems beyond the declarations; `weights` plans the WEIGHT inputs, by input name (inputs it
    leaves out are consumed by another's plan); `outputs` are the outputs that `run` can fill, `caches` those after
    them that belong to the caller; `key_cache` is the index of the input that names an attention's keys, `state` of the
    one that names a fixed state; `batched` operators want a batch axis in front of the tokens. Outputs of one
    `of_shapes` follow from its inputs' shapes alone. `combines` gives the sizes of the axes along which elements meet,
    or are told apart by their place.
    """

    domain: str
    op_type: str
    since: int
    inputs: tuple[Input, ...]
    attributes: Mapping[str, Attribute]
    run: Run
    outputs: tuple[int, ...] = (0,)
    caches: tuple[int, ...] = ()
    key_cache: int | None = None
    state: int | None = None
    batched: bool = False
    weights: Callable[[Call, Mapping[str, Tensor], str], Mapping[str, WeightPlan]] | None = None
    check: Callable[[Call, Mapping[str, Tensor]], Iterator[str]] | None = None
    of_shapes: bool = False
    combines: Combines | None = None

    def inputs_of(self, node: Node) -> tuple[Input, ...]:
        """One rule for each input that this node may have, the variadic one repeated."""
        if not self.inputs or not self.inputs[-1].variadic:
            return self.inputs
        *fixed, last = self.inputs
        repeated = (replace(last, name=f"{last.name}_{i}") for i in range(len(node.inputs) - len(fixed)))
        return (*fixed, *repeated)

    @property
    def is_attention(self) -> bool:
        """True for operators that call the attention protocol."""
        return self.key_cache is not None

    @property
    def looks_back(self) -> bool:
        """True for operators whose result at a token depends on earlier tokens."""
        return self.key_cache is not None or self.state is not None


class Registry:
    """A set of operators; lookup takes the newest one not above the asked opset."""

    def __init__(self, operators: Sequence[Operator]) -> None:
        self._table: dict[tuple[str, str], list[Operator]] = {}
        for operator in sorted(operators, key=lambda item: -item.since):
            self._table.setdefault((operator.domain, operator.op_type), []).append(operator)

    def find(self, domain: str, op_type: str, opset: int) -> Operator | None:
        """The newest implementation not above `opset`, or None."""
        return next(iter(self.candidates(domain, op_type, opset)), None)

    def candidates(self, domain: str, op_type: str, opset: int) -> list[Operator]:
        """All implementations not above `opset`, newest first."""
        return [op for op in self._table.get((domain, op_type), ()) if op.since <= opset]


def resolve(
    operator: Operator,
    node: Node,
    tensors: Mapping[str, Tensor],
    layer: int,
    problems: list[str],
    folded: Collection[str] = (),
    fixed: FixedSpec | None = None,
) -> Call:
    """Check a node against its operator, appending every problem found, and fill in defaults.

    `folded` names the values that are known while a program is traced.
    """
    attributes = _attributes(operator, node, problems)
    statics = _inputs(operator, node, tensors, problems, folded)
    for index, name in enumerate(node.outputs):
        if name and index not in operator.outputs + operator.caches:
            problems.append(f"{node.label} fills output {index}, which isn't supported")
    return Call(node, attributes, statics, layer, fixed)


def _attributes(operator: Operator, node: Node, problems: list[str]) -> dict[str, Any]:
    values = {name: rule.default for name, rule in operator.attributes.items()}
    for name, value in node.attributes.items():
        rule = operator.attributes.get(name)
        if rule is None:
            problems.append(f"{node.label} has attribute {name!r}, which isn't known")
        elif not isinstance(value, rule.kind) or (rule.only is not None and value not in rule.only):
            problems.append(f"{node.label} has {name}={value!r}, which isn't supported")
        values[name] = value
    for name, value in values.items():
        if value is REQUIRED:
            problems.append(f"{node.label} lacks the attribute {name!r}")
    return values


def _inputs(
    operator: Operator,
    node: Node,
    tensors: Mapping[str, Tensor],
    problems: list[str],
    folded: Collection[str],
) -> dict[str, tuple[int, ...]]:
    statics: dict[str, tuple[int, ...]] = {}
    rules = operator.inputs_of(node)
    known = len(rules)
    beyond = filter(None, node.inputs[known:])
    problems.extend(f"{node.label} has an input {name!r} past the {known} that are known" for name in beyond)
    for index, rule in enumerate(rules):
        name = node.inputs[index] if index < len(node.inputs) else ""
        tensor = tensors.get(name)
        if not name:
            if not rule.optional and rule.role not in (Role.UNREAD, Role.REFUSED):
                problems.append(f"{node.label} lacks its input {rule.name!r}")
        elif rule.role is Role.REFUSED:
            problems.append(f"{node.label} uses the input {rule.name!r} ({name!r}), which isn't supported")
        elif rule.role is Role.UNREAD:
            continue
        elif tensor is not None and tensor.dtype.name not in rule.dtypes:
            problems.append(
                f"{node.label} has {rule.name} {name!r} of type {tensor.dtype.name}, which isn't supported"
            )
        elif tensor is None and rule.role is Role.STATIC and name in folded:
            continue
        elif tensor is None and rule.role in (Role.WEIGHT, Role.STATIC):
            problems.append(f"{node.label} needs its input {rule.name!r} ({name!r}) to be a constant")
        elif tensor is not None and rule.role is Role.STATIC:
            if tensor.raw is None:
                problems.append(
                    f"{node.label} has its {rule.name!r} ({name!r}) in external data, which isn't supported"
                )
            else:
                statics[rule.name] = tuple(int(item) for item in np.ravel(tensor.raw))
        elif tensor is not None and tensor.raw is not None and _exceeds_32_bits(tensor.raw):
            problems.append(f"{node.label} has integers in {rule.name} {name!r} that don't fit 32 bits")
    return statics


def _exceeds_32_bits(array: np.ndarray) -> bool:
    return array.dtype == np.int64 and bool((array != array.astype(np.int32)).any())


def reads(operator: Operator | None, node: Node) -> tuple[str, ...]:
    """The names of the inputs that a node reads while running; all of them for an unknown operator."""
    if operator is None:
        return tuple(filter(None, node.inputs))
    unread = {
        i for i, rule in enumerate(operator.inputs_of(node)) if rule.role in (Role.UNREAD, Role.REFUSED)
    }
    return tuple(name for index, name in enumerate(node.inputs) if name and index not in unread)
