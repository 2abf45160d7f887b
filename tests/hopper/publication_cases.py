"""The publication kernel as the Hopper checks compile it."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp

from pallas_kernels import publish_kv, publish_kv_quantised


@dataclasses.dataclass(frozen=True)
class PublicationCase:
    """A step of `tokens` tokens into the pages of some layers; `codes` is the type of quantised pages."""

    layers: int = 8
    num_kv_heads: int = 8
    head_dim: int = 128
    block_size: int = 16
    tokens: int = 64
    num_blocks: int = 1024
    dtype: str = "bfloat16"
    codes: str | None = None

    @property
    def donated(self) -> tuple[int, ...]:
        """The arguments of `function` that are written in place."""
        return (0,) if self.codes is None else (0, 1)

    @property
    def pool_bytes(self) -> int:
        """Bytes of all that is written in place."""
        rows = self.layers * self.num_blocks * 2 * self.num_kv_heads * self.block_size
        itemsize = jnp.dtype(self.codes or self.dtype).itemsize
        return rows * (self.head_dim * itemsize + (0 if self.codes is None else 4))

    @property
    def function(self):
        """`publish_kv` or `publish_kv_quantised`."""
        publish = publish_kv if self.codes is None else publish_kv_quantised
        return functools.partial(publish, backend="mosaic_gpu")

    @property
    def shapes(self) -> tuple:
        """Of the arguments of `function`."""

        def array(*shape: int, dtype: str) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))

        slots = (self.num_blocks, 2, self.num_kv_heads, self.block_size)
        pages = (array(*slots, self.head_dim, dtype=self.codes or self.dtype),) * self.layers
        scales = (array(*slots, dtype="float32"),) * self.layers
        staged = array(self.tokens, 2, self.num_kv_heads, self.head_dim, dtype=self.dtype)
        number = array(self.tokens, dtype="int32")
        kept = (pages,) if self.codes is None else (pages, scales)
        return (*kept, (staged,) * self.layers, number, number)


CASES = {
    "bfloat16": PublicationCase(),
    "int8 of bfloat16": PublicationCase(codes="int8"),
    "float8 of bfloat16": PublicationCase(codes="float8_e4m3fn"),
    "three heads of 64, 2,048 tokens": PublicationCase(num_kv_heads=3, head_dim=64, tokens=2048, layers=3),
    "one head of 80": PublicationCase(num_kv_heads=1, head_dim=80, tokens=5, layers=2),
    "wide heads to int8": PublicationCase(num_kv_heads=32, head_dim=256, codes="int8", layers=2),
}
