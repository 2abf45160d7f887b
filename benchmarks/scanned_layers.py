"""A plan's repeated layers as the body of one `lax.scan`: the forward program that `layer_scan` compares.

The body runs from behind one attention to behind the next, so that only the first attention and what is behind the last
one stay outside; between two layers pass the attention's output and the residual. Operators run by the importer's own
`run_calls`, with one layer's slice of the stacked weights.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxengine.programs import ForwardResult, StepBatch
from onnx_import import AttentionSpec
from onnx_import.plan import Plan, PlannedCall
from onnx_import.protocols import Attention
from onnx_import.registry import Environment
from onnx_import.running import run_calls, run_head
from pallas_kernels import paged_attention


@dataclasses.dataclass(frozen=True)
class Rolled:
    """A plan cut behind each attention: `first` up to the first one, one `body` for all others, the plan's tail.

    `entering` are the names that the body reads and `leaving` those that the next one reads in their place, `selected`
    what the tail calls these. `keys` has each parameter of the body that is a layer's own, with those of every layer.
    """

    first: Plan
    body: tuple[PlannedCall, ...]
    entering: tuple[str, ...]
    leaving: tuple[str, ...]
    selected: tuple[str, ...]
    keys: Mapping[str, tuple[str, ...]]


def roll(plan: Plan) -> Rolled:
    """Cuts a plan whose layers behind the first attention are all alike; what they all read isn't stacked."""
    ends = [place + 1 for place, planned in enumerate(plan.head) if planned.operator.is_attention]
    first = plan.head[: ends[0]]
    bodies = [plan.head[start:end] for start, end in itertools.pairwise(ends)]
    shared = {key for planned in first for key in planned.params.values()}
    keys = [[key for planned in body for key in planned.params.values()] for body in bodies]
    made = [[name for planned in body for name in planned.call.node.outputs] for body in bodies]
    entering, selected = _entering(bodies[0]), _entering(plan.tail)
    return Rolled(
        first=dataclasses.replace(plan, head=first, cut=dict.fromkeys(entering)),
        body=bodies[0],
        entering=entering,
        leaving=tuple(made[0][made[-1].index(name)] for name in selected),
        selected=selected,
        keys={of_all[0]: of_all for of_all in zip(*keys, strict=True) if of_all[0] not in shared},
    )


def _entering(calls: Sequence[PlannedCall]) -> tuple[str, ...]:
    """What calls read and none of them makes, in the order in which they read it."""
    made = {name for planned in calls for name in planned.call.node.outputs}
    return tuple(dict.fromkeys(name for p in calls for name in p.values.values() if name not in made))


class Operands(NamedTuple):
    """What a scanned program is called with besides the batch.

    Attributes:
        params: The weights outside of the repeated layers.
        stacked: Those of the repeated layers, stacked, by the key of the first of these.
        pages: The first layer's pages and the stack of the others', or one pool.
        block_table: int32[rows, columns].
    """

    params: dict[str, Any]
    stacked: dict[str, Any]
    pages: tuple[jax.Array, ...]
    block_table: jax.Array


def forward_scanned(
    plan: Plan, rolled: Rolled, operands: Operands, batch: StepBatch, *, tile_size: int
) -> ForwardResult:
    """The forward program with the repeated layers in a scan.

    `staged` is the first layer's and a stack of the others'.
    """
    tokens, positions, limits = (jnp.asarray(part) for part in (batch.tokens, batch.positions, batch.limits))

    def environment(pages: jax.Array, block_table: jax.Array) -> Environment:
        attention = _attention(pages, block_table, batch, tile_size)
        return Environment(positions, attention, None, limits)

    def places(layer: jax.Array | int) -> jax.Array:
        """The block table in one pool of all layers; holes stay holes."""
        table = operands.block_table
        return jnp.where((table >= 0) & (table < num_blocks), table + layer * num_blocks, -1)

    layers = len(next(iter(rolled.keys.values())))
    one_pool = len(operands.pages) == 1
    first, rest = operands.pages[0], operands.pages[-1]
    num_blocks = len(first) // (1 + layers) if one_pool else len(first)
    env = environment(first, places(0) if one_pool else operands.block_table)
    values = run_head(rolled.first, operands.params, tokens, env)

    def layer(carry: tuple[jax.Array, ...], own: tuple[dict[str, Any], jax.Array]) -> tuple[Any, jax.Array]:
        weights, pages_or_layer = own
        inner = (
            environment(rest, places(pages_or_layer))
            if one_pool
            else environment(pages_or_layer, operands.block_table)
        )
        values = dict(zip(rolled.entering, carry, strict=True))
        run_calls(rolled.body, values, operands.params | weights, inner)
        (staged,) = inner.staged.values()
        return tuple(values[name] for name in rolled.leaving), staged

    own_pages = jnp.arange(1, 1 + layers) if one_pool else rest
    carry = tuple(values[name] for name in rolled.entering)
    carry, staged = jax.lax.scan(layer, carry, (operands.stacked, own_pages))
    rows = jnp.asarray(batch.logits_rows)
    selected = {
        name: jnp.take(value, rows, axis=plan.cut[name], mode="fill")
        for name, value in zip(rolled.selected, carry, strict=True)
    }
    run_calls(plan.tail, selected, operands.params, env)
    logits = selected[plan.logits]
    logits = logits.reshape(-1, logits.shape[-1]).astype(jnp.float32)
    return ForwardResult((*env.staged.values(), staged), (), logits)


def _attention(pages: jax.Array, block_table: jax.Array, batch: StepBatch, tile_size: int) -> Attention:
    """The engine's attention of one layer."""

    def attention(
        spec: AttentionSpec,
        query: jax.Array,
        key: jax.Array,
        value: jax.Array,
        sinks: jax.Array | None = None,
    ) -> tuple[jax.Array, jax.Array]:
        staged = jnp.stack([key, value], axis=1).astype(spec.kv_dtype)
        output = paged_attention(
            query,
            staged,
            pages,
            block_table,
            batch.tiles,
            tile_size=tile_size,
            scale=spec.scale,
            window=spec.window,
            softcap=spec.softcap,
            sinks=sinks,
        )
        return output, staged

    return attention
