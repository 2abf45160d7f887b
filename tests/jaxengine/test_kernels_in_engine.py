"""The engine with its kernels interpreted: the tokens of plain JAX, and what is settled when a state is made."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path

import chex
import jax
import numpy as np
import pytest
from jax._src.pallas.mosaic_gpu.interpret.interpret_pallas_call import get_races

import jaxengine as je
from jaxengine import programs
from jaxengine.kernels import PREFILL_TILE, Kernels, choose_kernels
from onnx_import import AttentionSpec
from pallas_kernels import backends
from tests.jaxengine.scripts import MODEL

MODELS = Path(__file__).parents[1] / "fixtures" / "models"
CONFIG = je.EngineConfig(
    max_batch_size=2, max_scheduled_tokens=16, num_blocks=10, block_size=8, chunk_size=13
)
HALF = AttentionSpec(0, 32, 8, 128, 128**-0.5, np.dtype("float16"))
"""A layer that kernels take."""

interpreted = pytest.mark.skipif(
    jax.__version_info__ < (0, 11), reason="the kernel interpreter of JAX 0.10 takes minutes for one kernel"
)


def served(model: je.Model, config: je.EngineConfig) -> tuple[list[list[int]], set[str]]:
    """The tokens of two requests, and the kinds of steps that made them: the first prompt takes three chunks."""
    kinds = set()
    with je.Engine(model, config) as engine:
        requests = []
        while not requests or engine.has_pending_requests():
            if len(requests) < 2 and engine.metrics.steps == 3 * len(requests):
                requests.append(engine.create_request())
                prompt = [(3 + 5 * i) % 26 for i in range(36)] if len(requests) == 1 else [8, 4, 9]
                requests[-1].begin_turn(prompt, je.TurnOptions(5 - len(requests)))
            plan = je.plan_step(engine.state)
            if len(plan.rows):
                row_kinds = {"prefill" if row.is_prefill else "decode" for row in plan.rows}
                kinds.add("mixed" if len(row_kinds) > 1 else row_kinds.pop())
            engine.run()
        return [request.tokens.tolist() for request in requests], kinds


# Not marked slow: the session of the newest JAX, the only one that can run it, leaves slow tests out.
@interpreted
@pytest.mark.parametrize(
    "name",
    [
        "cpu-fp32/gemma2",
        pytest.param("cpu-fp32/gptoss", marks=pytest.mark.thorough),
        pytest.param("paged-fp16/llama", marks=pytest.mark.thorough),
    ],
)
def test_R4_E5_the_engine_with_interpreted_kernels_chooses_the_tokens_of_plain_jax(name):
    """Soft cap, a window in rings that wrap; sinks; float16. Prefill by chunks, decode, and both in one step."""
    model = je.load_model(MODELS / name)
    expected, kinds = served(model, CONFIG)
    assert kinds == {"prefill", "decode", "mixed"}
    got, _ = served(model, dataclasses.replace(CONFIG, backend="interpret"))
    assert got == expected
    assert not get_races().races_found


def test_R5_what_a_state_has_settled_reaches_each_part_of_a_step(monkeypatch):
    """What a program is traced with, and what the parts inside of it are called with."""
    called: dict[str, list[dict]] = {"forward": [], "publish": [], "paged_attention": [], "publish_kv": []}

    def recording(name, function):
        def record(*arguments, **options):
            called[name].append(options)
            return function(*arguments, **options)

        return record

    for name in ("paged_attention", "publish_kv"):
        monkeypatch.setattr(programs, name, recording(name, getattr(programs, name)))
    fresh = programs.Programs(MODEL.decoder)
    for name in ("forward", "publish"):
        setattr(fresh, name, recording(name, getattr(fresh, name)))
    model = dataclasses.replace(MODEL, programs=fresh)
    served(model, dataclasses.replace(CONFIG, deterministic=True))
    settled = Kernels(("xla",), "xla", PREFILL_TILE, batch_invariant=True)
    assert called["forward"]
    assert all(options["kernels"] == settled for options in called["forward"])
    assert all(options == {"backend": "xla"} for options in called["publish"] + called["publish_kv"])
    assert called["paged_attention"]
    assert all(
        (options["backend"], options["batch_invariant"]) == ("xla", True)
        for options in called["paged_attention"]
    )


@pytest.mark.parametrize(
    "outside", [(2, 9), (2**31 - 1, 2**31 - 1), (2**30, 2**30)], ids=["padding", "refused draft", "far"]
)
def test_R3_D6_the_kernel_writes_pool_and_rings_as_plain_jax_does(outside):
    """A place far outside is the hard one: times the length of a ring it would come back inside."""
    rng = np.random.default_rng(0)
    shapes = ((9, 2, 1, 4, 4), (2, 3, 2, 1, 4, 4), (2, 4, 2, 1, 4, 4))
    pages = tuple(rng.standard_normal(shape).astype(np.float32) for shape in shapes)
    staged = tuple(rng.standard_normal((4, 2, 1, 4)).astype(np.float32) for _ in shapes)
    place, block = np.array([0, 1, 1, outside[0]], np.int32), np.array([5, 0, 0, outside[1]], np.int32)
    column, slot = np.array([7, 4, 4, 1], np.int32), np.array([3, 0, 1, 2], np.int32)
    to = programs.Destinations(place, column, block, slot, np.zeros(0, np.int32))
    table = np.zeros((2, 8), np.int32)
    run = programs.Programs(MODEL.decoder).publish_copy
    expected, got = (run(pages, table, (), staged, (), to, backend=name) for name in ("xla", "interpret"))
    assert (expected[0][0] != pages[0]).any(axis=(1, 2, 4)).sum() == 3
    chex.assert_trees_all_equal(got, expected)


def test_R5_on_a_cpu_a_state_settles_for_plain_jax():
    state = je.init_state(MODEL, CONFIG)
    assert state.control.kernels == Kernels(("xla",), "xla", PREFILL_TILE)
    with pytest.raises(ValueError, match=r"paged-attention kernel can't be used, .* give backend='xla'"):
        je.init_state(MODEL, dataclasses.replace(CONFIG, backend="mosaic_gpu"))


def test_R5_on_a_cpu_the_machinery_of_gpu_kernels_is_not_imported():
    code = (
        "import sys, numpy, jaxengine, onnx_import, jaxengine.kernels as kernels\n"
        "layer = onnx_import.AttentionSpec(0, 4, 2, 64, 1.0, numpy.dtype('float32'))\n"
        "kernels.choose_kernels([layer], jaxengine.EngineConfig(max_batch_size=1, num_blocks=4, block_size=8))\n"
        "sys.exit('jax.experimental.pallas.mosaic_gpu' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_R5_on_a_gpu_each_layer_that_a_kernel_takes_runs_in_it_and_others_warn_once(monkeypatch):
    monkeypatch.setattr(backends, "compute_capability", lambda: "9.0")
    backends.warn_once.cache_clear()
    config = je.EngineConfig(deterministic=True)
    narrow = dataclasses.replace(HALF, layer=1, num_heads=8, head_dim=64)
    assert choose_kernels((HALF, narrow), config) == Kernels(("mosaic_gpu",) * 2, "mosaic_gpu", 32, True)
    odd = dataclasses.replace(HALF, head_dim=72)
    with pytest.warns(UserWarning, match="paged-attention kernel is not used, .* not 72"):
        chosen = choose_kernels((odd, narrow), config)
    assert chosen == Kernels(("xla", "mosaic_gpu"), "mosaic_gpu", 128, True)
    assert choose_kernels((odd, HALF), dataclasses.replace(config, backend="xla")).attention == ("xla",) * 2
    # A second choice says nothing new.
    assert choose_kernels((odd, HALF), config).attention == ("xla", "mosaic_gpu")


@pytest.mark.parametrize(
    ("limits", "tile"),
    [({}, 32), ({"max_scheduled_tokens": 24}, 24), ({"chunk_size": 20}, 20), ({"chunk_size": 1}, 16)],
)
def test_R1_a_kernels_tiles_of_prefill_hold_no_more_than_a_row_can_have(limits, tile):
    assert choose_kernels((HALF,), je.EngineConfig(backend="mosaic_gpu", **limits)).prefill_tile == tile


def test_R5_heads_too_many_for_a_tile_of_two_queries_are_refused_by_name():
    crowded = dataclasses.replace(HALF, num_heads=40, num_kv_heads=1, head_dim=256)
    with pytest.raises(ValueError, match="64 packed queries a tile, not 2 of 40 heads each"):
        choose_kernels((crowded,), je.EngineConfig(backend="interpret"))


def test_R5_C2_a_backend_is_one_of_three_by_name():
    assert je.EngineConfig().backend is None
    with pytest.raises(
        ValueError, match=r"EngineConfig\.backend is 'triton'; give one of 'mosaic_gpu', 'xla'"
    ):
        je.EngineConfig(backend="triton")
    with pytest.raises(TypeError, match=r"EngineConfig\.backend is 3; give one of"):
        je.EngineConfig(backend=3)
    with pytest.raises(TypeError, match=r"EngineConfig\.deterministic is 1; give True or False"):
        je.EngineConfig(deterministic=1)
