"""Two kernels to try the compiler on: a copy, and JAX's own attention for Hopper."""

from __future__ import annotations

from unittest import mock

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
from jax.experimental.pallas.ops.gpu import attention_mgpu


def copy(x: jax.Array) -> jax.Array:
    """The same array, taken through shared memory by one block of one warpgroup."""

    def body(source, target, buffer, arrived):
        plgpu.copy_gmem_to_smem(source, buffer, arrived)
        plgpu.barrier_wait(arrived)
        plgpu.copy_smem_to_gmem(buffer, target)
        plgpu.wait_smem_to_gmem(0)

    scratch = (plgpu.SMEM(x.shape, x.dtype), plgpu.Barrier())
    return plgpu.kernel(body, out_type=jax.ShapeDtypeStruct(x.shape, x.dtype), scratch_types=scratch)(x)


def attention(block: int, query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
    """JAX's attention, all [batch, length, heads, head_dim], with tiles of `block` queries and keys."""
    config = attention_mgpu.TuningConfig(block_q=block, block_kv=block, max_concurrent_steps=2)
    # It asks which CUDA runtime is there, to leave out a faulty one, and there's none.
    with mock.patch.object(attention_mgpu, "cuda_versions", _Runtime):
        return attention_mgpu.attention(query, key, value, config)


class _Runtime:
    @staticmethod
    def cuda_runtime_get_version() -> int:
        return 13_000
