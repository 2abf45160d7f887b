"""J3: a configuration's sliding windows, read as the builder writes them and held against the graph's attention."""

from typing import Any

import pytest

import onnx_import
from tests.onnx_import.manifests import HYBRID, graph, manifest, refused, section


@pytest.mark.parametrize(
    ("window", "key", "problem"),
    [
        ({"layers": [1]}, "window_size", "is missing"),
        ({"window_size": 0, "layers": [1]}, "window_size", "is 0, below 1"),
        ({"window_size": -4, "layers": [1]}, "window_size", "is -4, below 1"),
        ({"window_size": 8.0, "layers": [1]}, "window_size", "should be an integer, not 8.0"),
        ({"window_size": 8, "layers": [6]}, "layers", "holds 6, outside the 6 layers"),
        ({"window_size": 8, "layers": [1, 1]}, "layers", "lists layer 1 twice"),
        ({"window_size": 8, "layers": 1}, "layers", "should be a list of layers, not 1"),
        ({"window_size": 8, "slide_inputs": "no"}, "slide_inputs", "should be true or false, not 'no'"),
        ({"window_size": 8, "cache_slack": -1}, "cache_slack", "is -1, below 0"),
    ],
)
def test_J3_an_impossible_window_is_refused_by_its_key(window: Any, key: str, problem: str) -> None:
    refused(section(HYBRID, sliding_window=window), f"sliding_window.{key}", problem)


def test_J3_a_window_is_read_as_the_builder_writes_it() -> None:
    written = {
        "window_size": 32,
        "slide_key_value_cache": False,
        "slide_inputs": False,
        "layers": [4],
        "cache_slack": 0,
    }
    found = manifest(section(HYBRID, sliding_window=written), graph(HYBRID, {1: -1, 4: 32}))
    assert found.problems == ()
    assert found.sliding_window == onnx_import.SlidingWindow(32, (4,), False, False, 0)
    assert manifest(section(HYBRID, sliding_window=None), graph(HYBRID)).sliding_window is None


@pytest.mark.parametrize(
    ("layers", "slides", "in_graph", "problem"),
    [
        ([4, 2], False, {4: 8}, "lists layer 2, which no 'paged_kv' group does"),
        (
            [4],
            False,
            {4: 16},
            "gives layer 4 a window of 8, but com.microsoft::PagedAttention (node '/layers.4')",
        ),
        ([1, 4], False, {1: -1, 4: 8}, "gives layer 1 a window of 8, but"),
        ([], True, {1: 8, 4: -1}, "PagedAttention (node '/layers.4') has no window"),
        ([], False, {1: -1, 4: -1}, None),
        ([4], False, {1: 8, 4: 8}, None),
    ],
)
def test_J3_configuration_and_graph_agree_about_windows(
    layers: list[int], slides: bool, in_graph: dict[int, int], problem: str | None
) -> None:
    """J3: the graph's attention says what a query sees; a configuration that says otherwise is refused."""
    window = {"window_size": 8, "layers": layers, "slide_key_value_cache": slides}
    problems = manifest(section(HYBRID, sliding_window=window), graph(HYBRID, in_graph)).problems
    assert len(problems) == (problem is not None)
    assert problem is None or problem in problems[0]
