"""Who computes a case's attention: this project's backends, and what JAX has, all behind one interface.

- `mosaic_gpu`, `xla`: `pallas_kernels.paged_attention`.
- `jax_paged`: JAX's Triton kernel `jax.experimental.pallas.ops.gpu.paged_attention`, over pages in its own layout.
- `dot_xla_gathering`, `dot_cudnn_gathering`: a gather of the live blocks, then `jax.nn.dot_product_attention`.
- `dot_xla_gathered`, `dot_cudnn_gathered`: the same over keys that lie in order already; no paged cache gives that.

Forms with sinks weigh the sink in by the logarithm of the sum that `dot_product_attention` hands back.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from benchmarks.attention_cases import Case, Inputs, query_tiles
from pallas_kernels import Backend, best_tile_size, paged_attention
from pallas_kernels.backends import compute_capability

_MOST_COPIES = 8
_XLA_PREFILL_TILE = 16


@dataclasses.dataclass(frozen=True)
class Contender:
    """One way to compute attention.

    Attributes:
        name: What tables call it.
        refusal: Says why it can't run a case whose keys lie in so many pools, None if it can.
        operands: Makes of the inputs what all pools share, and what each has of its own, in a pytree whose
            leaves begin with an axis of pools.
        attend: From the query, the shared and one pool's own, the result, shaped like the query.
        in_order: Whether a pool's own are its keys in order, which a traced index would copy; then `own` is a tuple.
    """

    name: str
    refusal: Callable[[Case, int], str | None]
    operands: Callable[[Case, Inputs], tuple[Any, Any]]
    attend: Callable[[Case, jax.Array, Any, Any], jax.Array]
    in_order: bool = False


def repeated(contender: Contender, case: Case, pools: int, calls: int) -> Callable[..., jax.Array]:
    """A program that attends `calls` times, a multiple of `pools`, each with the pool after the last one's.

    Every call's query holds the result of the one before, so that none can be left out or run beside another.
    """

    def run(query: jax.Array, shared: Any, own: Any) -> jax.Array:
        def call(current: jax.Array, of_pool: Any) -> jax.Array:
            # Else XLA takes what only a single pool decides, a gather say, out of the loop.
            current, of_pool = lax.optimization_barrier((current, of_pool))
            return query + contender.attend(case, current, shared, of_pool)

        def walk(_: Any, current: jax.Array) -> jax.Array:
            return functools.reduce(call, own, current)

        def step(i: jax.Array, current: jax.Array) -> jax.Array:
            return call(current, jax.tree.map(lambda x: x[i % pools], own))

        if contender.in_order:
            return lax.fori_loop(0, calls // pools, walk, query)
        return lax.fori_loop(0, calls, step, query)

    return run


def is_gpu() -> bool:
    """Whether JAX's default device is a GPU."""
    return jax.default_backend() in ("gpu", "cuda")


def _tile_size(case: Case, backend: Backend) -> int:
    if case.new == 1:
        return 1
    heads = case.heads
    if backend == "xla":
        return _XLA_PREFILL_TILE
    return best_tile_size(heads.num_heads, heads.num_kv_heads, heads.head_dim)


def _ours(backend: Backend) -> Contender:
    def refusal(case: Case, pools: int) -> str | None:
        if backend == "mosaic_gpu" and not compute_capability().startswith("9.0"):
            return "it needs a Hopper GPU"
        return None

    def operands(case: Case, inputs: Inputs) -> tuple[Any, Any]:
        tiles = query_tiles(case, _tile_size(case, backend))
        return (inputs.pages, jax.tree.map(jnp.asarray, tiles), inputs.sinks), (inputs.tables, inputs.staged)

    def attend(case: Case, query: jax.Array, shared: Any, own: Any) -> jax.Array:
        pages, tiles, sinks = shared
        table, staged = own
        return paged_attention(
            query,
            staged,
            pages,
            table,
            tiles,
            tile_size=_tile_size(case, backend),
            scale=case.heads.head_dim**-0.5,
            window=case.heads.window,
            sinks=sinks,
            backend=backend,
        )

    return Contender(backend, refusal, operands, attend)


def jax_paged(interpret: bool = False) -> Contender:
    """JAX's own kernel; `interpret` runs it without a GPU."""

    def refusal(case: Case, pools: int) -> str | None:
        if not (is_gpu() or interpret):
            return "it needs a GPU"
        if case.new > 1:
            return "it decodes only"
        if case.heads.window is not None or case.heads.sinks:
            return "it has neither windows nor sinks"
        return None

    def operands(case: Case, inputs: Inputs) -> tuple[Any, Any]:
        keys, values = jax.jit(lambda pages: tuple(pages.transpose(1, 2, 0, 3, 4)))(inputs.pages)
        return (keys, values), inputs.tables

    def attend(case: Case, query: jax.Array, shared: Any, own: Any) -> jax.Array:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            kernel = importlib.import_module("jax.experimental.pallas.ops.gpu.paged_attention")
        keys, values = shared
        lengths = jnp.full(case.batch, case.context, jnp.int32)
        # It doesn't scale.
        scaled = query * jnp.asarray(case.heads.head_dim**-0.5, query.dtype)
        splits = next(n for n in (16, 8, 4, 2, 1) if case.columns % n == 0)
        blocks = next(n for n in (8, 4, 2, 1) if case.columns // splits % n == 0)
        options = {"k_splits": splits, "pages_per_compute_block": blocks, "interpret": interpret}
        return kernel.paged_attention(scaled, keys, values, own, lengths, **options).astype(query.dtype)

    return Contender("jax_paged", refusal, operands, attend)


def _in_order(case: Case, pages: jax.Array, table: jax.Array) -> tuple[jax.Array, ...]:
    """Keys and values, each dtype[batch, keys, num_kv_heads, head_dim], of the blocks that hold live keys."""
    size = (case.batch, -1, case.heads.num_kv_heads, case.heads.head_dim)

    def gathered(kind: int) -> jax.Array:
        blocks = pages[table[:, case.dead_columns :], kind].transpose(0, 1, 3, 2, 4)
        return blocks.reshape(size)[:, : case.context - _first_gathered(case)]

    return gathered(0), gathered(1)


def _first_gathered(case: Case) -> int:
    return case.dead_columns * case.block_size


def _dot(case: Case, query: jax.Array, keys: Any, sinks: jax.Array | None, kind: str) -> jax.Array:
    heads, begin = case.heads, _first_gathered(case)
    options: dict[str, Any] = {"implementation": kind, "return_residual": sinks is not None}
    if case.past == 0 and case.new > 1:
        options["is_causal"] = True
        if heads.window is not None:
            options["local_window_size"] = (heads.window - 1, 0)
    elif case.new > 1 or begin < case.first_key:
        position, key = jnp.arange(case.past, case.context)[:, None], jnp.arange(begin, case.context)
        seen = key <= position
        if heads.window is not None:
            seen &= key > position - heads.window
        options["mask"] = seen[None, None]
    rows = query.reshape(case.batch, case.new, heads.num_heads, heads.head_dim)
    output = jax.nn.dot_product_attention(rows, *keys, **options)
    if sinks is not None:
        output, logsum = output
        kept = jax.nn.sigmoid(logsum.astype(jnp.float32) - sinks)[..., None]
        output = (output * kept).astype(query.dtype)
    return output.reshape(query.shape)


def _dot_product(kind: str, *, gathered: bool) -> Contender:
    def refusal(case: Case, pools: int) -> str | None:
        if kind == "cudnn":
            if not is_gpu():
                return "it needs a GPU"
            if case.new > 1 and case.past > 0:
                return "its causal mask can't begin behind a past"
        if gathered and pools > _MOST_COPIES:
            return f"{pools} pools would be as many calls in one program; take more rows or a longer context"
        return None

    def operands(case: Case, inputs: Inputs) -> tuple[Any, Any]:
        if not gathered:
            return (inputs.pages, inputs.sinks), inputs.tables
        laid_out = jax.jit(_in_order, static_argnums=0)
        pools = tuple(laid_out(case, inputs.pages, table) for table in inputs.tables)
        return (None, inputs.sinks), pools

    def attend(case: Case, query: jax.Array, shared: Any, own: Any) -> jax.Array:
        pages, sinks = shared
        keys = own if gathered else _in_order(case, pages, own)
        return _dot(case, query, keys, sinks, kind)

    name = f"dot_{kind}_{'gathered' if gathered else 'gathering'}"
    return Contender(name, refusal, operands, attend, in_order=gathered)


CONTENDERS = {
    contender.name: contender
    for contender in (
        _ours("mosaic_gpu"),
        _ours("xla"),
        jax_paged(),
        *(_dot_product(kind, gathered=gathered) for kind in ("xla", "cudnn") for gathered in (False, True)),
    )
}
