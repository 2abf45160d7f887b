"""From graph to plan: which calls run, in which order, where rows are selected, and all that isn't supported.

Planning reads no weight data. A plan is a list of calls over named values; nothing in it is traced.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from onnx_import.folding import folded_values
from onnx_import.graph import Graph, Node, Tensor, live_nodes
from onnx_import.manifest import DecoderManifest, StateTensor, layer_pattern
from onnx_import.ops import REGISTRY
from onnx_import.protocols import FixedSpec
from onnx_import.registry import Call, Operator, Role, WeightPlan, reads, resolve


@dataclass(frozen=True)
class PlannedCall:
    """A call with, for each of its operator's inputs by name, where the value comes from."""

    call: Call
    operator: Operator
    values: Mapping[str, str]
    """Input name to the name of an activation or of a folded value."""
    params: Mapping[str, str]
    """Input name to the key of a parameter."""
    statics: Mapping[str, str]
    """Name of a static input to the folded value that it is."""
    known: Mapping[str, np.ndarray] | None
    """Input name to constant, where the call is folded: run while tracing, on known values or on shapes."""

    @property
    def reads(self) -> frozenset[str]:
        """Names of the values that it needs."""
        return frozenset((*self.values.values(), *self.statics.values()))


@dataclass(frozen=True)
class Plan:
    """The calls of a step, in order, split where rows are selected.

    `head` runs on every token and ends with the last operator that looks back; then the values named in `cut` keep
    the selected rows only, along the axis given with each (None for a value that doesn't depend on the tokens), and
    `tail` runs on those. `token_axis` is the axis of tokens in input_ids: 1 where that is 2-D. `position_axes` are the
    sizes in front of the tokens of position_ids: 1, or 3 for the streams of M-RoPE, which are one for text. `fixed`
    are the states that the calls name.
    """

    input_ids: str
    position_ids: str
    logits: str
    token_axis: int
    position_axes: tuple[int, ...]
    head: tuple[PlannedCall, ...]
    cut: Mapping[str, int | None]
    tail: tuple[PlannedCall, ...]
    weights: Mapping[str, WeightPlan]
    fixed: tuple[FixedSpec, ...]

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Every tensor of the file that the plan reads, once."""
        found = {tensor.key: tensor for plan in self.weights.values() for tensor in plan.sources}
        return tuple(found.values())


@dataclass(frozen=True)
class Survey:
    """What a graph needs: its live nodes with their operators (None where unknown), and every problem."""

    nodes: tuple[tuple[Node, Operator | None], ...]
    calls: tuple[tuple[Call, Operator], ...]
    folded: frozenset[str]
    problems: tuple[str, ...]


def survey(graph: Graph, manifest: DecoderManifest) -> Survey:
    """Check all live nodes against the registry; collects every problem instead of stopping at the first."""
    problems = list(_manifest_problems(manifest))
    operators = {node.outputs[0]: _find(graph, node) for node in graph.nodes}
    roots = {manifest.logits, *graph.outputs}
    if manifest.logits not in graph.outputs:
        problems.append(f"the graph has no output {manifest.logits!r}")
    needed = {node.outputs[0]: reads(operators[node.outputs[0]], node) for node in graph.nodes}
    live = live_nodes(graph.nodes, roots, needed)
    layers = _attention_layers(live, operators, manifest, problems)
    folded = folded_values(live, operators, graph.tensors)
    calls = []
    states = {tensor.input: tensor for tensor in manifest.fixed}
    for node in live:
        operator = operators[node.outputs[0]]
        if operator is None:
            problems.append(f"{node.label} isn't supported at opset {graph.opsets.get(node.domain, 1)}")
            continue
        found: list[str] = []
        fixed = _fixed_state(node, operator, states, found)
        layer = layers.get(node.outputs[0], -1)
        call = resolve(operator, node, graph.tensors, layer, found, folded, fixed)
        if not found and operator.check is not None:
            found += operator.check(call, constants(operator, node, graph))
        problems += found
        calls.append((call, operator))
    problems += (f"no node keeps the state {name!r} of layer {states[name].layer}" for name in states)
    problems += _unknown_sources(graph, manifest, live, needed)
    pairs = tuple((node, operators[node.outputs[0]]) for node in live)
    return Survey(pairs, tuple(calls), folded, tuple(dict.fromkeys(problems)))


def constants(operator: Operator, node: Node, graph: Graph) -> dict[str, Tensor]:
    """The node's constant inputs by the operator's name for them."""
    pairs = zip(operator.inputs_of(node), node.inputs, strict=False)
    return {rule.name: graph.tensors[name] for rule, name in pairs if name in graph.tensors}


def make_plan(graph: Graph, manifest: DecoderManifest, surveyed: Survey, mode: str) -> Plan:
    """Order the calls of a graph without problems and plan its parameters for a weight mode."""
    weights: dict[str, WeightPlan] = {}
    calls = [
        plan_call(call, operator, graph, surveyed.folded, mode, weights) for call, operator in surveyed.calls
    ]
    head, cut, tail = _split(calls, manifest.logits)
    return Plan(
        input_ids=manifest.input_ids,
        position_ids=manifest.position_ids,
        logits=manifest.logits,
        token_axis=_token_axis(graph, manifest, surveyed),
        position_axes=_position_axes(graph, manifest),
        head=head,
        cut=dict.fromkeys(cut),
        tail=tail,
        weights=weights,
        fixed=tuple(call.fixed for call, _ in surveyed.calls if call.fixed is not None),
    )


def _token_axis(graph: Graph, manifest: DecoderManifest, surveyed: Survey) -> int:
    """The axis of tokens in activations: 1, behind a batch of one, where the graph or one of its operators wants it."""
    batched = any(operator.batched for _, operator in surveyed.calls)
    return 1 if batched else len(graph.inputs[manifest.input_ids][1]) - 1


def _find(graph: Graph, node: Node) -> Operator | None:
    """The node's operator: the one that keeps a cache where the node's cache is an input of the graph."""
    found = REGISTRY.candidates(node.domain, node.op_type, graph.opsets.get(node.domain, 1))
    keeping = [op for op in found if op.is_attention and _key_cache(op, node) in graph.inputs]
    return next(iter(keeping or [op for op in found if not op.is_attention] or found), None)


def _key_cache(operator: Operator, node: Node) -> str:
    """The name of an attention node's key cache, empty where it has none."""
    index = operator.key_cache
    return node.inputs[index] if index is not None and index < len(node.inputs) else ""


def _manifest_problems(manifest: DecoderManifest) -> Iterator[str]:
    if all(group.kind != "paged_kv" for group in manifest.state_groups):
        yield "the configuration has no state group 'paged_kv', and at least one is needed"
    yield from manifest.problems


def _attention_layers(
    live: tuple[Node, ...],
    operators: Mapping[str, Operator | None],
    manifest: DecoderManifest,
    problems: list[str],
) -> dict[str, int]:
    """First output of each attention node to its layer, read from the name of its key cache."""
    pattern = layer_pattern(manifest.past_key)
    layers: dict[str, int] = {}
    for node in live:
        operator = operators[node.outputs[0]]
        if operator is None or not operator.is_attention:
            continue
        match = pattern.fullmatch(_key_cache(operator, node))
        if match is None:
            problems.append(f"{node.label} reads no cache named like {manifest.past_key!r}")
        elif int(match[1]) in layers.values():
            problems.append(f"{node.label} reads the cache of layer {match[1]}, as another node does")
        else:
            layers[node.outputs[0]] = int(match[1])
    expected = {
        layer for group in manifest.state_groups if group.kind == "paged_kv" for layer in group.layer_ids
    }
    for missing, where in (
        (expected.difference(layers.values()), "the graph"),
        (set(layers.values()) - expected, "the configuration's 'paged_kv' group"),
    ):
        if missing:
            first = ", ".join(map(str, sorted(missing)[:5])) + (" and more" if len(missing) > 5 else "")
            problems.append(f"layer {first} has no attention in {where}")
    return layers


def _fixed_state(
    node: Node, operator: Operator, states: dict[str, StateTensor], problems: list[str]
) -> FixedSpec | None:
    """What a node with a fixed state keeps, taken out of `states`, which are those that no node has taken yet."""
    if operator.state is None:
        return None
    name = "".join(node.inputs[operator.state :][:1])
    tensor = states.pop(name, None)
    if tensor is None:
        problems.append(f"{node.label} reads no state of its own that the configuration names, but {name!r}")
        return None
    if tensor.output not in node.outputs:
        problems.append(
            f"{node.label} reads the state {name!r} and doesn't make its successor {tensor.output!r}"
        )
    return FixedSpec(name, tuple(size for size in tensor.shape if size is not None), tensor.dtype)


def _unknown_sources(
    graph: Graph, manifest: DecoderManifest, live: tuple[Node, ...], needed: Mapping[str, tuple[str, ...]]
) -> Iterator[str]:
    """Graph inputs other than tokens and positions that a live node reads, and names that nothing before it makes."""
    made = {*graph.tensors, manifest.input_ids, manifest.position_ids}
    for node in live:
        for name in needed[node.outputs[0]]:
            if name not in made:
                kind = "the graph input" if name in graph.inputs else "the undefined value"
                yield f"{node.label} reads {kind} {name!r}, which isn't supported"
        made.update(node.outputs)
    if len(graph.inputs.get(manifest.input_ids, (None, ()))[1]) not in (1, 2):
        yield f"the graph has no input {manifest.input_ids!r} of rank 1 or 2"
    if _position_axes(graph, manifest) not in ((), (1,), (3,), (3, 1)):
        shape = list(graph.inputs[manifest.position_ids][1])
        yield f"the graph input {manifest.position_ids!r} has the shape {shape}, which isn't supported"


def _position_axes(graph: Graph, manifest: DecoderManifest) -> tuple[int, ...]:
    """The sizes of the axes of position_ids in front of the tokens; free ones, of the batch, are 1."""
    shape = graph.inputs.get(manifest.position_ids, (None, (None,)))[1]
    return tuple(1 if size is None else size for size in shape[:-1])


def plan_call(
    call: Call,
    operator: Operator,
    graph: Graph,
    folded: frozenset[str],
    mode: str,
    weights: dict[str, WeightPlan],
) -> PlannedCall:
    """Say where each input of a call comes from, adding the parameters that it needs to `weights`."""
    tensors = constants(operator, call.node, graph)
    known: dict[str, np.ndarray] | None = {} if folded.issuperset(filter(None, call.node.outputs)) else None
    own = dict(operator.weights(call, tensors, mode)) if operator.weights and known is None else {}
    values: dict[str, str] = {}
    statics: dict[str, str] = {}
    for rule, name in zip(operator.inputs_of(call.node), call.node.inputs, strict=False):
        if rule.role is Role.STATIC and name in folded:
            statics[rule.name] = name
        if rule.role not in (Role.VALUE, Role.OPERAND) or rule.name in own or not name:
            continue
        if rule.name not in tensors:
            values[rule.name] = name
        elif known is not None and (raw := tensors[rule.name].raw) is not None:
            known[rule.name] = tensors[rule.name].view(raw)
        else:
            own[rule.name] = WeightPlan.plain(tensors[rule.name])
    weights.update((plan.key, plan) for plan in own.values())
    return PlannedCall(call, operator, values, {name: plan.key for name, plan in own.items()}, statics, known)


def _split(
    calls: list[PlannedCall], logits: str
) -> tuple[tuple[PlannedCall, ...], tuple[str, ...], tuple[PlannedCall, ...]]:
    """Cut the calls where their values begin to depend on the last operator that looks back."""
    last = max(i for i, planned in enumerate(calls) if planned.operator.looks_back)
    below = {calls[last].call.node.outputs[0]}
    head, tail = list(calls[: last + 1]), []
    for planned in calls[last + 1 :]:
        if below.intersection(planned.reads):
            below.update(planned.call.node.outputs)
            tail.append(planned)
        else:
            head.append(planned)
    read = {name for planned in tail for name in planned.reads} | {logits}
    # A shape counts tokens above the cut and selected rows below it, so what is folded is folded there again.
    for planned in reversed(head):
        if planned.known is not None and read.intersection(planned.call.node.outputs):
            read.update(planned.reads)
            tail.insert(0, planned)
    made = {name for planned in tail for name in planned.call.node.outputs}
    return tuple(head), tuple(sorted(read - made)), tuple(tail)
