"""JSON schemas on the demo model: what ends is valid, what is cut says so, faults change nothing (L1, case C28)."""

import contextlib
import json

import jsonschema
import pytest

import jaxengine as je
from tests.jaxengine.json_schemas import SCHEMAS

BUDGET = 40
GREEDY = je.SamplingParams(temperature=0.0)
HANDFUL = ("const_object", "pattern", "fixed_array", "uuid")
FAULTS = [stage for stage in je.Stage if stage not in (je.Stage.PUBLISH, je.Stage.PLAN, je.Stage.RESERVE)]


def config(rows):
    """Four tokens a row, so that few rows need few shapes: compiling them is most of the time that they take."""
    return je.EngineConfig(
        max_batch_size=rows, max_scheduled_tokens=4 * rows, num_blocks=rows * 5, failure_policy="isolate"
    )


def run(model, names):
    """All schemas side by side, each as its request's grammar."""
    engine = je.Engine(model, config(len(names)))
    texts, ends, requests = dict.fromkeys(names, ""), {}, {}
    for name in names:
        options = je.RequestOptions(sampling=GREEDY, grammar=je.Grammar.json_schema(SCHEMAS[name]))
        requests[engine.create_request(options)] = name
    for request, name in requests.items():
        request.begin_turn(model.tokenizer.encode(f"{name} as JSON: "), je.TurnOptions(BUDGET))
    while engine.has_pending_requests():
        for event in engine.run():
            if event.request is None:
                continue
            texts[requests[event.request]] += event.text
            if je.EngineEventFlags.TURN_FINISHED in event.flags:
                ends[requests[event.request]] = event
                event.request.close()
    return texts, ends


def is_whole(text, name):
    try:
        jsonschema.validate(json.loads(text), SCHEMAS[name])
    except (json.JSONDecodeError, jsonschema.ValidationError):
        return False
    return True


@pytest.fixture(scope="module")
def model(demo_folder):
    return je.load_model(demo_folder, weights="fast")


@pytest.mark.demo
@pytest.mark.slow
@pytest.mark.thorough
def test_L1_case_C28_fifty_schemas_are_kept_or_say_that_they_were_cut(model):
    texts, ends = run(model, SCHEMAS)
    reasons = {name: end.finish_reason for name, end in ends.items()}
    assert set(reasons.values()) <= {je.FinishReason.EOS, je.FinishReason.MAX_GENERATED_TOKENS}
    done = [name for name, reason in reasons.items() if reason == je.FinishReason.EOS]
    assert len(done) >= 30
    for name in done:
        jsonschema.validate(json.loads(texts[name]), SCHEMAS[name])
    for name, end in ends.items():
        assert (je.EngineEventFlags.GRAMMAR_INCOMPLETE in end.flags) == (not is_whole(texts[name], name))
    for name in reasons.keys() - set(done):
        assert ends[name].usage.generated_tokens == BUDGET


@pytest.mark.demo
@pytest.mark.slow
def test_L1_L2_F8_case_C28_faults_change_no_text_of_the_demo_model(model):
    """The nth stage fails in the nth step, by turns in a way that is known and in one that isn't."""
    expected, ended = run(model, HANDFUL)
    done = [name for name, end in ended.items() if end.finish_reason == je.FinishReason.EOS]
    assert done
    for name in done:
        jsonschema.validate(json.loads(expected[name]), SCHEMAS[name])
    errors = [(je.RetryableStepError, RuntimeError)[n % 2]("no luck") for n in range(len(FAULTS))]
    with contextlib.ExitStack() as stack:
        faults = [
            stack.enter_context(je.inject_fault(stage, error, skip=n))
            for n, (stage, error) in enumerate(zip(FAULTS, errors, strict=True))
        ]
        texts, ends = run(model, HANDFUL)
    assert all(fault.fired for fault in faults)
    assert texts == expected
    assert [end.flags for end in ends.values()] == [end.flags for end in ended.values()]
    assert not any(end.detail for end in ends.values())
