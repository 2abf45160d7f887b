"""An engine over the toy decoder whose user holds on to every request, and whose runs are told in short."""

import jaxengine as je
from jaxengine.toy import toy_model

MODEL = toy_model()
STATIC = je.EngineConfig(max_batch_size=3, max_scheduled_tokens=16, batching="static", check_invariants=True)


class Held(je.Engine):
    """An engine whose user holds on to every request."""

    def __init__(self, config=STATIC):
        super().__init__(MODEL, config)
        self.held = []

    def create_request(self, options=None):
        self.held.append(super().create_request(options))
        return self.held[-1]


def begin(engine, *prompts, limit=2):
    """A request a prompt, each with its turn queued."""
    made = [engine.create_request() for _ in prompts]
    for request, prompt in zip(made, prompts, strict=True):
        request.begin_turn(prompt, je.TurnOptions(limit))
    return made


def events_of(engine):
    """All events until nothing is pending."""
    found = []
    for _ in range(99):
        if not engine.has_pending_requests():
            return found
        found += engine.run()
    raise AssertionError(f"work is left after 99 runs, which gave {found}")


def runs(engine, count=99):
    """Whose events each of up to `count` runs gave, until nothing is pending; None stands for the engine."""
    found = []
    while engine.has_pending_requests() and len(found) < count:
        found.append([event.request and event.request.id for event in engine.run()])
    return found


def occupied(engine):
    return engine.metrics.num_blocks - engine.metrics.free_blocks
