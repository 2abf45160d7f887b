"""Many prompts in, as many completions out: the engine for callers who don't wait for single tokens.

All prompts of a call share one engine and are batched continuously: a finished one leaves, and the next takes its place
before the following step. With static batching the next ones wait until all have left.
"""

from __future__ import annotations

import collections
import dataclasses
import os
from collections.abc import Iterable, Mapping, Sequence, Set
from types import TracebackType
from typing import Any, Literal

import numpy as np

from jaxengine import requests
from jaxengine.checks import require_count, require_positive
from jaxengine.config import EngineConfig, RequestOptions, TurnOptions
from jaxengine.engine import Engine
from jaxengine.errors import EngineError
from jaxengine.events import EngineEventFlags, FinishReason, TokenLogprobs, Usage
from jaxengine.grammars import Grammar
from jaxengine.handles import Event, Request
from jaxengine.model import load_model
from jaxengine.proposers import NgramDrafts
from jaxengine.sampling_params import SamplingParams
from jaxengine.text import Message, TextError, Tokenizer

Prompt = str | Sequence[int] | np.ndarray
"""Raw text, which the tokenizer turns into ids by its own rules, or the ids themselves."""
_GOLDEN = 0x9E3779B9


@dataclasses.dataclass(frozen=True)
class Completion:
    """What came of one prompt.

    Attributes:
        prompt_token_ids: The prompt as the model saw it.
        token_ids: The generated tokens; an EOS is not among them.
        text: The generated tokens as text, special tokens left out; it ends before a stop string.
        finish_reason: Why generation ended.
        usage: The counts of prompt and generated tokens.
        error: What went wrong, in a sentence, where `finish_reason` is FAILED; the tokens are those before it.
        stop: The stop string that ended it, or empty.
        logprobs: One a token, where the sampling settings ask for them; else empty.
        prompt_logprobs: One a token of the prompt, None for its first, where the settings ask for them; else empty.
        grammar_incomplete: A limit or a stop string ended it, and its grammar doesn't allow the text to end there.
    """

    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    text: str
    finish_reason: FinishReason
    usage: Usage
    error: str = ""
    stop: str = ""
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs | None, ...] = ()
    grammar_incomplete: bool = False


class LLM:
    """A model folder's model, tokenizer and an engine of its own.

    Args:
        folder: A folder that the ONNX Runtime GenAI model builder wrote, with its tokenizer.
        config: Sizes of the engine; None takes the defaults. A prompt and its completion together are at most the
            model's own limit, or all the tokens that the pool holds if those are fewer.
        weights: How quantised matrices are multiplied, as in `load_model`.

    Raises:
        onnx_import.ImportFailure: The folder can't be read or holds something unsupported.
        TextError: The tokenizer's files can't be used with this model.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        config: EngineConfig | None = None,
        *,
        weights: Literal["exact", "fast"] = "exact",
    ) -> None:
        self.config = EngineConfig() if config is None else config
        self.model = load_model(folder, weights=weights)
        # Reading it again tells what is wrong with it.
        self.tokenizer = self.model.tokenizer or Tokenizer.from_folder(self.model.path)
        self.tokenizer.require_fits(self.model.decoder.vocab_size)
        self._engine = Engine(self.model, self.config)

    def generate(
        self,
        prompts: str | Sequence[Prompt],
        sampling: SamplingParams | None = None,
        *,
        max_tokens: int | None = None,
        grammar: Grammar | None = None,
        proposer: NgramDrafts | None = None,
        n: int = 1,
    ) -> list[Completion]:
        """Completes raw prompts; no chat template is applied.

        All prompts are checked before anything runs. What then goes wrong with one prompt is told in its own
        completion (`FinishReason.FAILED`) and costs the others nothing.

        Args:
            prompts: Texts, or lists of token ids; a single text counts as a list of one.
            sampling: How tokens are chosen, for every prompt alike; what is unset takes the folder's `search` value.
                Without a seed each completion has one by its prompt's place and its own among those of the prompt.
            max_tokens: Most *new* tokens a prompt. None sets no limit but the one on prompt and completion together;
                0 generates nothing: each completion is empty, and tells how many tokens the prompt has and its
                logprobs where the sampling settings ask for them.
            grammar: What every completion follows.
            proposer: Where drafts come from, for speed; None proposes none. The completions stay the same.
            n: Completions a prompt, one behind the other in the result; with a seed, the next ones count up from it.
                A larger `n` adds completions and changes none.

        Returns:
            One completion a prompt, in the order of the prompts.

        Raises:
            ValueError: A prompt is empty, holds something that is no token, or leaves no room for a new one; or
                `max_tokens` is negative. The message names the prompt by its place, from 0.
            TypeError: `prompts` is no list, or a prompt neither text nor a list of token ids.
            EngineError: The engine can't go on: something failed for good, or again and again.
        """
        listed = [prompts] if isinstance(prompts, str) else _listed("prompts", prompts)
        return self._complete(
            [self._ids(place, prompt) for place, prompt in enumerate(listed)],
            sampling,
            max_tokens,
            grammar,
            proposer,
            n,
        )

    def chat(
        self,
        conversations: Sequence[Message] | Sequence[Sequence[Message]],
        sampling: SamplingParams | None = None,
        *,
        max_tokens: int | None = None,
        grammar: Grammar | None = None,
        proposer: NgramDrafts | None = None,
        n: int = 1,
    ) -> list[Completion]:
        """Answers conversations through the model's chat template; see `generate` for the rest.

        Args:
            conversations: Lists of messages, each with `role` and `content`; a single list of messages counts as a
                list of one.
            sampling: As in `generate`.
            max_tokens: As in `generate`.
            grammar: As in `generate`.
            proposer: As in `generate`.
            n: As in `generate`.

        Raises:
            TextError: There is no chat template, or it refuses a conversation.
            TypeError: `conversations` is no list.
        """
        listed = _listed("conversations", conversations)
        if listed and isinstance(listed[0], Mapping):
            listed = [listed]
        prompts = []
        for place, messages in enumerate(listed):
            try:
                prompts.append(self.tokenizer.chat_ids(messages))
            except TextError as error:
                raise TextError(f"conversation {place}: {error}") from error
        return self._complete(prompts, sampling, max_tokens, grammar, proposer, n)

    def close(self) -> None:
        """Frees the engine's memory; closing twice is nothing."""
        self._engine.close()

    def __enter__(self) -> LLM:
        """Returns the object itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Closes it."""
        self.close()

    def _ids(self, place: int, prompt: Prompt) -> list[int]:
        if isinstance(prompt, np.ndarray):
            return prompt.tolist()
        if not isinstance(prompt, Sequence) or isinstance(prompt, bytes | bytearray | memoryview):
            raise TypeError(f"prompt {place} is {prompt!r}; give a text or a list of token ids")
        if not isinstance(prompt, str):
            return list(prompt)
        try:
            return self.tokenizer.encode(prompt)
        except TextError as error:
            raise TextError(f"prompt {place}: {error}") from error

    def _complete(
        self,
        prompts: list[list[int]],
        sampling: SamplingParams | None,
        max_tokens: int | None,
        grammar: Grammar | None,
        proposer: NgramDrafts | None,
        n: int,
    ) -> list[Completion]:
        n = require_positive("n", n)
        if max_tokens is not None:
            max_tokens = require_count("max_tokens", max_tokens)
        if not isinstance(sampling, SamplingParams | None):
            raise TypeError(f"sampling is {sampling!r}; give a SamplingParams or nothing")
        limit = min(self.model.config.max_length, self._engine.metrics.pool_tokens)
        sampling = SamplingParams() if sampling is None else sampling
        options = RequestOptions(limit, sampling, grammar, proposer)
        self._engine.prepare(options)
        self._require_servable(prompts, options, TurnOptions(max_tokens))
        if max_tokens == 0:
            return [each for each in self._scored(prompts, options) for _ in range(n)]
        return self._run(prompts, options, max_tokens, n)

    def _run(
        self, prompts: list[list[int]], options: RequestOptions, max_tokens: int | None, n: int
    ) -> list[Completion]:
        batch = _Batch(self._engine, options, max_tokens, prompts, n)
        try:
            ended = batch.run(self.config.max_batch_size)
        finally:
            batch.close()
        return [self._completion(work, event) for work, event in zip(batch.works, ended, strict=True)]

    def _scored(self, prompts: list[list[int]], options: RequestOptions) -> list[Completion]:
        """Completions without a token. A prompt's logprobs come with a first choice, which is left out."""
        asked = options.sampling.prompt_logprobs
        guides, grammar = self.model.guides, options.grammar
        incomplete = guides is not None and grammar is not None and not guides.is_complete(grammar, ())
        empty = [
            Completion(
                tuple(prompt),
                (),
                "",
                FinishReason.MAX_GENERATED_TOKENS,
                Usage(prompt_tokens=len(prompt)),
                grammar_incomplete=incomplete,
            )
            for prompt in prompts
        ]
        if asked is None:
            return empty
        sampling = SamplingParams(temperature=0.0, prompt_logprobs=asked)
        found = self._run(prompts, RequestOptions(options.max_session_tokens, sampling), 1, 1)
        return [
            each
            if each.finish_reason == FinishReason.FAILED
            else dataclasses.replace(none, prompt_logprobs=each.prompt_logprobs)
            for none, each in zip(empty, found, strict=True)
        ]

    def _require_servable(self, prompts: list[list[int]], options: RequestOptions, turn: TurnOptions) -> None:
        """Begins each prompt's turn on the engine's state and drops the result: all its checks, and nothing run."""
        state, request_id = requests.create_request(self._engine.state, options)
        for place, prompt in enumerate(prompts):
            try:
                requests.begin_turn(state, request_id, prompt, turn)
            except ValueError as error:
                raise ValueError(f"prompt {place} is refused: {error}") from error

    def _completion(self, work: _Work, end: Event) -> Completion:
        return Completion(
            prompt_token_ids=tuple(work.prompt),
            token_ids=tuple(work.tokens),
            text="".join(work.text) if end.stop else self.tokenizer.decode(work.tokens),
            finish_reason=end.finish_reason,
            usage=end.usage,
            error=end.detail,
            stop=end.stop,
            logprobs=tuple(work.logprobs),
            prompt_logprobs=work.prompt_logprobs,
            grammar_incomplete=EngineEventFlags.GRAMMAR_INCOMPLETE in end.flags,
        )


@dataclasses.dataclass
class _Work:
    """A prompt on its way, and what was generated so far."""

    prompt: list[int]
    options: RequestOptions
    tokens: list[int] = dataclasses.field(default_factory=list)
    text: list[str] = dataclasses.field(default_factory=list)
    logprobs: list[TokenLogprobs] = dataclasses.field(default_factory=list)
    prompt_logprobs: tuple[TokenLogprobs | None, ...] = ()
    end: Event | None = None


class _Batch:
    """The prompts of one call: some waiting, some with the engine, some done."""

    def __init__(
        self,
        engine: Engine,
        options: RequestOptions,
        max_tokens: int | None,
        prompts: list[list[int]],
        n: int,
    ) -> None:
        self.works = [
            _Work(prompt, dataclasses.replace(options, sampling=seeded(options.sampling, place, nth)))
            for place, prompt in enumerate(prompts)
            for nth in range(n)
        ]
        self._engine = engine
        self._max_tokens = max_tokens or 0
        self._waiting = collections.deque(self.works)
        self._running: dict[Request, _Work] = {}
        self._done = (0, 0)
        self._failures = 0

    def run(self, rows: int) -> list[Event]:
        """Runs all prompts, at most `rows` at a time, and returns their terminal events in order."""
        while self._waiting or self._running:
            while self._waiting and len(self._running) < rows:
                self._submit(self._waiting.popleft())
            for event in self._engine.run():
                if event.request is not None:
                    self._note(event.request, event)
                elif EngineEventFlags.CAPACITY_BLOCKED in event.flags:
                    raise EngineError(f"the engine can't go on: {event.detail}")
                elif EngineEventFlags.RETRYABLE in event.flags:
                    self._count_failure(event)
        return [work.end for work in self.works if work.end is not None]

    def _count_failure(self, event: Event) -> None:
        """Gives up on steps that fail one after the other, when whoever is behind them would have been found by now."""
        metrics, config = self._engine.metrics, self._engine.state.control.config
        done = metrics.steps, len(self._running)
        self._failures = self._failures + 1 if done == self._done else 1
        self._done = done
        # Trying again as often as a row may, then twice with everyone, then with halves down to one.
        if self._failures > config.max_row_retries + 2 + config.max_batch_size.bit_length():
            raise EngineError(
                f"the engine can't go on: {self._failures} steps in a row failed, the last one by: {event.detail}"
            )

    def close(self) -> None:
        """Takes what is still running out of the engine."""
        for request in self._running:
            request.close()
        self._running.clear()

    def _submit(self, work: _Work) -> None:
        request = self._engine.create_request(work.options)
        self._running[request] = work
        request.begin_turn(work.prompt, TurnOptions(self._max_tokens))

    def _note(self, request: Request, event: Event) -> None:
        """Takes an event's token; a prompt that is done leaves the engine at once."""
        work = self._running[request]
        if EngineEventFlags.TOKEN in event.flags:
            work.tokens.append(event.token)
            if event.logprobs is not None:
                work.logprobs.append(event.logprobs)
        work.text.append(event.text)
        work.prompt_logprobs = event.prompt_logprobs or work.prompt_logprobs
        if EngineEventFlags.TURN_FINISHED in event.flags:
            work.end = event
            request.close()
            del self._running[request]


def seeded(sampling: SamplingParams, place: int, nth: int) -> SamplingParams:
    """The settings of a prompt's `nth` completion.

    The seeds of a prompt's completions count up from the given one. Without one they depend on the prompt's place and
    on `nth` only, so that more completions change none of the others; multiples of the golden ratio keep them apart.
    """
    seed = place + nth * _GOLDEN if sampling.seed is None else sampling.seed + nth
    return dataclasses.replace(sampling, seed=seed % 2**32)


def _listed(name: str, values: object) -> list[Any]:
    """The values as a list; what has no order of its own, or is one text, is no list of them."""
    if isinstance(values, str | bytes | bytearray | Mapping | Set) or not isinstance(values, Iterable):
        raise TypeError(f"the {name} are of type {type(values).__name__}; give a list of them")
    return list(values)
