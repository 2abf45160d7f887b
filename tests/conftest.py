"""Settings of the whole suite: strict dtypes in JAX, repeatable examples, compiled programs kept.

The default Hypothesis profile tries the same examples every time; `pytest --hypothesis-profile=search` looks
for new ones. `--thorough` makes searches and comparisons as long as they can be, and runs tests that have a shorter
sister.
"""

import collections
import gc
import os
import tempfile
from pathlib import Path

# Before JAX is imported, and in the environment, so that the programs which tests start see it too. Workers that
# pytest-xdist starts share the folder of the process that starts them.
if "PYTEST_XDIST_WORKER" not in os.environ:
    _cache = tempfile.TemporaryDirectory(prefix="jaxengine-tests-", ignore_cleanup_errors=True)
    os.environ["JAX_COMPILATION_CACHE_DIR"] = _cache.name
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.2"

import hypothesis
import jax
import pytest

# ONNX never mixes dtypes, so neither may its translation; rank promotion stays, since ONNX broadcasts by it.
jax.config.update("jax_numpy_dtype_promotion", "strict")

hypothesis.settings.register_profile("repeat", deadline=None, derandomize=True, print_blob=True)
hypothesis.settings.register_profile("search", deadline=None, print_blob=True, max_examples=1000)
hypothesis.settings.load_profile("repeat")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--thorough", action="store_true", help="run searches and comparisons at full length")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Puts long files first, so that no worker is left alone with one at the end."""
    costs: collections.Counter[Path] = collections.Counter()
    for item in items:
        marks = {mark.name for mark in item.iter_markers()}
        if "thorough" not in marks or config.getoption("thorough"):
            # In tenths of a second, as the longest of each kind take.
            costs[item.path] += 300 if "demo" in marks else 100 if "slow" in marks else 1
    items.sort(key=lambda item: -costs[item.path])


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("thorough") and not item.config.getoption("thorough"):
        pytest.skip("takes long, and one like it runs without --thorough")


@pytest.fixture(scope="module", autouse=True)
def old_objects_are_passed_over() -> None:
    """What is alive when a file begins is no garbage of its tests, whose collections would look at ever more of it."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def thorough(pytestconfig: pytest.Config) -> bool:
    """Whether searches run at full length."""
    return pytestconfig.getoption("thorough")


@pytest.fixture(scope="session")
def demo_folder() -> Path:
    """The demo model in the user's cache, made by the first test that asks; for tests marked `demo`."""
    from jaxengine.demo import demo_model_folder

    return demo_model_folder(progress=False)
