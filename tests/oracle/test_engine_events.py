"""One script of turns, played on our engine and on ONNX Runtime GenAI's, gives the same events in the same order.

A script is a list of commands. A command's outcome is what it returned, the kind of its refusal, or the events of each
`run` that it made; outcomes are compared one by one, so that the two engines must also step alike. The peer's engine
batches statically here, as it does for every folder that doesn't ask for dynamic batching; ours plays each script once
with dynamic and once with static batching. What the two do differently on purpose is in DIFFERENCES, with the rows that
ask for it, and is shown on both sides; most of it is gone where ours batches statically too.
"""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, ClassVar

import hypothesis.strategies as st
import numpy as np
import onnxruntime_genai as og
import pytest
from hypothesis import given, settings

import jaxengine as je

MODELS = Path(__file__).parents[1] / "fixtures" / "models" / "cpu-fp32"
PAGE = Path(__file__).parents[2] / "docs" / "peer-engine.md"
VOCABULARY = 320
CONTEXT = 512
MAX_BATCH = 4
"""Rows of the peer's static batch when the folder says nothing."""

PROMPT, OTHER, LONG = [5, 6, 7], [9, 10, 11], [8, 13, 21, 34, 55, 89, 144]

Script = Sequence[tuple]
CREATE, IDLE, STEP, PENDING, CANCEL = ("create",), ("run_until_idle",), ("run",), ("pending",), ("cancel", 1)
AGAIN = ("begin", [9], 3)


@dataclasses.dataclass(frozen=True)
class Record:
    """One event, with requests told by the order they were created in and enums by their names."""

    request: int | None
    turn_id: int
    flags: str
    token: int | None
    finish_reason: str
    error_code: str
    usage: tuple[int, int, int] | None

    def __str__(self) -> str:
        reason = f":{self.finish_reason}" if self.usage else ""
        code = f":{self.error_code}" if self.error_code != "NONE" else ""
        return f"{'engine' if self.request is None else self.request}:{self.flags}{reason}{code}"


Run = tuple[Record, ...]


class Side:
    """One engine with its requests, told by number; a script's commands are its public methods.

    Attributes:
        flags: The engine's own event flags.
        refusals: For each kind of refusal a pattern that only that kind's message holds.
    """

    flags: ClassVar[tuple]
    refusals: ClassVar[dict[str, str]]
    engine: Any
    requests: list[Any]

    def play(self, script: Script) -> list[Any]:
        return [self._outcome(getattr(self, name), arguments) for name, *arguments in script]

    def run_until_idle(self, max_events: int = 64) -> tuple[Run, ...]:
        """The events of each run; an event of the engine as a whole ends it, since only the caller can help then."""
        runs: list[Run] = []
        while self.pending() and not (runs and any(record.request is None for record in runs[-1])):
            runs.append(self.run(max_events))
        return tuple(runs)

    def run(self, max_events: int = 64) -> Run:
        return tuple(map(self._record, self._events(max_events)))

    def pending(self) -> bool:
        return self.engine.has_pending_requests()

    def create(self, max_session: int = 0) -> int:
        self.requests.append(self._request(max_session))
        return len(self.requests) - 1

    def cancel(self, turn_id: int, request: int = 0) -> bool:
        return self.requests[request].cancel_turn(turn_id)

    def close(self, request: int = 0) -> None:
        self.requests[request].close()

    def drop(self, request: int = 0) -> None:
        self.requests[request] = None

    def _events(self, max_events: int) -> Iterable[Any]:
        raise NotImplementedError

    def _request(self, max_session: int) -> Any:
        raise NotImplementedError

    def _outcome(self, command: Callable, arguments: list) -> Any:
        try:
            return command(*arguments)
        except (RuntimeError, ValueError, TypeError) as error:
            kinds = [kind for kind, words in self.refusals.items() if re.search(words, str(error))]
            if len(kinds) != 1:
                raise
            return f"refused: {kinds[0]}"

    def _record(self, event: Any) -> Record:
        flags = [flag.name for flag in self.flags if int(event.flags) & int(flag)]
        finished = "TURN_FINISHED" in flags
        usage = event.usage
        return Record(
            request=next((i for i, own in enumerate(self.requests) if own and own is event.request), None),
            turn_id=event.turn_id,
            flags="|".join(flags),
            token=event.token if "TOKEN" in flags else None,
            finish_reason=event.finish_reason.name,
            error_code=event.error_code.name,
            usage=(usage.prompt_tokens, usage.generated_tokens, usage.cached_prompt_tokens)
            if finished
            else None,
        )


class Ours(Side):
    flags = tuple(je.EngineEventFlags)
    refusals: ClassVar = {
        "busy": "begin a turn once its current one has finished",
        "undrained": "drain them before the next turn",
        "closed": "is CLOSED",
        "no turn yet": "has had no turn yet",
        "no tokens": "the turn has no tokens",
        "no room": "leave room for at least one generated token",
        "session limit": "this model allows at most",
        "not a count": "give a value from 0",
        "vocabulary": "is outside the vocabulary",
        "batch of several": "was batched with others",
        "not resident": "has lost its static batch",
    }

    def __init__(self, model: je.Model, batching: str) -> None:
        blocks = MAX_BATCH * CONTEXT // 16 if batching == "dynamic" else None
        config = je.EngineConfig(max_batch_size=MAX_BATCH, num_blocks=blocks, batching=batching)
        self.engine = je.Engine(model, config)
        self.requests = []

    def begin(self, tokens: list[int], limit: int = 0, request: int = 0) -> int:
        return self.requests[request].begin_turn(tokens, je.TurnOptions(max_generated_tokens=limit))

    def _request(self, max_session: int) -> je.Request:
        return self.engine.create_request(je.RequestOptions(max_session_tokens=max_session))

    def _events(self, max_events: int) -> list[je.Event]:
        return self.engine.run(max_events)


class Peer(Side):
    flags = tuple(og.EngineEventFlags.__members__.values())
    refusals: ClassVar = {
        "busy": "BeginTurn is only valid for a new request or after",
        "undrained": "while an Engine event is pending",
        # A request that was closed before it ran has left its engine, which the peer then calls destroyed.
        "closed": "closed [Rr]equest|engine has been destroyed",
        "no turn yet": "before a turn has begun",
        "no tokens": "at least one input token",
        "no room": "must leave room for at least one generated token",
        "session limit": "no greater than the model-configured",
        "not a count": "incompatible function arguments",
        "batch of several": "requires exactly one resident request",
        "not resident": "no longer resident",
        "unhealthy": "no longer healthy",
    }

    def __init__(self, model: og.Model) -> None:
        self.engine = og.Engine(model)
        self.requests = []

    def begin(self, tokens: list[int], limit: int = 0, request: int = 0) -> int:
        options = og.TurnOptions(self.requests[request])
        options.set_max_generated_tokens(limit)
        return self.requests[request].begin_turn(np.array(tokens, np.int32), options)

    def _request(self, max_session: int) -> og.Request:
        options = og.RequestOptions()
        options.set_max_session_tokens(max_session)
        return self.engine.create_request(options=options)

    def _events(self, max_events: int) -> og.EngineEventBuffer:
        return self.engine.run(self.engine.create_event_buffer(max_events))


@dataclasses.dataclass(frozen=True)
class Pair:
    """One model folder, loaded by both, and how our engine batches."""

    # Without their contents, which would bury what a failing test has to say.
    ours: je.Model = dataclasses.field(repr=False)
    peer: og.Model = dataclasses.field(repr=False)
    batching: str = "dynamic"

    @staticmethod
    def load(folder: Path) -> Pair:
        return Pair(ours=je.load_model(folder), peer=og.Model(str(folder)))

    def play(self, script: Script) -> tuple[list[Any], list[Any]]:
        """Our outcomes and the peer's."""
        return Ours(self.ours, self.batching).play(script), Peer(self.peer).play(script)

    def require_same(self, script: Script) -> list[Any]:
        """The outcomes of a script, which must be the same on both."""
        ours, peer = self.play(script)
        for place, (mine, theirs) in enumerate(zip(ours, peer, strict=True)):
            assert mine == theirs, f"command {place} of {script}"
        return ours


def told(outcome: Any) -> str:
    """An outcome in short: events of a run apart by spaces, runs by ` / `."""
    if not isinstance(outcome, tuple):
        return str(outcome)
    runs = outcome if outcome and isinstance(outcome[0], tuple) else (outcome,)
    return " / ".join(" ".join(map(str, run)) for run in runs)


def without_kind(outcome: Any) -> Any:
    return "refused" if isinstance(outcome, str) else outcome


def by_request(outcomes: list[Any]) -> dict[int | None, list[Record]]:
    """Every request's own events, whichever run they came from."""
    found: dict[int | None, list[Record]] = {}
    for outcome in outcomes:
        for item in outcome if isinstance(outcome, tuple) else ():
            for record in item if isinstance(item, tuple) else (item,):
                found.setdefault(record.request, []).append(record)
    return found


@pytest.fixture(scope="module")
def loaded_llama() -> Pair:
    return Pair.load(MODELS / "llama")


@pytest.fixture(scope="module")
def loaded_qwen3() -> Pair:
    return Pair.load(MODELS / "qwen3")


@pytest.fixture(scope="module", params=["dynamic", "static"])
def batching(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def llama(loaded_llama, batching) -> Pair:
    return dataclasses.replace(loaded_llama, batching=batching)


@pytest.fixture(params=["loaded_llama", "loaded_qwen3"])
def pair(request, batching) -> Pair:
    return dataclasses.replace(request.getfixturevalue(request.param), batching=batching)


@pytest.fixture(scope="module", params=[0, 2])
def loaded_ending(request, loaded_llama, tmp_path_factory) -> tuple[int, Pair]:
    count = request.param
    [run] = Peer(loaded_llama.peer).play([("create",), ("begin", PROMPT, count + 1), ("run_until_idle",)])[2:]
    tokens = [record.token for (record,) in run]
    assert tokens.index(tokens[count]) == count
    folder = tmp_path_factory.mktemp("ending") / "model"
    shutil.copytree(MODELS / "llama", folder)
    config = json.loads((folder / "genai_config.json").read_text())
    config["model"]["eos_token_id"] = [config["model"]["eos_token_id"], tokens[count]]
    (folder / "genai_config.json").write_text(json.dumps(config))
    return count, Pair.load(folder)


@pytest.fixture
def ending(loaded_ending, batching) -> tuple[int, Pair]:
    """How many tokens PROMPT generates before it meets the EOS, and a model for which that is so."""
    count, loaded = loaded_ending
    return count, dataclasses.replace(loaded, batching=batching)


def requests(*prompts: list[int], limits: Sequence[int] = (4,) * 8) -> list[tuple]:
    """One request a prompt, each with a turn queued."""
    begins = [("begin", prompt, limits[i], i) for i, prompt in enumerate(prompts)]
    return [CREATE] * len(prompts) + begins


def script_table(table: dict[str, tuple[list[tuple], str]]) -> pytest.MarkDecorator:
    """Scripts with the words that what they end with must hold, so that none is equal only by being empty."""
    return pytest.mark.parametrize(("script", "shows"), table.values(), ids=table.keys())


SINGLE_TURNS = {
    "turn limit": (
        [CREATE, ("begin", PROMPT, 4), IDLE],
        "0:TOKEN / 0:TOKEN|TURN_FINISHED:MAX_GENERATED_TOKENS",
    ),
    "turn limit of one": ([CREATE, ("begin", PROMPT, 1), IDLE], "0:TOKEN|TURN_FINISHED:MAX_GENERATED_TOKENS"),
    "one token of input": ([CREATE, ("begin", [5], 3), IDLE], "MAX_GENERATED_TOKENS"),
    "session limit": ([("create", 8), ("begin", PROMPT), IDLE], "TOKEN|TURN_FINISHED:MAX_SESSION_TOKENS"),
    "room for one token": (
        [("create", 4), ("begin", PROMPT), IDLE],
        "0:TOKEN|TURN_FINISHED:MAX_SESSION_TOKENS",
    ),
    "both limits at once": ([("create", 7), ("begin", PROMPT, 4), IDLE], "MAX_GENERATED_TOKENS"),
    "session limit first": ([("create", 6), ("begin", PROMPT, 4), IDLE], "MAX_SESSION_TOKENS"),
    "the context as session limit": (
        [("create", CONTEXT), ("begin", PROMPT, 2), IDLE],
        "MAX_GENERATED_TOKENS",
    ),
    "no limits but the context": ([CREATE, ("begin", LONG * 72, 0), IDLE], "MAX_SESSION_TOKENS"),
}


@script_table(SINGLE_TURNS)
def test_A5_A7_B3_single_turns_end_alike(pair, script, shows):
    assert shows in told(pair.require_same(script)[-1])


CONTINUATIONS = {
    "after the turn limit": ([CREATE, ("begin", PROMPT, 4), IDLE, AGAIN, IDLE], "TURN_FINISHED"),
    "twice": ([CREATE, ("begin", PROMPT, 2), IDLE, AGAIN, IDLE, ("begin", LONG, 5), IDLE], "TURN_FINISHED"),
    "longer than the first": (
        [CREATE, ("begin", [5], 1), IDLE, ("begin", LONG * 2, 4), IDLE],
        "TURN_FINISHED",
    ),
    "into the session limit": (
        [("create", 9), ("begin", PROMPT, 2), IDLE, ("begin", [9, 9]), IDLE],
        "MAX_SESSION",
    ),
    "after a refusal for room": (
        [("create", 9), ("begin", PROMPT, 2), IDLE, ("begin", LONG), ("begin", [9], 2), IDLE],
        "MAX_GENERATED_TOKENS",
    ),
}


@script_table(CONTINUATIONS)
def test_A3_A5_A9_A15_continuations_go_on_alike(pair, script, shows):
    assert shows in told(pair.require_same(script)[-1])


CANCELS = {
    "before the first turn": ([CREATE, ("cancel", 0), CANCEL], "refused: no turn yet"),
    "before the first step": ([CREATE, ("begin", PROMPT, 4), CANCEL, IDLE], "0:TURN_FINISHED:CANCELLED"),
    "before the first step, then a turn": (
        [CREATE, ("begin", PROMPT, 4), CANCEL, IDLE, AGAIN, IDLE],
        "MAX_GENERATED_TOKENS",
    ),
    "in the middle": ([CREATE, ("begin", PROMPT, 4), STEP, STEP, CANCEL, IDLE], "0:TURN_FINISHED:CANCELLED"),
    "in the middle, then a turn": (
        [CREATE, ("begin", PROMPT, 4), STEP, STEP, CANCEL, IDLE, AGAIN, IDLE],
        "MAX_GENERATED_TOKENS",
    ),
    "a continuation before its first step, then a turn": (
        [CREATE, ("begin", PROMPT, 2), IDLE, AGAIN, ("cancel", 2), IDLE, ("begin", [8], 3), IDLE],
        "MAX_GENERATED_TOKENS",
    ),
    "twice": ([CREATE, ("begin", PROMPT, 4), STEP, CANCEL, CANCEL], "False"),
    "an unknown id": ([CREATE, ("begin", PROMPT, 4), STEP, ("cancel", 0), ("cancel", 7)], "False"),
    "a stale id": ([CREATE, ("begin", PROMPT, 2), IDLE, AGAIN, CANCEL], "False"),
    "a finished id": ([CREATE, ("begin", PROMPT, 2), IDLE, CANCEL], "False"),
    "a finished id before its event is drained": (
        [CREATE, ("begin", PROMPT, 2), CANCEL, ("begin", [4]), CANCEL],
        "False",
    ),
    "after close": ([CREATE, ("begin", PROMPT, 2), ("close",), CANCEL], "refused: closed"),
    "one request of two": (
        [*requests(PROMPT, OTHER), STEP, ("cancel", 1, 1), IDLE],
        "1:TURN_FINISHED:CANCELLED / 0:TOKEN",
    ),
    "one request of two before the first step": (
        [*requests(PROMPT, OTHER), CANCEL, IDLE, ("begin", [4], 2), IDLE],
        "0:TOKEN / 0:TOKEN|TURN_FINISHED",
    ),
}


@script_table(CANCELS)
def test_A8_turns_are_cancelled_alike(llama, script, shows):
    assert shows in told(llama.require_same(script)[-1])


REFUSALS = {
    "no tokens": ([CREATE, ("begin", [], 4), ("begin", [])], "refused: no tokens"),
    "while queued": ([CREATE, ("begin", PROMPT, 4), ("begin", [4])], "refused: busy"),
    "while active": ([CREATE, ("begin", PROMPT, 4), STEP, ("begin", [4])], "refused: busy"),
    "with an event undrained": ([CREATE, ("begin", PROMPT, 4), CANCEL, ("begin", [4])], "refused: undrained"),
    "closed": ([CREATE, ("close",), ("begin", [4])], "refused: closed"),
    "a prompt that fills the session": ([("create", 4), ("begin", LONG[:4])], "refused: no room"),
    "a full session": ([("create", 5), ("begin", PROMPT), IDLE, ("begin", [4])], "refused: no room"),
    "a session above the model's": ([("create", CONTEXT + 1)], "refused: session limit"),
    "a negative session": ([("create", -1)], "refused: not a count"),
    "a negative turn limit": ([CREATE, ("begin", PROMPT, -1)], "refused: not a count"),
}


@script_table(REFUSALS)
def test_A4_A5_work_is_refused_alike(llama, script, shows):
    assert told(llama.require_same(script)[-1]) == shows


REFUSED_TURNS = {name: entry for name, entry in REFUSALS.items() if entry[0][-1][0] == "begin"}


@script_table(REFUSED_TURNS)
def test_A4_A6_a_refused_turn_changes_nothing(llama, script, shows):
    """What it would have changed shows in the events and the turns that follow."""
    outcomes = llama.require_same([*script, PENDING, IDLE, ("begin", OTHER, 2), IDLE])
    assert outcomes[len(script) - 1] == shows


BATCHES = {
    "prompts of one length": ([*requests(PROMPT, OTHER), IDLE], "0:TOKEN 1:TOKEN / 0:TOKEN 1:TOKEN"),
    "prompts of several lengths": ([*requests(LONG, [5], PROMPT, OTHER), IDLE], "0:TOKEN 1:TOKEN 2:TOKEN 3:"),
    "limits that differ": (
        [*requests(LONG, PROMPT, OTHER, limits=(5, 2, 4)), IDLE],
        "1:TOKEN|TURN_FINISHED:MAX_GENERATED_TOKENS 2:TOKEN / 0:TOKEN 2:TOKEN / ",
    ),
    "two events at a time": (
        [*requests(PROMPT, OTHER, [4]), ("run_until_idle", 2)],
        "0:TOKEN 1:TOKEN / 2:TOKEN / 0:TOKEN 1:TOKEN / 2:TOKEN",
    ),
    "one event at a time": ([*requests(PROMPT, OTHER), ("run_until_idle", 1)], "0:TOKEN / 1:TOKEN / 0:TOKEN"),
    "no events at a time": ([*requests(PROMPT), ("run", 0), ("run", 0), IDLE], "0:TOKEN / 0:TOKEN"),
    "an idle engine": ([*requests(PROMPT), IDLE, STEP, PENDING], "False"),
    "pending until drained": ([*requests(PROMPT, limits=[1]), PENDING, CANCEL, PENDING], "True"),
    "one closed while queued": ([*requests(PROMPT, OTHER), ("close", 0), IDLE], "1:TOKEN / 1:TOKEN"),
    "one closed while active": ([*requests(PROMPT, OTHER), STEP, ("close", 1), IDLE], "0:TOKEN / 0:TOKEN"),
    "one closed with an event retained": (
        [*requests(PROMPT, OTHER), ("run", 1), ("close", 1), IDLE],
        "0:TOKEN / 0:TOKEN",
    ),
    "all closed": (
        [*requests(PROMPT, OTHER), STEP, ("close", 0), ("close", 1), ("close", 1), PENDING],
        "False",
    ),
    "one dropped while active": ([*requests(PROMPT, OTHER), STEP, ("drop", 0), IDLE], "1:TOKEN / 1:TOKEN"),
    "one dropped with an event retained": (
        [*requests(PROMPT, OTHER), ("run", 1), ("drop", 1), IDLE],
        "0:TOKEN",
    ),
}


@script_table(BATCHES)
def test_A10_A11_B1_B2_B4_B9_batches_that_start_together_run_alike(llama, script, shows):
    assert shows in told(llama.require_same(script)[-1])


def test_A7_B3_an_eos_ends_a_turn_alike(ending):
    count, pair = ending
    [*_, runs] = pair.require_same([CREATE, ("begin", PROMPT), IDLE])
    assert told(runs) == " / ".join(["0:TOKEN"] * count + ["0:TURN_FINISHED:EOS"])
    assert runs[-1][0].usage == (len(PROMPT), count, 0)


@pytest.mark.parametrize("kind", ["GENERATED", "SESSION"])
def test_A5_A7_an_eos_and_a_limit_meet_alike(ending, kind):
    """The EOS would be token `count + 1`: a limit of `count` ends the turn first, one of `count + 1` no longer."""
    count, pair = ending
    for limit in range(max(count, 1), count + 2):
        session, turn = (0, limit) if kind == "GENERATED" else (len(PROMPT) + limit, 0)
        [*_, runs] = pair.require_same([("create", session), ("begin", PROMPT, turn), IDLE])
        assert runs[-1][0].finish_reason == ("EOS" if limit > count else f"MAX_{kind}_TOKENS")


def test_A7_A15_a_turn_after_an_eos_goes_on_alike(ending):
    """The EOS is no part of the sequence: the next turn equals one after a turn that was stopped right before it."""
    count, pair = ending
    stopped = [("begin", PROMPT, count), IDLE] if count else [("begin", PROMPT), CANCEL, IDLE]
    after_eos = pair.require_same([CREATE, ("begin", PROMPT), IDLE, AGAIN, IDLE, ("begin", OTHER, 4), IDLE])
    after_stop = pair.require_same([CREATE, *stopped, AGAIN, IDLE, ("begin", OTHER, 4), IDLE])
    assert after_eos[-4:] == after_stop[-4:]


TOKENS = st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=6)
PROMPTS = st.lists(TOKENS, min_size=2, max_size=MAX_BATCH)
LIMITS = st.lists(st.integers(1, 6), min_size=MAX_BATCH, max_size=MAX_BATCH)
BEGINS = st.tuples(st.just("begin"), TOKENS, st.integers(0, 5))
TURN_CALLS = st.one_of(
    BEGINS,
    st.tuples(st.just("run"), st.integers(0, 2)),
    st.tuples(st.just("cancel"), st.integers(1, 3)),
    st.sampled_from([IDLE, PENDING]),
)
BATCH_CALLS = st.one_of(
    st.just(STEP),
    st.tuples(st.just("cancel"), st.just(1), st.integers(0, 1)),
    st.tuples(st.just("close"), st.integers(0, 1)),
)


@given(session=st.integers(4, 60), first=BEGINS, calls=st.lists(TURN_CALLS, min_size=4, max_size=16))
@settings(max_examples=60)
def test_A4_A8_B1_B9_any_script_of_one_request_plays_alike(llama, session, first, calls):
    script = [("create", session), first, *calls, IDLE, PENDING]
    ours, peer = llama.play(script)
    # Where a turn is refused for two causes, each engine names the one that it looks at first.
    assert list(map(without_kind, ours)) == list(map(without_kind, peer))


@given(prompts=PROMPTS, limits=LIMITS, calls=st.lists(BATCH_CALLS, max_size=8))
@settings(max_examples=30)
def test_A8_A10_B4_any_batch_that_starts_together_runs_alike(llama, prompts, limits, calls):
    llama.require_same([*requests(*prompts, limits=limits), *calls, IDLE])


@given(
    prompts=PROMPTS, limits=LIMITS, waits=st.lists(st.integers(0, 3), min_size=MAX_BATCH, max_size=MAX_BATCH)
)
@settings(max_examples=30)
def test_C1_E5_a_requests_own_events_are_alike_whenever_it_joins(llama, prompts, limits, waits):
    """With dynamic batching a turn joins the running batch, which may change no more than when it runs."""
    script = [CREATE] * len(prompts)
    for place, prompt in enumerate(prompts):
        script += [("begin", prompt, limits[place], place), *[STEP] * waits[place]]
    ours, peer = llama.play([*script, IDLE])
    assert by_request(ours) == by_request(peer)
    assert set(by_request(ours)) == set(range(len(prompts)))


SEVERAL = st.integers(0, 5)
SEVERAL_CALLS = st.one_of(
    st.tuples(st.just("begin"), TOKENS, st.integers(1, 3), SEVERAL),
    st.tuples(st.just("cancel"), st.integers(1, 2), SEVERAL),
    st.tuples(st.sampled_from(["close", "drop"]), SEVERAL),
    st.sampled_from([STEP, STEP, IDLE, PENDING]),
)


def without_calls_of_the_gone(calls: list[tuple]) -> Script:
    """The calls, less those of a dropped request and the turns of one that was cancelled, whose order differs."""
    cancelled, dropped, left = set(), set(), []
    for name, *rest in calls:
        if rest and (rest[-1] in dropped or (name == "begin" and rest[-1] in cancelled)):
            continue
        left.append((name, *rest))
        dropped |= {rest[-1]} if name == "drop" else set()
        cancelled |= {rest[-1]} if name == "cancel" else set()
    return left


@given(calls=st.lists(SEVERAL_CALLS, min_size=12, max_size=40))
@settings(max_examples=60)
def test_O1_O2_with_static_batching_any_script_plays_alike(loaded_llama, calls):
    """Whoever joins whenever: batches form of the same requests, and what they refuse is the same."""
    static = dataclasses.replace(loaded_llama, batching="static")
    static.require_same([*[CREATE] * 6, *without_calls_of_the_gone(calls), IDLE, PENDING])


@dataclasses.dataclass(frozen=True)
class Difference:
    """Something that the engines do differently by design: a row of the page, and the script that shows it.

    Attributes:
        what: The situation.
        peer: What the peer does.
        ours: What we do.
        stays: Whether we do so with static batching too; else we then do what the peer does.
        rows: The behaviours that ask for ours.
        script: Shows it; up to the commands that the two tuples below describe, outcomes are the same.
        peer_told: What the peer's last outcomes tell.
        ours_told: What ours tell.
    """

    what: str
    peer: str
    ours: str
    stays: bool
    rows: str
    script: Script
    peer_told: tuple[str, ...]
    ours_told: tuple[str, ...]


DONE = "TOKEN|TURN_FINISHED:MAX_GENERATED_TOKENS"
DIFFERENCES = (
    Difference(
        "A token id above the vocabulary",
        "The turn begins; its step fails, the turn ends `FAILED`, and the engine takes no more work",
        "`begin_turn` refuses it, and nothing has changed",
        True,
        "A3",
        [CREATE, ("begin", [VOCABULARY], 2), STEP, ("begin", PROMPT, 1), STEP],
        ("1", "0:TURN_FINISHED|FAILED:FAILED:ENGINE_EXECUTION_FAILURE", *["refused: unhealthy"] * 2),
        ("refused: vocabulary", "", "1", f"0:{DONE}"),
    ),
    Difference(
        "A negative token id",
        "Taken as if counted from the vocabulary's end",
        "`begin_turn` refuses it, and nothing has changed",
        True,
        "A3",
        [CREATE, ("begin", [-1], 1), STEP],
        ("1", f"0:{DONE}"),
        ("refused: vocabulary", ""),
    ),
    Difference(
        "A turn finds both an undrained event and too little room",
        "Refused for the room",
        "Refused for the event",
        True,
        "A4",
        [("create", 4), ("begin", PROMPT), CANCEL, ("begin", PROMPT)],
        ("refused: no room",),
        ("refused: undrained",),
    ),
    Difference(
        "`cancel_turn` of a number that no turn can have, such as -1",
        "Refused",
        "False, as for any unknown id",
        True,
        "A8",
        [CREATE, ("begin", PROMPT, 2), ("cancel", -1)],
        ("refused: not a count",),
        ("False",),
    ),
    Difference(
        "A turn is cancelled while the event of its newest token is undrained",
        "That event becomes the terminal one as well",
        "The event stays as it was committed; the terminal one follows it",
        True,
        "A8, B2",
        [*requests(PROMPT, OTHER, limits=(2, 4)), ("run", 1), ("cancel", 1, 1), IDLE],
        (f"1:TOKEN|TURN_FINISHED:CANCELLED / 0:{DONE}",),
        (f"1:TOKEN 1:TURN_FINISHED:CANCELLED / 0:{DONE}",),
    ),
    Difference(
        "A turn begins while another request is active",
        "It waits until every request of the running batch has finished",
        "It joins the next step",
        False,
        "C1",
        [CREATE, CREATE, ("begin", PROMPT, 3, 0), STEP, ("begin", OTHER, 2, 1), IDLE],
        (f"0:TOKEN / 0:{DONE} / 1:TOKEN / 1:{DONE}",),
        (f"0:TOKEN 1:TOKEN / 0:{DONE} 1:{DONE}",),
    ),
    Difference(
        "A request cancelled before it ran takes its next turn while another waits",
        "It keeps its old place in the queue",
        "It queues behind the other, since turns wait in the order they began",
        True,
        "C1",
        [*requests(PROMPT, OTHER, limits=(1, 1)), CANCEL, ("run", 1), ("begin", [4], 1), IDLE],
        (f"0:{DONE} 1:{DONE}",),
        (f"1:{DONE} 0:{DONE}",),
    ),
    Difference(
        "A further turn of a request that ran beside others",
        "Refused, even once the others are closed",
        "It goes on",
        False,
        "A2, A9",
        [*requests(PROMPT, OTHER, limits=(1, 1)), IDLE, ("close", 1), ("begin", [4], 1), IDLE],
        ("refused: batch of several", ""),
        ("2", f"0:{DONE}"),
    ),
    Difference(
        "A further turn of a request after others ran",
        "Refused: its batch was recycled",
        "It goes on",
        False,
        "A2, A9",
        [CREATE, ("begin", PROMPT, 1), IDLE, CREATE, ("begin", OTHER, 1, 1), IDLE, ("begin", [4], 1), IDLE],
        ("refused: not resident", ""),
        ("2", f"0:{DONE}"),
    ),
    Difference(
        "As many requests as fit have finished and none is closed, and another waits",
        "Their batch is recycled for it",
        "`CAPACITY_BLOCKED` until one of them is closed, for each could take another turn",
        False,
        "A9, B6",
        [*requests(PROMPT, OTHER, [4], [5], LONG, limits=(1,) * 5), STEP, STEP, ("close", 0), IDLE],
        (f"4:{DONE}", "None", ""),
        ("engine:CAPACITY_BLOCKED:CAPACITY_DEFERRED", "None", f"4:{DONE}"),
    ),
)


@pytest.mark.parametrize("difference", DIFFERENCES, ids=lambda difference: difference.what)
def test_A2_A3_A4_A8_A9_B2_B6_C1_O1_O2_each_difference_is_as_stated(llama, difference):
    ours, peer = llama.play(difference.script)
    shown = len(difference.ours_told)
    assert ours[:-shown] == peer[:-shown]
    assert tuple(map(told, peer[-shown:])) == difference.peer_told
    if llama.batching == "dynamic" or difference.stays:
        assert tuple(map(told, ours[-shown:])) == difference.ours_told
    else:
        assert ours == peer
    assert difference.ours_told != difference.peer_told


def test_A3_the_peer_counts_a_negative_token_from_the_vocabularys_end(llama):
    [negative, last] = ([CREATE, ("begin", [token], 4), IDLE] for token in (-1, VOCABULARY - 1))
    assert Peer(llama.peer).play(negative) == Peer(llama.peer).play(last)


def test_the_page_lists_every_difference():
    lines = [line for line in PAGE.read_text().splitlines() if line.startswith("| ")]
    assert lines[2:] == [
        f"| {d.what} | {d.peer} | {d.ours} | {'differs too' if d.stays else 'as the peer'} | {d.rows} |"
        for d in DIFFERENCES
    ]
