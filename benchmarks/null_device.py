"""A model whose device does nothing: every forward pass chooses the same token, and publishing hands the pool back.

What is left of a step is the work of the host: planning, packing, bookkeeping and events.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np

import jaxengine
from jaxengine.programs import Destinations, ForwardResult, StepBatch
from jaxengine.sampling import Choice
from onnx_import import AttentionSpec, FolderConfig

TOKEN = 1


@dataclasses.dataclass(frozen=True, eq=False)
class NullDecoder:
    """One layer of one number, and no graph."""

    vocab_size: int = 2
    identity: str = "null"
    params: dict[str, Any] = dataclasses.field(default_factory=dict)
    layers: tuple[AttentionSpec, ...] = (AttentionSpec(0, 1, 1, 1, 1.0, np.dtype(np.float32)),)
    fixed: tuple[()] = ()

    def apply(self, *arguments: object) -> Any:
        """Never called: the programs below don't run a decoder."""
        raise NotImplementedError("the null decoder has no graph; use it with the null programs")


class NullPrograms:
    """Stands in for `jaxengine.programs.Programs`."""

    def forward(
        self,
        params: object,
        pages: object,
        block_table: object,
        fixed: object,
        batch: StepBatch,
        **static: object,
    ) -> ForwardResult:
        """Makes logits of no id."""
        return ForwardResult((), (), np.zeros((len(batch.logits_rows), 0)))  # type: ignore[arg-type]

    def choose(self, logits: np.ndarray, *settings: object, **static: object) -> Choice:
        """Chooses TOKEN in every row."""
        rows = len(logits)
        return Choice(np.full(rows, TOKEN, np.int32), np.ones(rows, bool), None)  # type: ignore[arg-type]

    def publish(
        self,
        pages: Any,
        block_table: Any,
        fixed: Any,
        staged: object,
        states: object,
        to: Destinations,
        **static: object,
    ) -> Any:
        """Returns the pool as it is."""
        return pages, block_table, fixed

    publish_copy = publish


def null_model(context_length: int) -> jaxengine.Model:
    """A model of the null device for sessions of up to `context_length` tokens."""
    config = FolderConfig("null", 2, context_length, context_length, (), None, None, {}, ())
    return jaxengine.Model(decoder=NullDecoder(), config=config, path=Path(), programs=NullPrograms())  # type: ignore[arg-type]
