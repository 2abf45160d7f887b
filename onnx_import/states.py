"""A manifest compared with its graph: every state's tensors found, with dtype and geometry, before any weight is read.

Where the configuration declares no groups they are derived: a dense `paged_kv` over all layers or, where the graph
takes fixed state under the configuration's names for it, every kind over the layers whose inputs the graph has.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

import numpy as np

from onnx_import.graph import Graph
from onnx_import.manifest import (
    FIXED_KINDS,
    PAGED,
    DecoderConfig,
    DecoderManifest,
    SlidingWindow,
    StateGroup,
    StateTensor,
)
from onnx_import.protocols import AttentionSpec

Shape = tuple[int | None, ...]
Value = tuple[np.dtype, Shape]

_FLOATS = ("float32", "float16", "bfloat16")
_PAGED_RANK = 4
_MOST_TOLD = 3
"""Tensors of a group whose faults are told one by one; mostly all of a group share one fault."""


def find_states(config: DecoderConfig, graph: Graph) -> DecoderManifest:
    """The decoder's state as the graph has it, with all that contradicts it as sentences without a full stop."""
    groups = _derived(config, graph) if config.declared is None else config.declared
    problems = list(_clashes(config, groups))
    found = tuple(_found(group, graph, problems) for group in groups)
    if config.sliding_window is not None:
        problems += _window_problems(config.sliding_window, found, graph)
    notes: tuple[str, ...] = ()
    if any(group.kind in FIXED_KINDS and group.derived for group in found):
        parts = (f"{group.kind!r} of {_layers(group.layer_ids)}" for group in found)
        notes = (f"The configuration has no state groups; the graph's inputs gave {', '.join(parts)}.",)
    return DecoderManifest(**vars(config), state_groups=found, problems=tuple(problems), notes=notes)


def geometry_problems(
    manifest: DecoderManifest, graph: Graph, layers: Iterable[AttentionSpec]
) -> Iterator[str]:
    """Where the keys that a layer computes don't fit the cache that the graph declares for it."""
    heads_axis = 0 if len(graph.inputs[manifest.input_ids][1]) == 2 else 1
    tensors = {
        tensor.layer: tensor
        for group in manifest.state_groups
        if group.kind == PAGED
        for tensor in group.tensors
    }
    for spec in layers:
        tensor = tensors.get(spec.layer)
        if tensor is None:
            continue
        declared = tensor.dtype, tensor.shape[heads_axis], tensor.shape[2]
        computed = spec.kv_dtype, spec.num_kv_heads, spec.head_dim
        if any(wanted not in (None, given) for wanted, given in zip(declared, computed, strict=True)):
            yield (
                f"layer {spec.layer} computes keys of {spec.kv_dtype.name} for {spec.num_kv_heads} heads of "
                f"{spec.head_dim}, which its cache {tensor.input!r} of {_shown(tensor.dtype, (None, *tensor.shape))} "
                "doesn't hold"
            )


def _derived(config: DecoderConfig, graph: Graph) -> tuple[StateGroup, ...]:
    layers = {
        kind: tuple(
            layer
            for layer in range(config.num_layers)
            if any(past in graph.inputs for past, _ in names.of_layer(layer))
        )
        for kind, names in config.names.items()
    }
    if not any(layers[kind] for kind in FIXED_KINDS if kind in layers):
        layers = {PAGED: tuple(range(config.num_layers))}
    return tuple(
        StateGroup(kind, owners, config.names[kind], derived=True)
        for kind, owners in layers.items()
        if owners
    )


def _clashes(config: DecoderConfig, groups: Sequence[StateGroup]) -> Iterator[str]:
    """Names that stand for two things; one sentence a pair of templates is enough."""
    owners = {
        config.input_ids: "the tokens",
        config.position_ids: "the positions",
        config.attention_mask: "the attention mask",
        config.logits: "the logits",
    }
    told: set[tuple[str, str]] = set()
    for group in groups:
        for layer in group.layer_ids:
            for name in (name for pair in group.names.of_layer(layer) for name in pair):
                owner = f"the state {group.kind!r}"
                other = owners.get(name)
                owners[name] = owner
                if other is not None and (other, owner) not in told:
                    told.add((other, owner))
                    yield f"the name {name!r} stands for both {other} and {owner} of layer {layer}"


def _found(group: StateGroup, graph: Graph, problems: list[str]) -> StateGroup:
    """The group with its tensors; what doesn't fit is left out and told.

    Of a dense `paged_kv` that no file declares nothing is told: its names are a guess, its storage is the caller's, and
    whether each layer has its attention is the plan's to say.
    """
    tensors: list[StateTensor] = []
    faults: list[str] = []
    missing: dict[str, list[tuple[str, int]]] = {"input": [], "output": []}
    for layer in group.layer_ids:
        for past, present in group.names.of_layer(layer):
            if past not in graph.inputs:
                missing["input"].append((past, layer))
            elif present not in graph.outputs:
                missing["output"].append((present, layer))
            else:
                dtype, shape = graph.inputs[past]
                tensor = StateTensor(group.kind, layer, past, present, dtype, shape[1:])
                found = list(_tensor_problems(tensor, graph.inputs[past], graph.outputs[present]))
                faults += found
                tensors += [] if found else [tensor]
    if not (group.derived and group.kind == PAGED):
        problems += faults[:_MOST_TOLD]
        if len(faults) > _MOST_TOLD:
            rest = len(faults) - _MOST_TOLD
            problems.append(f"the state group {group.kind!r} has {rest} more faults of this kind")
        for kind, absent in missing.items():
            for name, layer in absent[:1]:
                more = f" (and {len(absent) - 1} more)" if len(absent) > 1 else ""
                problems.append(
                    f"the graph has no {kind} {name!r}, which the state group {group.kind!r} names for "
                    f"layer {layer}{more}"
                )
        problems += _uneven(tensors, graph) if group.kind == PAGED else ()
    return replace(group, tensors=tuple(tensors))


def _tensor_problems(tensor: StateTensor, past: Value, present: Value) -> Iterator[str]:
    """Why this pair of values can't be a state of its kind."""
    for name, (dtype, shape) in ((tensor.input, past), (tensor.output, present)):
        where = f"the state {name!r} of layer {tensor.layer} is {_shown(dtype, shape)}"
        if dtype.name not in _FLOATS:
            yield f"{where}; its type should be one of {', '.join(_FLOATS)}"
        if tensor.kind == PAGED:
            if len(shape) != _PAGED_RANK:
                yield f"{where}; a {PAGED!r} state has rank {_PAGED_RANK}"
        elif len(shape) < 2:
            yield f"{where}; a {tensor.kind!r} state has a batch axis and more"
        elif shape[0] is not None:
            yield f"{where}; its batch axis should be dynamic, not {shape[0]}"
        elif any(size is None or size < 1 for size in shape[1:]):
            yield f"{where}; its axes after the batch should have fixed sizes"
    if past[0] != present[0] or (tensor.kind != PAGED and past[1] != present[1]):
        yield (
            f"the state {tensor.input!r} of layer {tensor.layer} is {_shown(*past)}, but its successor "
            f"{tensor.output!r} is {_shown(*present)}"
        )


def _uneven(tensors: Sequence[StateTensor], graph: Graph) -> Iterator[str]:
    """The first tensor that has another dtype or geometry than those before it; open axes fit any size."""
    if not tensors:
        return
    first = tensors[0]
    known = list(first.shape)
    for tensor in tensors:
        for name, shape in (
            (tensor.input, tensor.shape),
            (tensor.output, graph.outputs[tensor.output][1][1:]),
        ):
            sizes = list(zip(known, shape, strict=True))
            if tensor.dtype != first.dtype or any(None not in pair and pair[0] != pair[1] for pair in sizes):
                yield (
                    f"the state {name!r} of layer {tensor.layer} is {_shown(tensor.dtype, (None, *shape))}, unlike "
                    f"{first.input!r} of {_shown(first.dtype, (None, *known))}; a {PAGED!r} group has one geometry"
                )
                return
            known = [size if before is None else before for before, size in sizes]


def _window_problems(window: SlidingWindow, groups: Sequence[StateGroup], graph: Graph) -> Iterator[str]:
    """Windowed layers without keys, and layers whose attention has another window than the configuration says."""
    paged = {layer: group for group in groups if group.kind == PAGED for layer in group.layer_ids}
    for layer in window.layers or (tuple(paged) if window.slide_key_value_cache else ()):
        if layer not in paged:
            yield f"the configuration's 'sliding_window' lists layer {layer}, which no {PAGED!r} group does"
            continue
        past = next(paged[layer].names.of_layer(layer))[0]
        for node in graph.nodes:
            size = node.attributes.get("local_window_size", -1)
            if past in node.inputs and size != window.size:
                seen = f"a window of {size}" if size != -1 else "no window"
                yield (
                    f"the configuration's 'sliding_window' gives layer {layer} a window of {window.size}, but "
                    f"{node.label} has {seen}"
                )


def _layers(layer_ids: Sequence[int]) -> str:
    return f"layer{'s' * (len(layer_ids) > 1)} {', '.join(map(str, layer_ids))}"


def _shown(dtype: np.dtype, shape: Shape) -> str:
    return f"{dtype.name}[{', '.join('?' if size is None else str(size) for size in shape)}]"
