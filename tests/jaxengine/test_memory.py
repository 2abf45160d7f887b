"""What a thousand random requests leave behind: a store of the same size, and no array that a fresh engine lacks."""

import collections
import gc
import random

import jax
import numpy as np
import pytest

import jaxengine as je
from jaxengine.toy import LETTERS, toy_model
from tests.jaxengine.harness import SMALL

MODEL = toy_model(eos=(3, 17))
FAULTS = [
    (stage, kind)
    for stage in je.Stage
    if stage not in (je.Stage.PLAN, je.Stage.PUBLISH)
    for kind in (MemoryError, je.RetryableStepError)
]


def arrays_alive():
    """How many device arrays there are of each shape and dtype."""
    gc.collect()
    return collections.Counter((array.shape, array.dtype) for array in jax.live_arrays())


def churn(engine, count, rng):
    """Runs `count` random requests that finish, go on, are cancelled, closed or dropped, with steps that fail."""
    live = []
    for _ in range(count):
        request = engine.create_request()
        prompt = [rng.randrange(LETTERS) for _ in range(rng.randint(1, 20))]
        request.begin_turn(prompt, je.TurnOptions(rng.randint(1, 12)))
        live.append(request)
        with je.inject_fault(*fault(rng), skip=rng.randrange(4)):
            for _ in range(rng.randint(0, 4)):
                engine.run(rng.randint(1, 5))
        while len(live) > 6:
            end(engine, live.pop(rng.randrange(len(live))), rng)
    for request in live:
        request.close()


def fault(rng):
    stage, kind = rng.choice(FAULTS)
    return stage, kind("injected")


def end(engine, request, rng):
    match rng.randrange(4):
        case 0:
            request.close()
        case 1:
            request.cancel_turn(request.turn_id)
        case 2 if request.status == je.RequestStatus.TURN_COMPLETE:
            if engine.state.control.events:
                engine.run(100)
            request.begin_turn([1], je.TurnOptions(2))
    # The handle goes away with this call, whatever the request is doing.


@pytest.mark.slow
def test_A10_A11_D1_D6_a_thousand_random_requests_leave_no_array_behind():
    before = arrays_alive()
    engine = je.Engine(MODEL, SMALL)
    fresh, size = arrays_alive(), engine.metrics.pool_bytes
    assert fresh - before  # the pages and the table are seen
    churn(engine, 1000, random.Random(5))
    while engine.has_pending_requests():
        engine.run(100)
    assert engine.metrics.pool_bytes == size
    assert engine.metrics.residents == 0
    assert engine.metrics.free_blocks == SMALL.num_blocks
    assert len(engine.state.control.requests) == 0
    assert sum(np.size(column) for column in jax.tree.leaves(engine.state.control.requests)) == 0
    assert arrays_alive() == fresh
    assert engine.metrics.steps > 1000
    assert engine.metrics.rolled_back_steps > 100
    engine.close()
    assert arrays_alive() == before
