"""The engine's programs compiled for Hopper: no copy of the pool, few temporaries, few kernels a layer."""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxengine as je
from jaxengine.fixed_state import StateRows
from jaxengine.kernels import choose_kernels
from jaxengine.programs import Bucket, Destinations, Programs, StepBatch
from jaxengine.sampling import SamplingRows
from jaxengine.windows import pages_shape
from onnx_import import AttentionSpec
from pallas_kernels import QueryTiles, max_query_tiles
from tests.hopper.compiling import Program, compile_for_hopper
from tests.hopper.schedule import schedule

pytestmark = pytest.mark.hopper

LAYERS, WIDTH, HIDDEN, HEADS, KV_HEADS, HEAD_DIM, VOCAB = 3, 4096, 14336, 32, 8, 128, 128_256
"""Those of Llama 3 8B but for the number of layers."""
CONTEXT = 8192
CONFIG = je.EngineConfig(
    max_batch_size=16, max_scheduled_tokens=1024, num_blocks=8192, block_size=16, backend="mosaic_gpu"
)
ROWS, TOKENS = 16, 1024
HALF = jnp.dtype("bfloat16")


def struct(*shape: int, dtype: Any = HALF) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def ints(*shape: int) -> jax.ShapeDtypeStruct:
    return struct(*shape, dtype=np.dtype(np.int32))


@dataclasses.dataclass(frozen=True, eq=False)
class Shaped:
    """A decoder in the form of Llama, whose weights have shapes only."""

    layers: tuple[AttentionSpec, ...]
    vocab_size: int = VOCAB
    identity: str = "shaped"
    fixed: tuple[()] = ()

    @property
    def params(self) -> dict[str, Any]:
        kv = KV_HEADS * HEAD_DIM
        layer = {
            "before": struct(WIDTH),
            "after": struct(WIDTH),
            "qkv": struct(WIDTH, WIDTH + 2 * kv),
            "out": struct(WIDTH, WIDTH),
            "up": struct(WIDTH, 2 * HIDDEN),
            "down": struct(HIDDEN, WIDTH),
        }
        ends = {"embedding": struct(VOCAB, WIDTH), "norm": struct(WIDTH), "head": struct(WIDTH, VOCAB)}
        return ends | {"layers": [layer] * len(self.layers)}

    def apply(self, params, tokens, positions, attention, logits_rows, fixed, limits):
        angle = positions[:, None].astype(np.float32) / 5e5 ** (np.arange(0, HEAD_DIM, 2) / HEAD_DIM)
        cosine, sine = (f(angle)[:, None].astype(HALF) for f in (jnp.cos, jnp.sin))

        def norm(x, weight):
            wide = x.astype(jnp.float32)
            scale = jax.lax.rsqrt((wide * wide).mean(axis=-1, keepdims=True) + 1e-5)
            return (wide * scale).astype(HALF) * weight

        def rotary(x):
            one, other = jnp.split(x, 2, axis=-1)
            return jnp.concatenate([one * cosine - other * sine, other * cosine + one * sine], axis=-1)

        x, kept = params["embedding"][tokens], []
        for spec, weights in zip(self.layers, params["layers"], strict=True):
            qkv = (norm(x, weights["before"]) @ weights["qkv"]).reshape(len(tokens), -1, HEAD_DIM)
            query, key, value = jnp.split(qkv, [HEADS, HEADS + KV_HEADS], axis=1)
            output, staged = attention(spec, rotary(query), rotary(key), value)
            kept.append(staged)
            x = x + output.reshape(x.shape) @ weights["out"]
            gate, up = jnp.split(norm(x, weights["after"]) @ weights["up"], 2, axis=-1)
            x = x + (jax.nn.silu(gate) * up) @ weights["down"]
        logits = norm(x[logits_rows], params["norm"]) @ params["head"]
        return logits.astype(jnp.float32), tuple(kept)


SPECS = tuple(
    AttentionSpec(i, HEADS, KV_HEADS, HEAD_DIM, HEAD_DIM**-0.5, np.dtype(HALF)) for i in range(LAYERS)
)
DECODE = Bucket(ROWS, ROWS, ROWS, 1, ROWS)


def prefill_bucket() -> Bucket:
    tile = choose_kernels(SPECS, CONFIG).prefill_tile
    return Bucket(TOKENS, ROWS, ROWS, tile, max_query_tiles(TOKENS, ROWS, tile))


def pools(specs: tuple[AttentionSpec, ...], rings: tuple[int | None, ...]) -> list[jax.ShapeDtypeStruct]:
    return [struct(*pages_shape(spec, ring, CONFIG)) for spec, ring in zip(specs, rings, strict=True)]


TABLE = ints(ROWS, CONTEXT // CONFIG.block_size)


def forward(bucket: Bucket) -> Program:
    decoder, kernels = Shaped(SPECS), choose_kernels(SPECS, CONFIG)
    tiles = QueryTiles(*[ints(bucket.tiles)] * 5, ints(bucket.tokens), ints())
    states = StateRows(
        *[ints(bucket.rows)] * 3, struct(bucket.rows, dtype=np.dtype(bool)), ints(bucket.tokens)
    )
    batch = StepBatch(*[ints(bucket.tokens)] * 3, ints(bucket.logits), tiles, states)
    run = functools.partial(Programs(decoder).forward, tile_size=bucket.tile_size, kernels=kernels)
    pages = tuple(pools(SPECS, (None,) * LAYERS))
    return compile_for_hopper(run, decoder.params, pages, TABLE, (), batch)


def publish(specs: tuple[AttentionSpec, ...], rings: tuple[int | None, ...], tokens: int) -> Program:
    staged = tuple(struct(tokens, 2, spec.num_kv_heads, HEAD_DIM) for spec in specs)
    to = Destinations(*[ints(tokens)] * 4, ints(ROWS))
    run = functools.partial(Programs(Shaped(specs)).publish, backend="mosaic_gpu")
    pages = tuple(pools(specs, rings))
    return compile_for_hopper(run, pages, TABLE, (), staged, (), to, donate_argnums=(0, 1, 2))


NO_LAUNCH = {"parameter", "constant", "bitcast", "get-tuple-element", "tuple"}
_RESULT = re.compile(r"^\s*(?:ROOT )?%?[\w.\-]+ = (.*?) ([a-z][\w\-]*)\(", re.MULTILINE)
_SHAPE = re.compile(r"\w+\[([\d,]+)\]")


def as_large_as(program: Program, pool: jax.ShapeDtypeStruct) -> set[str]:
    """Operations, those inside of fusions too, that make an array of a pool's size and are no kernel of ours."""
    found = set()
    for result, operation in _RESULT.findall(program.hlo):
        sizes = [math.prod(map(int, shape.split(","))) for shape in _SHAPE.findall(result)]
        if math.prod(pool.shape) in sizes:
            found.add(operation)
    return found - NO_LAUNCH - {"custom-call"}


def launches(program: Program) -> list[str]:
    """What the card is given to do, in order."""
    return [one.opcode for one in schedule(program.hlo) if one.opcode not in NO_LAUNCH]


@pytest.mark.parametrize(
    ("phase", "temporary", "a_layer"), [("decode", 5 * 2**20, 14), ("prefill", 2**27, 13)]
)
def test_R1_E1_N2_a_forward_pass_copies_no_pool_and_launches_few_kernels_a_layer(phase, temporary, a_layer):
    """A pool has 512 MiB a layer. Of a prefill's temporaries the wide half of the MLP has 56 MiB, of a decode's 4.1 MiB
    the float32 parts of split rows have 1.6."""
    program = forward(DECODE if phase == "decode" else prefill_bucket())
    (pool, *_) = pools(SPECS, (None,) * LAYERS)
    assert as_large_as(program, pool) == set()
    assert program.aliased_bytes == 0
    assert program.temporary_bytes < temporary
    order = launches(program)
    ours = [i for i, one in enumerate(order) if one == "custom-call"]
    assert len(ours) == program.hlo.count("mosaic_gpu_v2") == LAYERS
    print(f"{phase}: {program.temporary_bytes} bytes, {len(order)} launches, {np.diff(ours)} a layer")
    assert (np.diff(ours) <= a_layer).all()


MQA = tuple(dataclasses.replace(spec, num_kv_heads=1) for spec in SPECS)


@pytest.mark.parametrize("tokens", [ROWS, TOKENS])
@pytest.mark.parametrize(
    ("specs", "rings"),
    [(SPECS, (None,) * LAYERS), (SPECS, (None, 80, 96)), (MQA, (None, 80, 80))],
    ids=["pool", "rings", "rings of one KV head"],
)
def test_R3_E1_a_commit_writes_all_layers_in_place_by_one_kernel(specs, rings, tokens):
    program = publish(specs, rings, tokens)
    held = pools(specs, rings)
    for pool in held:
        assert as_large_as(program, pool) == set()
    pool_bytes = sum(math.prod(pool.shape) * HALF.itemsize for pool in held)
    assert program.aliased_bytes == pool_bytes + math.prod(TABLE.shape) * 4
    assert program.temporary_bytes < 2**16
    order = launches(program)
    print(f"{tokens} tokens: {program.temporary_bytes} bytes, {order}")
    assert program.hlo.count("mosaic_gpu_v2") == order.count("custom-call") == 1
    assert len(order) <= 8


def test_N1_a_choice_takes_rows_side_by_side_in_a_few_times_their_logits():
    kinds = (np.float32, np.int32, np.float32, np.float32, np.uint32, np.int32)
    rows = SamplingRows(*[struct(ROWS, dtype=np.dtype(kind)) for kind in kinds])
    run = functools.partial(Programs(Shaped(SPECS)).choose, known_ids=VOCAB)
    program = compile_for_hopper(run, struct(ROWS, VOCAB, dtype=np.dtype(np.float32)), rows)
    print(f"choose: {program.temporary_bytes} bytes, {launches(program)}")
    assert program.temporary_bytes < 8 * ROWS * VOCAB * 4
    # Bisections and the bits of random numbers loop; rows don't.
    assert f'known_trip_count":{{"n":"{ROWS}"' not in program.hlo
