"""S4: the demo model loads in little more memory than its weights take as they are held."""

from pathlib import Path

import pytest

from benchmarks.load_memory import make_jaxengine
from benchmarks.turns import Contender, started


@pytest.mark.demo
@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="only Linux tells the peak of one load")
@pytest.mark.parametrize("weights", ["exact", "fast"])
def test_S4_loading_peaks_below_1_3_times_the_weights(demo_folder: Path, weights: str):
    """S4: in a process of its own. int4 weights become floats of eight times their size, or int8; about 1.04 and 1.25
    are seen, where JAX's own memory for tracing counts too."""
    with started([Contender("load", make_jaxengine, (str(demo_folder), weights))]) as processes:
        measured = processes["load"].do({})
    assert measured["held_bytes"] > 150e6
    assert measured["peak_bytes"] < 1.3 * measured["held_bytes"]
