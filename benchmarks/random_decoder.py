"""A plain JAX decoder with the shapes of a known model and random bfloat16 weights that are made on the device.

It is the usual pre-norm transformer: RMS norm, rotary embedding of halves, grouped heads, a gated SiLU feed-forward,
and for Qwen3 a norm over each head of queries and keys.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.random_arrays import random_key
from onnx_import import Attention, AttentionSpec, FixedSpec, FixedState

DTYPE = jnp.bfloat16


@dataclasses.dataclass(frozen=True)
class Shape:
    """Sizes of a decoder.

    Attributes:
        name: What tables call it.
        layers: Transformer layers.
        width: Size of the residual stream.
        num_heads: Query heads.
        num_kv_heads: Heads of keys and values.
        head_dim: Numbers of a head.
        inner: Width of the feed-forward.
        vocab_size: Width of the logits.
        rope_base: Base of the rotary frequencies.
        head_norm: Whether each head of queries and keys is normed.
    """

    name: str
    layers: int
    width: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    inner: int
    vocab_size: int
    rope_base: float
    head_norm: bool = False


# From the models' public configurations.
SHAPES = {
    shape.name: shape
    for shape in (
        Shape("llama-3-8b", 32, 4096, 32, 8, 128, 14_336, 128_256, 5e5),
        Shape("qwen3-8b", 36, 4096, 32, 8, 128, 12_288, 151_936, 1e6, head_norm=True),
    )
}


class RandomDecoder:
    """A decoder as `jaxengine.programs.Decoder` wants it."""

    def __init__(self, shape: Shape) -> None:
        """Makes the weights; the same shape always gets the same ones."""
        self.shape = shape
        self.params = random_params(shape)

    @property
    def layers(self) -> tuple[AttentionSpec, ...]:
        """The attention layers, in layer order."""
        shape = self.shape
        heads = (shape.num_heads, shape.num_kv_heads, shape.head_dim)
        return tuple(
            AttentionSpec(layer, *heads, scale=shape.head_dim**-0.5, kv_dtype=np.dtype(DTYPE))
            for layer in range(shape.layers)
        )

    @property
    def fixed(self) -> tuple[FixedSpec, ...]:
        """It has no fixed states."""
        return ()

    @property
    def vocab_size(self) -> int:
        """The width of the logits."""
        return self.shape.vocab_size

    @property
    def identity(self) -> str:
        """The name of the shape."""
        return f"random {self.shape.name}"

    @property
    def bytes_read(self) -> int:
        """Bytes of the weights that a step reads whole: all but the table of embeddings."""
        return sum(leaf.nbytes for leaf in jax.tree.leaves({**self.params, "embedding": ()}))

    def apply(
        self,
        params: Mapping[str, Any],
        tokens: jax.Array,
        positions: jax.Array,
        attention: Attention,
        logits_rows: jax.Array,
        fixed: FixedState | None,
        limits: jax.Array,
    ) -> tuple[jax.Array, tuple[Any, ...]]:
        """Returns float32 logits[rows, vocab] and what `attention` handed back, an entry a layer."""
        shape = self.shape
        queries = shape.num_heads * shape.head_dim
        keys = shape.num_kv_heads * shape.head_dim
        sizes = (-1, shape.head_dim)
        x, staged = params["embedding"][tokens], []
        for spec, layer in zip(self.layers, params["layers"], strict=True):
            joined = rms_norm(x, layer["attention_norm"]) @ layer["to_heads"]
            query, key, value = jnp.split(joined, (queries, queries + keys), axis=-1)
            query, key, value = (part.reshape(len(tokens), *sizes) for part in (query, key, value))
            if shape.head_norm:
                query, key = rms_norm(query, layer["query_norm"]), rms_norm(key, layer["key_norm"])
            query, key = (rotary(part, positions, shape.rope_base) for part in (query, key))
            output, fresh = attention(spec, query, key, value)
            staged.append(fresh)
            x = x + output.reshape(len(tokens), queries) @ layer["from_heads"]
            gate, up = jnp.split(rms_norm(x, layer["inner_norm"]) @ layer["to_inner"], 2, axis=-1)
            x = x + (jax.nn.silu(gate) * up) @ layer["from_inner"]
        last = rms_norm(x[logits_rows], params["norm"])
        return jnp.dot(last, params["head"], preferred_element_type=jnp.float32), tuple(staged)


def rms_norm(x: jax.Array, weight: jax.Array) -> jax.Array:
    """Over the last axis, in float32; `x`'s dtype."""
    wide = x.astype(jnp.float32)
    scaled = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + 1e-6)
    return scaled.astype(x.dtype) * weight


def rotary(x: jax.Array, positions: jax.Array, base: float) -> jax.Array:
    """Turns each pair (i, i + head_dim / 2) of `x` [tokens, heads, head_dim] by position * base^(-2 i / head_dim)."""
    half = x.shape[-1] // 2
    frequency = jnp.asarray(base ** (-np.arange(half) / half), jnp.float32)
    angle = positions[:, None, None].astype(jnp.float32) * frequency
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)


@functools.partial(jax.jit, static_argnums=0)
def _random_layer(shape: Shape, key: jax.Array) -> dict[str, jax.Array]:
    heads = (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim
    sizes = {
        "to_heads": (shape.width, heads),
        "from_heads": (shape.num_heads * shape.head_dim, shape.width),
        "to_inner": (shape.width, 2 * shape.inner),
        "from_inner": (shape.inner, shape.width),
    }
    keys = jax.random.split(key, len(sizes))
    layer = {name: _normal(key, *size) for key, (name, size) in zip(keys, sizes.items(), strict=True)}
    layer |= {name: jnp.ones(shape.width, DTYPE) for name in ("attention_norm", "inner_norm")}
    if shape.head_norm:
        layer |= {name: jnp.ones(shape.head_dim, DTYPE) for name in ("query_norm", "key_norm")}
    return layer


@functools.partial(jax.jit, static_argnums=(1, 2))
def _normal(key: jax.Array, rows: int, columns: int) -> jax.Array:
    return jax.random.normal(key, (rows, columns), DTYPE) * jnp.asarray(rows**-0.5, DTYPE)


def random_params(shape: Shape) -> dict[str, Any]:
    """Normal weights that keep the size of what they multiply; nothing but a key comes from the host."""
    embedding, head, *layers = jax.random.split(random_key(0), 2 + shape.layers)
    return {
        "embedding": _normal(embedding, shape.vocab_size, shape.width),
        "layers": [_random_layer(shape, key) for key in layers],
        "norm": jnp.ones(shape.width, DTYPE),
        "head": _normal(head, shape.width, shape.vocab_size),
    }
