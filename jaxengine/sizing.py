"""How large the KV pool is when nobody said: a share of the free memory, but no more than a full batch can use.

Memory for one step's staged keys and values, for the block table, for rings and for fixed states is set aside first. A
static batch has one block a request, as long as the longest session: that makes its cache contiguous, and leaves no use
for a ring.
"""

from __future__ import annotations

import dataclasses
import logging
from typing import TYPE_CHECKING

import jax
import psutil

from jaxengine.blocks import blocks_for
from jaxengine.config import Batching, EngineConfig, resolve_chunk_size
from jaxengine.fixed_state import BANKS, state_bytes
from jaxengine.windows import ring_blocks

if TYPE_CHECKING:
    from jaxengine.model import Model
    from onnx_import import AttentionSpec

_log = logging.getLogger(__name__)

ACCELERATOR_FRACTION, HOST_FRACTION = 0.9, 0.25


def ran_out_of_memory(error: BaseException) -> bool:
    """Whether `error` says that the host's or the device's memory is used up."""
    on_device = isinstance(error, jax.errors.JaxRuntimeError) and "RESOURCE_EXHAUSTED" in str(error)
    return on_device or isinstance(error, MemoryError)


def kv_bytes_per_token(model: Model) -> int:
    """Bytes of one token's keys and values over all layers."""
    return sum(map(_token_bytes, model.decoder.layers))


def _token_bytes(spec: AttentionSpec) -> int:
    return 2 * spec.num_kv_heads * spec.head_dim * spec.kv_dtype.itemsize


def free_memory(device: jax.Device) -> int:
    """Bytes that `device` can still allocate; of a host, those that the system calls available."""
    stats = device.memory_stats()
    if stats is None or "bytes_limit" not in stats:
        return psutil.virtual_memory().available
    return stats["bytes_limit"] - stats["bytes_in_use"]


def resolve_config(model: Model, config: EngineConfig, free_bytes: int | None = None) -> EngineConfig:
    """Returns `config` with the kind of batching, the chunk size and the size of the pool settled.

    A given size of the pool only has to fit.

    Args:
        model: Its attention layers size a block.
        config: The caller's limits.
        free_bytes: Free memory; None asks the default device.

    Raises:
        ValueError: The free memory holds no block, no static batch, or not the pool of the given size; or a static
            batch is given blocks, or a model with fixed states; or the folder's chunk size is negative.
        TypeError: The folder's chunk size is no integer.
    """
    longest, rows = model.config.max_length, config.max_batch_size
    if config.batching is None:
        batching: Batching = "static" if model.config.static_batching else "dynamic"
        config = dataclasses.replace(config, batching=batching)
    if config.batching == "static":
        if model.decoder.fixed:
            raise ValueError(
                f"the model has fixed states, such as {model.decoder.fixed[0].name!r}, and a static batch can't "
                "hold any; use EngineConfig(batching='dynamic')"
            )
        config = _with_a_block_a_request(config, longest)
    config = dataclasses.replace(config, chunk_size=resolve_chunk_size(config, model.config.search))
    device = jax.devices()[0]
    free = free_memory(device) if free_bytes is None else free_bytes
    per_token = kv_bytes_per_token(model)
    layers = model.decoder.layers
    rings = ring_blocks(layers, config, longest)
    full = sum(_token_bytes(spec) for spec, ring in zip(layers, rings, strict=True) if ring is None)
    per_block = full * config.block_size
    per_ring = config.block_size * sum(
        ring * _token_bytes(spec) for spec, ring in zip(layers, rings, strict=True) if ring is not None
    )
    per_slot = state_bytes(model.decoder.fixed)
    in_places = rows * (per_ring + BANKS * per_slot)
    width = int(blocks_for(model.config.context_length, config.block_size))
    if config.num_blocks is None:
        fraction = config.memory_fraction
        if fraction is None:
            fraction = HOST_FRACTION if device.platform == "cpu" else ACCELERATOR_FRACTION
        staging = config.max_scheduled_tokens * per_token + rows * per_slot
        aside = staging + _table_bytes(rows, width) + in_places
        # A pool is indexed by int32 token slots.
        fitting = min(int(free * fraction - aside) // per_block, (2**31 - 1) // config.block_size)
        if fitting < (rows if config.batching == "static" else 1):
            raise ValueError(
                f"{fraction} of {_mib(free)} of free memory, less {_mib(aside)} for one step's staging, the "
                f"block table, rings and fixed states, is too little for a KV cache in blocks of {_mib(per_block)}; "
                "use a larger EngineConfig.memory_fraction or smaller limits"
            )
        useful = rows * int(blocks_for(longest, config.block_size))
        config = dataclasses.replace(config, num_blocks=min(fitting, useful))
    num_blocks = config.num_blocks or 0
    needed = num_blocks * per_block + _table_bytes(rows, min(width, num_blocks)) + in_places
    if needed > free:
        raise ValueError(
            f"a KV cache of {num_blocks} blocks of {config.block_size} tokens takes {_mib(needed)} with its block "
            f"table, rings and fixed states, and {_mib(free)} are free; "
            "use a smaller EngineConfig.num_blocks or max_batch_size"
        )
    _log.info(
        "KV pool: %d blocks of %d tokens, %s", num_blocks, config.block_size, _mib(num_blocks * per_block)
    )
    if per_ring:
        _log.info("rings of windowed layers: %d requests, %s", rows, _mib(rows * per_ring))
    return config


def _table_bytes(rows: int, width: int) -> int:
    return 4 * rows * width


def _mib(size: int) -> str:
    return f"{size / 2**20:.1f} MiB"


def _with_a_block_a_request(config: EngineConfig, longest: int) -> EngineConfig:
    if (config.num_blocks, config.block_size) == (config.max_batch_size, longest):
        return config
    for name, default in (("num_blocks", None), ("block_size", EngineConfig.block_size)):
        if getattr(config, name) != default:
            raise ValueError(
                f"EngineConfig.{name} is {getattr(config, name)}, but a static batch has one block a request, "
                f"of {longest} tokens; leave it out"
            )
    return dataclasses.replace(config, block_size=longest)
