"""Calls into an engine from inside its own step, by a policy or a signal handler, and errors that look like an end."""

import pytest

import jaxengine as je
from jaxengine.toy import continuation, toy_model
from tests.jaxengine.harness import SMALL

MODEL = toy_model()
PROMPTS = ([3, 1], [4, 1, 5])


@pytest.mark.parametrize("call", ["close", "cancel", "run", "create"])
def test_A8_A10_D4_a_call_from_inside_the_policy_drops_at_most_that_step(call):
    pending = [True]

    def policy(candidates):
        if pending:
            pending.pop()
            calls[call]()
        return je.decode_first(candidates)

    config = je.EngineConfig(
        max_batch_size=4, max_scheduled_tokens=16, num_blocks=16, block_size=4, policy=policy
    )
    engine = je.Engine(MODEL, config)
    first, second = (engine.create_request() for _ in PROMPTS)
    calls = {
        "close": second.close,
        "cancel": lambda: second.cancel_turn(1),
        "run": engine.run,
        "create": engine.create_request,
    }
    for request, prompt in zip((first, second), PROMPTS, strict=True):
        request.begin_turn(prompt, je.TurnOptions(3))
    while engine.has_pending_requests():
        assert not any(je.EngineEventFlags.FAILED in event.flags for event in engine.run())
        je.check_invariants(engine.state)
    assert first.tokens.tolist() == [*PROMPTS[0], *continuation(PROMPTS[0], 3)]
    expected = {"close": [], "cancel": PROMPTS[1]}.get(call, [*PROMPTS[1], *continuation(PROMPTS[1], 3)])
    assert second.tokens.tolist() == expected


@pytest.mark.parametrize("stage", [stage for stage in je.Stage if stage is not je.Stage.PLAN])
def test_F4_F9_a_stop_iteration_is_an_error_like_any_other(stage):
    fatal = stage in (je.Stage.RESERVE, je.Stage.PUBLISH)
    engine = je.Engine(MODEL, je.EngineConfig(**vars(SMALL) | {"failure_policy": "isolate"}))
    request = engine.create_request()
    request.begin_turn([3, 1], je.TurnOptions(3))
    with je.inject_fault(stage, StopIteration("injected")):
        (event,) = engine.run()
    assert (
        je.EngineEventFlags.FAILED in event.flags if fatal else event.flags == je.EngineEventFlags.RETRYABLE
    )
    while engine.has_pending_requests():
        engine.run()
    assert request.tokens.tolist() == [3, 1, *([] if fatal else continuation([3, 1], 3))]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("sample", ValueError()), "the stage is 'sample'; give a Stage"),
        ((je.Stage.PACK, ValueError), "the error is .*; give an exception, made and not raised"),
        ((je.Stage.PACK, "no room"), "the error is 'no room'; give an exception"),
    ],
)
def test_F8_a_fault_that_could_never_fire_is_refused(arguments, message):
    with pytest.raises(TypeError, match=message), je.inject_fault(*arguments):
        pass
    with pytest.raises(ValueError, match="skip is -1"), je.inject_fault(je.Stage.PACK, ValueError(), skip=-1):
        pass


def test_A5_A7_attach_refuses_a_state_of_other_limits_or_end_tokens():
    for other in (toy_model(context_length=8), toy_model(eos=(20,))):
        engine = je.Engine(other, SMALL)
        engine.detach()
        with pytest.raises(ValueError, match="made for another model, or one of other settings"):
            engine.attach(je.init_state(MODEL, SMALL))


def test_what_apply_is_given_has_to_return_a_state():
    engine = je.Engine(MODEL, SMALL)
    with pytest.raises(TypeError, match="the state is a int"):
        engine.apply(lambda state: (3, 4))
    assert not engine.has_pending_requests()
