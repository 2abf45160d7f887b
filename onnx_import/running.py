"""Running a plan: calls over named values, on all tokens up to the cut and on the wanted rows from there."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from onnx_import.plan import Plan, PlannedCall
from onnx_import.registry import Arguments, Call, Environment, Operator, Results

MISFITS = (TypeError, ValueError, LookupError, ArithmeticError)
"""What operators raise for shapes or types that don't fit: an axis or a size that isn't there, a division by none."""


def run_plan(
    plan: Plan, params: Mapping[str, Any], tokens: jax.Array, env: Environment, logits_rows: jax.Array
) -> jax.Array:
    """The logits of `Decoder.apply`; what the callables hand back is left in `env`."""
    return run_tail(plan, params, run_head(plan, params, tokens, env), env, logits_rows)


def run_head(plan: Plan, params: Mapping[str, Any], tokens: jax.Array, env: Environment) -> dict[str, Any]:
    """The values at the cut, at every token."""
    position_ids = jnp.broadcast_to(env.positions, (*plan.position_axes, *env.positions.shape))
    ids = tokens.reshape((1,) * plan.token_axis + tokens.shape)
    values = {plan.input_ids: ids, plan.position_ids: position_ids}
    run_calls(plan.head, values, params, env)
    return {name: values[name] for name in plan.cut}


def run_tail(
    plan: Plan, params: Mapping[str, Any], values: Mapping[str, Any], env: Environment, logits_rows: jax.Array
) -> jax.Array:
    """The logits of the wanted rows, from the values at the cut: tail and head cost rows, not tokens."""
    selected = {
        name: value
        if plan.cut[name] is None
        else jnp.take(value, logits_rows, axis=plan.cut[name], mode="fill")
        for name, value in values.items()
    }
    run_calls(plan.tail, selected, params, env)
    logits = selected[plan.logits]
    return logits.reshape(-1, logits.shape[-1]).astype(jnp.float32)


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
        except MISFITS as error:
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
        env.evidence.update(_evidence(planned.operator, call, arguments))
        return run(call, _as_arrays(arguments), env)
    with jax.ensure_compile_time_eval():
        return tuple(np.asarray(result) for result in run(call, _as_arrays(arguments), env))


def _as_arrays(arguments: Arguments) -> dict[str, Any]:
    """Known values as JAX's arrays, so that operators see one kind and 64-bit integers as narrow ones."""
    return {name: jnp.asarray(x) if isinstance(x, np.ndarray) else x for name, x in arguments.items()}


def _evidence(operator: Operator, call: Call, arguments: Arguments) -> Iterator[tuple[str, Any]]:
    """What a call does that would be wrong along the axis of packed tokens, by a sentence that says so."""
    if operator.combines is not None:
        where = tuple(operator.combines(call, arguments)), dict(call.statics)
        yield f"{call.node.label} works across tokens, and those of all requests are packed together", where
    for name, value in arguments.items():
        if isinstance(value, np.ndarray):
            # An array of one value is right for any number of tokens that it is spread over.
            same = value.size > 0 and bool((value == value.flat[0]).all())
            content = value.flat[0].item() if same else (value.shape, value.tobytes())
            yield (
                f"{call.node.label} computes with {name!r}, which depends on the number of packed tokens",
                content,
            )
