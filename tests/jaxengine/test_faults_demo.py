"""The demo model answers two questions while every stage of its steps fails once, and says the same (F8, F9, E2)."""

import pytest

import jaxengine as je
from jaxengine.text import Tokenizer
from tests.jaxengine.breaking import Stage, outcome, play

QUESTIONS = ("What is the capital of France?", "Write a short poem about the sea.")
GREEDY = je.RequestOptions(sampling=je.SamplingParams(temperature=0.0))
LIMIT = 12
CONFIG = je.EngineConfig(max_batch_size=2, num_blocks=16, failure_policy="isolate", check_invariants=True)
HARMLESS = [stage for stage in Stage if stage is not Stage.PUBLISH]


@pytest.mark.demo
@pytest.mark.slow
def test_F8_F9_E2_the_demo_models_text_is_the_same_with_a_fault_at_every_stage(demo_folder):
    """A fault a step: the nth stage fails in the nth step. After a failed write, what was said before stands."""
    model, tokenizer = je.load_model(demo_folder), Tokenizer.from_folder(demo_folder)
    prompts = [tokenizer.chat_ids([{"role": "user", "content": question}]) for question in QUESTIONS]
    without = play(model, CONFIG, prompts, limit=LIMIT, options=GREEDY)
    texts = answers(tokenizer, prompts, without)
    assert "Paris" in texts[0]
    for kind in ("retryable", "memory", "unknown"):
        faults = [(stage, kind, nth) for nth, stage in enumerate(HARMLESS)]
        story = play(model, CONFIG, prompts, faults, limit=LIMIT, options=GREEDY)
        assert answers(tokenizer, prompts, story) == texts
        assert (story.events, story.tokens) == (without.events, without.tokens)
        stopped = [outcome(stage, kind) is je.StepOutcome.EXECUTION_CONTRACT_FAILURE for stage in HARMLESS]
        raised = [outcome(stage, kind) is None for stage in HARMLESS]
        assert (story.stops, len(story.raised)) == (sum(stopped), sum(raised))
        assert len(story.reports) == len(HARMLESS) - story.stops - len(story.raised)

        lost = play(model, CONFIG, prompts, [(Stage.PUBLISH, kind, 5)], limit=LIMIT, options=GREEDY)
        assert lost.lost
        assert lost.events[:10] == without.events[:10]
        assert [event[2] for event in lost.events[10:]] == [
            je.EngineEventFlags.TURN_FINISHED | je.EngineEventFlags.FAILED
        ] * 2


def answers(tokenizer, prompts, story):
    return [tokenizer.decode(story.tokens[n][len(prompt) :]) for n, prompt in enumerate(prompts, 1)]
