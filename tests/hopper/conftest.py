"""Tests marked `hopper` need JAX's CUDA plugin and CUDA's assembler, which `nox -s hopper` installs."""

import pytest

from tests.hopper.machine_code import tool
from tests.hopper.topology import has_cuda_plugin


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("hopper") is None:
        return
    if not has_cuda_plugin():
        pytest.skip("compiling for Hopper needs JAX's CUDA plugin; run `nox -s hopper`")
    for name in ("ptxas", "nvdisasm"):
        try:
            tool(name)
        except FileNotFoundError as missing:
            pytest.skip(f"compiling for Hopper: {missing}")
