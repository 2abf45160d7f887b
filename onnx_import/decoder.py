"""A decoder as a pure function: parameters and tokens in, logits and staged keys and values out."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from onnx_import.errors import UnsupportedGraph
from onnx_import.folder import FolderConfig
from onnx_import.lazy import LazyArray
from onnx_import.model_folder import ModelFolder
from onnx_import.plan import Plan, PlannedCall, make_plan, survey
from onnx_import.protocols import Attention, AttentionSpec, FixedSpec, FixedState, Step
from onnx_import.registry import Arguments, Call, Environment, Results, WeightPlan
from onnx_import.states import geometry_problems
from onnx_import.weights import WeightFiles, model_identity

WeightMode = Literal["exact", "fast"]

_MISFITS = (TypeError, ValueError, LookupError, ArithmeticError)
"""What operators raise for shapes or types that don't fit: an axis or a size that isn't there, a division by none."""
_RELEASE_AFTER = 1 << 24
"""Bytes made between two releases of the file's pages: touching a page anew costs time, and keeping it memory."""
_ALIGNMENT = 64
"""Bytes; what XLA aligns its buffers to on a CPU."""


@dataclass(frozen=True)
class Decoder:
    """An imported model. `params` is a pytree of weights to pass to `apply`; nothing else is held on a device.

    `layers` are the attention layers in layer order, `fixed` the states of fixed size, `vocab_size` the width of the
    logits, `identity` a short hash that recognises the model and the way its weights are held.
    """

    layers: tuple[AttentionSpec, ...]
    fixed: tuple[FixedSpec, ...]
    vocab_size: int
    params: dict[str, Any]
    identity: str
    plan: Plan

    def apply(
        self,
        params: Mapping[str, Any],
        tokens: jax.Array,
        positions: jax.Array,
        attention: Attention,
        logits_rows: jax.Array,
        fixed: FixedState | None = None,
        limits: jax.Array | None = None,
    ) -> tuple[jax.Array, tuple[Any, ...]]:
        """Run tokens int32 [T] at positions int32 [T], all packed in one row; pure, to be traced under jit.

        `fixed` may be left out where the decoder has no fixed state. `limits` int32 [T], which may be left out where it
        has one rotary table, says how many tokens each token's sequence may come to hold, the same at each of its
        tokens; a table for short or for long sequences is chosen by it.

        Returns float32 logits [R, vocab] of the tokens named by logits_rows int32 [R], and what the callables handed
        back: an entry a layer, then one a fixed state. A token's logits have the same bits whatever T, R and the other
        tokens are, for T and R of at least 2 and callables of which that is true. Token ids past the embedding,
        positions past the rotary cache and rows past T give NaN.
        """
        env = Environment(positions, attention, fixed, limits)
        logits = run_plan(self.plan, params, tokens, env, logits_rows)
        by_layer = [env.staged[spec.layer] for spec in self.layers]
        return logits, (*by_layer, *(env.staged_fixed[spec.name] for spec in self.fixed))


def run_plan(
    plan: Plan, params: Mapping[str, Any], tokens: jax.Array, env: Environment, logits_rows: jax.Array
) -> jax.Array:
    """The logits of `Decoder.apply`; what the callables hand back is left in `env`."""
    # From the cut on only the wanted rows exist, so the last layer's tail and the head cost R rows, not T.
    selected = {
        name: value
        if plan.cut[name] is None
        else jnp.take(value, logits_rows, axis=plan.cut[name], mode="fill")
        for name, value in _run_head(plan, params, tokens, env).items()
    }
    run_calls(plan.tail, selected, params, env)
    logits = selected[plan.logits]
    return logits.reshape(-1, logits.shape[-1]).astype(jnp.float32)


def _run_head(plan: Plan, params: Mapping[str, Any], tokens: jax.Array, env: Environment) -> dict[str, Any]:
    """The values at the cut, at every token."""
    position_ids = jnp.broadcast_to(env.positions, (*plan.position_axes, *env.positions.shape))
    ids = tokens.reshape((1,) * plan.token_axis + tokens.shape)
    values = {plan.input_ids: ids, plan.position_ids: position_ids}
    run_calls(plan.head, values, params, env)
    return {name: values[name] for name in plan.cut}


def run_calls(
    calls: Sequence[PlannedCall],
    values: dict[str, Any],
    params: Mapping[str, Any],
    env: Environment,
) -> None:
    """Run calls in order, adding what they make to `values`: NumPy arrays where it is folded."""
    for planned in calls:
        call, operator = planned.call, planned.operator
        arguments: dict[str, Any] = {rule.name: None for rule in operator.inputs_of(call.node)}
        arguments.update((name, values[source]) for name, source in planned.values.items())
        arguments.update((name, params[key]) for name, key in planned.params.items())
        arguments.update(planned.known or {})
        shapes = {name: tuple(map(int, np.ravel(values[source]))) for name, source in planned.statics.items()}
        if shapes:
            call = replace(call, statics={**call.statics, **shapes})
        try:
            results = _run(planned, call, arguments, env)
        except _MISFITS as error:
            error.add_note(f"while running {call.node.label}")
            raise
        pairs = zip(call.node.outputs, results, strict=False)
        values.update((name, result) for name, result in pairs if result is not None)


def _run(planned: PlannedCall, call: Call, arguments: dict[str, Any], env: Environment) -> Results:
    """Run one call; what is folded runs at once, also while a program is traced around it."""
    run = planned.operator.run
    if planned.operator.of_shapes:
        return run(call, arguments, env)
    if planned.known is None:
        return run(call, _as_arrays(arguments), env)
    with jax.ensure_compile_time_eval():
        return tuple(np.asarray(result) for result in run(call, _as_arrays(arguments), env))


def _as_arrays(arguments: Arguments) -> dict[str, Any]:
    """Known values as JAX's arrays, so that operators see one kind and 64-bit integers as narrow ones."""
    return {name: jnp.asarray(x) if isinstance(x, np.ndarray) else x for name, x in arguments.items()}


def import_decoder(folder: ModelFolder, weights: WeightMode = "exact") -> Decoder:
    """Turn a folder's graph into a decoder and load its weights.

    `weights` says how int4 and int8 weights are held: "exact" dequantises each block to float32, "fast"
    requantises to int8 with a scale an output row and multiplies by integers. Float weights are the same in both.

    Raises UnsupportedGraph, before any weight is read, listing everything that isn't supported; WeightError
    when a tensor's data isn't there.
    """
    if weights not in ("exact", "fast"):
        raise ValueError(f"weights={weights!r} isn't a way to hold weights; use 'exact' or 'fast'.")
    surveyed = survey(folder.graph, folder.manifest)
    if surveyed.problems:
        raise UnsupportedGraph(str(folder.graph.file), surveyed.problems)
    plan = make_plan(folder.graph, folder.manifest, surveyed, weights)
    plan, layers, vocab_size = _dry_run(plan, folder)
    files = WeightFiles(folder.graph)
    files.check(plan.tensors)
    identity = model_identity(folder.graph, files.paths(plan.tensors), weights)
    return Decoder(layers, plan.fixed, vocab_size, load_params(plan, files), identity, plan)


def load_params(plan: Plan, files: WeightFiles) -> dict[str, Any]:
    """Build the parameters one array at a time, so that one at most exists twice in host memory."""
    params = {key: _load(weight, files) for key, weight in plan.weights.items()}
    files.release(plan.tensors)  # once more: reading a tensor also maps pages of its neighbours
    return params


def _load(weight: WeightPlan, files: WeightFiles) -> Any:
    def load(array: np.ndarray | LazyArray) -> jax.Array:
        copy = _aligned(array.shape, array.dtype)
        if isinstance(array, LazyArray):
            made = 0
            for rows, piece in array.pieces():
                copy[rows] = piece
                made += piece.nbytes
                if made > _RELEASE_AFTER:
                    files.release(weight.sources)
                    made = 0
        else:
            copy[...] = array
        files.release(weight.sources)
        return jax.device_put(copy).block_until_ready()

    return jax.tree.map(load, weight.build(*(files.read(tensor) for tensor in weight.sources)))


def _aligned(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Room for a copy, which is made always: what aliased the mapped file would change, or fault, when the file does.

    It is aligned as XLA wants it, so that on a CPU the device's array is the copy itself; JAX's own copying may go
    through a second one and keep that for a while.
    """
    nbytes = math.prod(shape) * dtype.itemsize
    room = np.empty(nbytes + _ALIGNMENT, np.uint8)
    start = -room.ctypes.data % _ALIGNMENT
    return room[start : start + nbytes].view(dtype).reshape(shape)


def _dry_run(plan: Plan, folder: ModelFolder) -> tuple[Plan, tuple[AttentionSpec, ...], int]:
    """Trace the plan on shapes alone: finds the cut's axes, each layer's geometry, and any node that doesn't fit."""
    specs: dict[int, AttentionSpec] = {}

    def attention(
        spec: AttentionSpec,
        query: jax.Array,
        key: jax.Array,
        value: jax.Array,
        sinks: jax.Array | None = None,
    ) -> tuple[jax.Array, None]:
        specs[spec.layer] = spec
        return query, None

    def head(params: Any, tokens: jax.Array) -> dict[str, Any]:
        return _run_head(plan, params, tokens, Environment(tokens, attention, _ShapesOnly(), tokens))

    def run(params: Any, tokens: jax.Array, rows: jax.Array) -> jax.Array:
        return run_plan(plan, params, tokens, Environment(tokens, attention, _ShapesOnly(), tokens), rows)

    few, more, rows = (jax.ShapeDtypeStruct((size,), jnp.int32) for size in (5, 7, 3))
    structs = {key: weight.struct for key, weight in plan.weights.items()}
    try:
        shapes = [jax.eval_shape(head, structs, tokens) for tokens in (few, more)]
        plan = replace(plan, cut={name: _token_axis(shapes[0][name], shapes[1][name]) for name in plan.cut})
        logits = jax.eval_shape(run, structs, few, rows)
    except _MISFITS as error:
        # JAX adds notes of its own.
        notes = getattr(error, "__notes__", ())
        where = next((note for note in notes if note.startswith("while running")), "while running the graph")
        raise UnsupportedGraph(str(folder.graph.file), [f"{where}: {str(error).splitlines()[0]}"]) from None
    layers = tuple(specs[layer] for layer in sorted(specs))
    if problems := list(geometry_problems(folder.manifest, folder.graph, layers)):
        raise UnsupportedGraph(str(folder.graph.file), problems)
    _check_widths(folder.config, logits.shape, rows.shape[0], plan, folder)
    return plan, layers, logits.shape[1]


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
