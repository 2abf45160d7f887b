"""What can be shown of a model folder: logits beside ONNX Runtime's, and the same bits however the engine runs it.

Four prompts, two of them longer than window and chunk together, are served by the functional core: alone, cut into
chunks, and packed; and by `Engine`, with steps that fail.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime

import jaxengine as je
import onnx_import
from jaxengine.cli.reference import reference_logits
from tests.jaxengine.serving import Served, differences, serve

LENGTHS = (5, 3, 33, 34)
SESSIONS = (37, 30, 65, 66)
"""Tokens of each prompt, and the limit of its session: what it may generate, and by which some graphs choose tables."""
MOST = 32
ALONE = je.EngineConfig(max_batch_size=4, max_scheduled_tokens=64, num_blocks=40, block_size=16)
CHUNKED = dataclasses.replace(ALONE, chunk_size=7)
FAULTS = (
    (je.Stage.PACK, 1),
    (je.Stage.EXECUTE, 3),
    (je.Stage.LOGITS, 0),
    (je.Stage.SAMPLE, 6),
    (je.Stage.VALIDATE, 2),
    (je.Stage.BOOKKEEPING, 9),
    (je.Stage.EVENTS, 12),
)
"""Where steps fail, and how many steps pass that stage before."""


class Reference:
    """ONNX Runtime on a folder's two-dimensional file, as `jaxengine verify` runs it.

    `model` may be any with the same heads; it tells their sizes, which the file leaves open.
    """

    def __init__(self, folder: Path, model: je.Model | None = None) -> None:
        self._folder, self._model = onnx_import.read_folder(folder), model or je.load_model(folder)

    def logits(self, ids: np.ndarray) -> np.ndarray:
        """float32[tokens, vocab] of one sequence, run at once from empty state."""
        return reference_logits(self._folder, self._model, ids, onnxruntime)


@dataclasses.dataclass(frozen=True)
class Tie:
    """A token that isn't the one that a reference finds likeliest: its logit and that one's, from both."""

    mine: tuple[float, float]
    theirs: tuple[float, float]


@dataclasses.dataclass(frozen=True)
class Agreement:
    """The engine's logits behind every token that it chose, beside a reference's of the same tokens.

    Attributes:
        differences: float32[tokens], the largest difference at each, as a share of the reference's largest logit.
        scale: The reference's largest logit.
        ties: The tokens that the reference would not have chosen.
    """

    differences: np.ndarray
    scale: float
    ties: tuple[Tie, ...]

    def wrong(self, tolerance: float) -> list[Tie]:
        """The ties whose two logits are further apart in the reference than differences within a tolerance explain."""
        return [tie for tie in self.ties if tie.theirs[1] - tie.theirs[0] > 2 * tolerance * self.scale]


def compare(ours: np.ndarray, others: np.ndarray) -> Agreement:
    """Compare float32[tokens, vocab] with a reference."""
    scale = np.abs(others).max()
    ties = []
    for one, other in zip(ours, others, strict=True):
        mine, best = int(one.argmax()), int(other.argmax())
        if mine != best:
            ties.append(Tie((float(one[mine]), float(one[best])), (float(other[mine]), float(other[best]))))
    return Agreement(np.abs(ours - others).max(axis=1) / scale, float(scale), tuple(ties))


class Checks:
    """All runs of one folder, each made when it is first asked for."""

    def __init__(self, folder: Path, weights: Any = "exact") -> None:
        # Without tokens that end a turn, so that every prompt gets as many tokens.
        self.model = je.load_model(folder, weights, {"model": {"eos_token_id": None}})
        random = np.random.default_rng(len(LENGTHS))
        self.prompts = [random.integers(3, 300, length) for length in LENGTHS]

    @functools.cached_property
    def alone(self) -> list[Served]:
        """Each prompt by itself, in one chunk."""
        return [self._serve(ALONE, [nth]) for nth in range(len(LENGTHS))]

    @functools.cached_property
    def chunked(self) -> list[Served]:
        """Each prompt by itself, in chunks of seven."""
        return [self._serve(CHUNKED, [nth]) for nth in range(len(LENGTHS))]

    @functools.cached_property
    def packed(self) -> Served:
        """All prompts together."""
        return self._serve(ALONE, range(len(LENGTHS)))

    @functools.cached_property
    def logits(self) -> np.ndarray:
        """float32[tokens, vocab], the engine's own behind every token of every prompt."""
        return np.stack([row for served in self.alone for _, row in sorted(served.logits.items())])

    def reference_logits(self, folder: Path) -> np.ndarray:
        """What ONNX Runtime has on a folder in place of `logits`, after the same tokens.

        Where the likeliest token is the same everywhere, a greedy loop of the reference gives the engine's tokens.
        """
        reference, found = Reference(folder, self.model), []
        for nth, served in enumerate(self.alone):
            sequence = np.concatenate([self.prompts[nth], served.tokens[0]]).astype(np.int64)
            # The reference chooses tables by the length of its input, the engine by the limit of the session.
            padded = np.pad(sequence, (0, SESSIONS[nth] - len(sequence)), constant_values=3)
            found.append(reference.logits(padded)[LENGTHS[nth] - 1 : len(sequence) - 1])
        return np.concatenate(found)

    def chunk_differences(self) -> list[str]:
        """Where logits depend on how a prompt is cut."""
        return [
            each.replace("prompt 0", f"prompt {nth}")
            for nth, pair in enumerate(zip(self.chunked, self.alone, strict=True))
            for each in differences(*pair)
        ]

    def company_differences(self) -> list[str]:
        """Where logits depend on who else is in the batch."""
        return differences(self.packed, self._together(self.alone))

    def fault_differences(self) -> list[str]:
        """Where tokens depend on steps that failed and were taken again; by `Engine`, as a user runs it."""
        found: list[list[int]] = [[] for _ in LENGTHS]
        with contextlib.ExitStack() as stack:
            engine = stack.enter_context(je.Engine(self.model, ALONE))
            armed = [
                stack.enter_context(je.inject_fault(stage, je.RetryableStepError(stage.value), skip=skip))
                for stage, skip in FAULTS
            ]
            requests = []
            for prompt, session in zip(self.prompts, SESSIONS, strict=True):
                requests.append(engine.create_request(_options(session)))
                requests[-1].begin_turn(prompt.tolist(), je.TurnOptions(max_generated_tokens=MOST))
            while engine.has_pending_requests():
                for event in engine.run():
                    if event.flags & je.EngineEventFlags.TOKEN:
                        found[requests.index(event.request)].append(event.token)
        problems = [f"no step failed at {fault.stage.value}" for fault in armed if not fault.fired]
        expected = [served.tokens[0] for served in self.alone]
        problems += [
            f"prompt {nth} has other tokens"
            for nth, pair in enumerate(zip(found, expected, strict=True))
            if pair[0] != pair[1]
        ]
        return problems

    def _serve(self, config: je.EngineConfig, chosen: Sequence[int]) -> Served:
        prompts = [self.prompts[nth] for nth in chosen]
        return serve(self.model, config, prompts, most=MOST, sessions=[SESSIONS[nth] for nth in chosen])

    @staticmethod
    def _together(parts: Sequence[Served]) -> Served:
        logits = {
            (i, length): row for i, part in enumerate(parts) for (_, length), row in part.logits.items()
        }
        return Served(logits, [part.tokens[0] for part in parts], 0, 0)


def _options(session: int) -> je.RequestOptions:
    return je.RequestOptions(sampling=je.SamplingParams(temperature=0.0), max_session_tokens=session)
