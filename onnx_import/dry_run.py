"""Checking a plan before any weight is read, by tracing it on shapes alone with two numbers of packed tokens.

What differs between the two is what the number of tokens decides: the axis on which a value holds them, and whatever a
graph computes from it that would be wrong for tokens of several requests.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from onnx_import.errors import UnsupportedGraph
from onnx_import.folder import FolderConfig
from onnx_import.model_folder import ModelFolder
from onnx_import.plan import Plan
from onnx_import.protocols import AttentionSpec, FixedSpec, Step
from onnx_import.registry import Environment
from onnx_import.running import MISFITS, run_head, run_tail
from onnx_import.states import geometry_problems


def dry_run(plan: Plan, folder: ModelFolder) -> tuple[Plan, tuple[AttentionSpec, ...], int]:
    """Trace a plan on shapes alone.

    Returns the plan with the axes of its cut, the attention layers in layer order, and the width of the logits. Raises
    UnsupportedGraph for a node whose shapes don't fit, for what would work across packed tokens, and for caches and
    logits that contradict the folder.
    """
    specs: dict[int, AttentionSpec] = {}
    evidence: list[dict[str, Any]] = []

    def attention(
        spec: AttentionSpec,
        query: jax.Array,
        key: jax.Array,
        value: jax.Array,
        sinks: jax.Array | None = None,
    ) -> tuple[jax.Array, None]:
        specs[spec.layer] = spec
        return query, None

    def environment(tokens: jax.Array) -> Environment:
        env = Environment(tokens, attention, _ShapesOnly(), tokens)
        evidence.append(env.evidence)
        return env

    folded: list[dict[str, np.ndarray]] = []

    def head(params: Any, tokens: jax.Array) -> dict[str, Any]:
        values = run_head(plan, params, tokens, environment(tokens))
        folded.append({name: value for name, value in values.items() if isinstance(value, np.ndarray)})
        return values

    def tail(params: Any, values: dict[str, Any], rows: jax.Array) -> jax.Array:
        known = folded[values["tokens"].shape[0] == more.shape[0]]
        return run_tail(plan, params, {**values["cut"], **known}, environment(values["tokens"]), rows)

    few, more, rows, more_rows = (jax.ShapeDtypeStruct((size,), jnp.int32) for size in (5, 7, 3, 4))
    structs = {key: weight.struct for key, weight in plan.weights.items()}
    try:
        shapes = [jax.eval_shape(head, structs, tokens) for tokens in (few, more)]
        plan = replace(plan, cut={name: _token_axis(shapes[0][name], shapes[1][name]) for name in plan.cut})
        logits = jax.eval_shape(tail, structs, {"cut": shapes[0], "tokens": few}, rows)
        if evidence[2]:
            jax.eval_shape(tail, structs, {"cut": shapes[1], "tokens": more}, more_rows)
    except MISFITS as error:
        # JAX adds notes of its own.
        notes = getattr(error, "__notes__", ())
        where = next((note for note in notes if note.startswith("while running")), "while running the graph")
        raise UnsupportedGraph(str(folder.graph.file), [f"{where}: {str(error).splitlines()[0]}"]) from None
    if mixed := [*_differences(*evidence[:2]), *_differences(*evidence[2:])]:
        raise UnsupportedGraph(str(folder.graph.file), list(dict.fromkeys(mixed)))
    layers = tuple(specs[layer] for layer in sorted(specs))
    if problems := list(geometry_problems(folder.manifest, folder.graph, layers)):
        raise UnsupportedGraph(str(folder.graph.file), problems)
    _check_widths(folder.config, logits.shape, rows.shape[0], plan, folder)
    return plan, layers, logits.shape[1]


def _differences(few: Mapping[str, Any], *more: Mapping[str, Any]) -> list[str]:
    """What was not the same for another number of tokens."""
    return [text for text in few for other in more if few[text] != other[text]]


def _token_axis(few: jax.ShapeDtypeStruct, more: jax.ShapeDtypeStruct) -> int | None:
    """The axis that grows with the number of tokens; None where none does."""
    grown = [
        axis for axis, sizes in enumerate(zip(few.shape, more.shape, strict=True)) if sizes[0] != sizes[1]
    ]
    return grown[0] if grown else None


class _ShapesOnly:
    """Fixed states of the right shapes."""

    def window(self, spec: FixedSpec, values: jax.Array) -> tuple[jax.Array, None]:
        return jnp.zeros((values.shape[0], *spec.shape), spec.dtype), None

    def scan(self, spec: FixedSpec, step: Step, inputs: Any) -> tuple[Any, None]:
        rows = jax.tree.leaves(inputs)[0].shape[0]
        return step(jnp.zeros((rows, *spec.shape), spec.dtype), inputs)[1], None


def _check_widths(
    config: FolderConfig, logits: tuple[int, ...], rows: int, plan: Plan, folder: ModelFolder
) -> None:
    problems = []
    if logits[0] != rows:
        problems.append(f"its last layers turn {rows} selected rows into {logits[0]}")
    if logits[1] < config.vocab_size:
        problems.append(
            f"its logits are {logits[1]} wide, below the configuration's vocabulary of {config.vocab_size}"
        )
    for planned in plan.head:
        key = planned.params.get("cos_cache") or planned.params.get("first_long")
        if key is not None and np.shape(plan.weights[key].struct)[0] < config.context_length:
            problems.append(
                f"{planned.call.node.label} has a rotary cache of {np.shape(plan.weights[key].struct)[0]} positions, "
                f"below the context length of {config.context_length}"
            )
    if problems:
        raise UnsupportedGraph(str(folder.graph.file), problems)
