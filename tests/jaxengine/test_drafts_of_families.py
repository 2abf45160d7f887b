"""Drafts on imported decoders with recurrences, convolutions and rings: the same tokens and bits (M2, M3, E6)."""

import numpy as np
import pytest

import jaxengine as je
from tests.onnx_import.reference import MODELS

LENGTHS = (5, 17, 30)
MOST = 24
SAMPLINGS = (
    je.SamplingParams(temperature=0.0, logprobs=0),
    je.SamplingParams(temperature=0.9, seed=5, logprobs=0),
    je.SamplingParams(temperature=0.0, logprobs=0),
)


def serve(model, prompts, propose=lambda requests: None):
    """Each prompt's tokens and their logprobs, and the engine's metrics."""
    config = je.EngineConfig(max_batch_size=3, max_scheduled_tokens=64, num_blocks=40, chunk_size=9)
    with je.Engine(model, config) as engine:
        requests = [engine.create_request(je.RequestOptions(sampling=sampling)) for sampling in SAMPLINGS]
        for request, prompt in zip(requests, prompts, strict=True):
            request.begin_turn(prompt, je.TurnOptions(MOST))
        logprobs = {request: [] for request in requests}
        while engine.has_pending_requests():
            propose(requests)
            for event in engine.run():
                logprobs[event.request].append(event.logprobs and event.logprobs.chosen)
            je.check_invariants(engine.state)
        return [request.tokens.tolist() for request in requests], list(logprobs.values()), engine.metrics


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3_5", "gemma2"])
def test_M2_M3_E6_I4_drafts_right_and_wrong_change_no_bit(family):
    model = je.load_model(MODELS / "cpu-fp32" / family)
    rng = np.random.default_rng(0)
    prompts = [rng.integers(3, model.config.vocab_size, size=size).tolist() for size in LENGTHS]
    plain, logprobs, metrics = serve(model, prompts)

    def propose(requests):
        for request, prompt, whole in zip(requests, prompts, plain, strict=True):
            generated = request.length - len(prompt)
            if request.status is not je.RequestStatus.ACTIVE or not generated:
                continue
            drafts = whole[request.length : request.length + int(rng.integers(0, 5))]
            if drafts and rng.random() < 0.4:
                drafts[int(rng.integers(0, len(drafts)))] = int(rng.integers(3, model.config.vocab_size))
            request.set_draft_tokens(drafts[: MOST - generated - 1])

    drafted = serve(model, prompts, propose)
    assert drafted[:2] == (plain, logprobs)
    assert 0 < drafted[2].accepted_drafts < drafted[2].drafted_tokens
    assert drafted[2].steps < metrics.steps
