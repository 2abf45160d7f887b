"""How large the KV pool is when nobody said: a share of the free memory, but no more than a full batch can use.

Memory for one step's staged keys and values is set aside first. A static batch has one block a request, as long as the
longest session: that makes its cache contiguous.
"""

from __future__ import annotations

import dataclasses
import logging
from typing import TYPE_CHECKING

import jax
import psutil

from jaxengine.blocks import blocks_for
from jaxengine.config import EngineConfig

if TYPE_CHECKING:
    from jaxengine.model import Model

_log = logging.getLogger(__name__)

ACCELERATOR_FRACTION, HOST_FRACTION = 0.9, 0.25


def kv_bytes_per_token(model: Model) -> int:
    """Bytes of one token's keys and values over all layers."""
    return sum(
        2 * spec.num_kv_heads * spec.head_dim * spec.kv_dtype.itemsize for spec in model.decoder.layers
    )


def free_memory(device: jax.Device) -> int:
    """Bytes that `device` can still allocate; of a host, those that the system calls available."""
    stats = device.memory_stats()
    if stats is None or "bytes_limit" not in stats:
        return psutil.virtual_memory().available
    return stats["bytes_limit"] - stats["bytes_in_use"]


def resolve_config(model: Model, config: EngineConfig, free_bytes: int | None = None) -> EngineConfig:
    """Returns `config` with the size of the pool settled.

    Args:
        model: Its attention layers size a block.
        config: The caller's limits.
        free_bytes: Free memory; None asks the default device.

    Raises:
        ValueError: The free memory holds no block, or no static batch; or a static batch is given a number of blocks.
    """
    longest, rows = model.config.max_length, config.max_batch_size
    if config.batching == "static":
        if config.num_blocks is not None:
            raise ValueError(
                "EngineConfig.num_blocks is given for a static batch, which has one block a request; leave it out"
            )
        config = dataclasses.replace(config, block_size=longest)
    if config.num_blocks is not None:
        return config
    device = jax.devices()[0]
    free = free_memory(device) if free_bytes is None else free_bytes
    fraction = config.memory_fraction
    if fraction is None:
        fraction = HOST_FRACTION if device.platform == "cpu" else ACCELERATOR_FRACTION
    per_token = kv_bytes_per_token(model)
    staging = config.max_scheduled_tokens * per_token
    fitting = int(free * fraction - staging) // (per_token * config.block_size)
    useful = rows * int(blocks_for(longest, config.block_size))
    if fitting < (rows if config.batching == "static" else 1):
        raise ValueError(
            f"{fraction} of {free >> 20} MiB of free memory, less {staging >> 20} MiB of one step's staging, is too "
            f"little for the KV cache; use a larger EngineConfig.memory_fraction or smaller limits"
        )
    # A pool is indexed by int32 token slots.
    num_blocks = min(fitting, useful, (2**31 - 1) // config.block_size)
    _log.info(
        "KV pool: %d blocks of %d tokens, %.1f MiB",
        num_blocks,
        config.block_size,
        num_blocks * config.block_size * per_token / 2**20,
    )
    return dataclasses.replace(config, num_blocks=num_blocks)
