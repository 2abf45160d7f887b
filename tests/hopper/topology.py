"""A Hopper card as XLA describes one, so that XLA compiles for it on a machine without a GPU.

`h100_target.txt` holds NVIDIA's facts about the card in XLA's text format. A device of the description can't run
anything, and its client needs no driver, only JAX's CUDA plugin.
"""

from __future__ import annotations

import functools
import importlib.util
import os
from pathlib import Path

import jax
from jax.experimental import topologies

TARGET = Path(__file__).with_name("h100_target.txt")


def has_cuda_plugin() -> bool:
    """Whether one of JAX's CUDA plugins is installed."""
    return any(importlib.util.find_spec(f"jax_cuda{version}_plugin") for version in (12, 13))


@functools.cache
def topology() -> topologies.TopologyDescription:
    """One H100."""
    os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")  # else the plugin asks for cuDNN and others
    return topologies.get_topology_desc(
        platform="cuda", topology_name="", target_config=TARGET.read_text(), topology="1x1x1"
    )


def device() -> jax.Device:
    """The one device of `topology()`."""
    return topology().devices[0]
