"""The engine's state as one immutable value: what the host knows (`Control`) and what the device holds (`Store`).

Control is a fixed set of NumPy columns with one entry a live request, in order of creation; transitions copy the
columns they change. The store is append-only as seen from control: no step writes a slot that the control value beside
it can read, so whatever a dropped step leaves behind in the store is invisible.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from jaxengine.blocks import whole_pool
from jaxengine.config import EngineConfig
from jaxengine.errors import EngineError, SpentStateError
from jaxengine.events import EngineErrorCode, EventRecord
from jaxengine.fixed_state import BANKS
from jaxengine.kernels import Kernels, choose_kernels
from jaxengine.logs import LogTable
from jaxengine.sizing import ran_out_of_memory, resolve_config
from jaxengine.windows import pages_shape, ring_blocks

if TYPE_CHECKING:
    from jaxengine.model import Model


class RequestStatus(enum.IntEnum):
    """Where a request is in its life."""

    CREATED = 0
    QUEUED = 1
    ACTIVE = 2
    TURN_COMPLETE = 3
    CLOSED = 4


@dataclasses.dataclass(frozen=True)
class ModelFacts:
    """What planning and the lifecycle need to know of a model; hashable, so that it can ride along as metadata.

    Attributes:
        num_ids: How many ids, from 0, may be chosen: those that the tokenizer has, where there is one.
        has_text: Whether there is a tokenizer.
    """

    identity: str
    vocab_size: int
    num_ids: int
    has_text: bool
    max_length: int
    context_length: int
    eos_token_ids: frozenset[int]
    search: tuple[tuple[str, Any], ...]

    @property
    def search_settings(self) -> Mapping[str, Any]:
        """The folder's `search` section."""
        return dict(self.search)


@flax.struct.dataclass
class Requests:
    """One entry a live request in every column, ascending by id.

    Attributes:
        id: uint64, never reused.
        status: int8, a `RequestStatus`.
        place: int32, the row of the device block table, of rings and of fixed states while resident, else -1.
        bank: int8, which bank of its slot holds its fixed states.
        order: int64, rank of its admission among residents, else -1.
        admitted: int64, the count of steps when it was admitted, 0 before it ever was.
        queued: int64, the count of steps when it began to wait for the place that it has.
        settled: int64, the count of steps when it first chose a token since it has this place; -1 before.
        submitted: int64, rank of its newest `begin_turn`.
        served: int64, the count of steps when it last ran, or was queued.
        stamp: uint64, a digest of every call that changed the request between steps.
        length: int64, tokens of the sequence.
        processed: int64, tokens whose keys and values are committed.
        input_end: int64, a row below it is prefill: the newest turn's input ends here, or what was there when the
            request gave its blocks back.
        turn: uint64, newest turn id; 0 before the first.
        prompt_tokens, generated: int64, this turn's counts.
        max_generated: int64, this turn's limit, 0 for none.
        max_session: int64, limit on `length`.
        failures: int64, steps in a row that failed on this request.
        undrained: int64, its events in the queue.
        temperature: float32, top_k: int32, top_p: float32, min_p: float32, seed: uint32: how its turn's tokens are
            drawn.
        least: int64, tokens that the turn generates before it may end by one.
        num_drafts: int64, tokens proposed to follow its sequence.
        traits: uint8, the `Traits` of its turn.
        carried: object, its `Carried`.
    """

    id: np.ndarray
    status: np.ndarray
    place: np.ndarray
    bank: np.ndarray
    order: np.ndarray
    admitted: np.ndarray
    queued: np.ndarray
    settled: np.ndarray
    submitted: np.ndarray
    served: np.ndarray
    stamp: np.ndarray
    length: np.ndarray
    processed: np.ndarray
    input_end: np.ndarray
    turn: np.ndarray
    prompt_tokens: np.ndarray
    generated: np.ndarray
    max_generated: np.ndarray
    max_session: np.ndarray
    failures: np.ndarray
    undrained: np.ndarray
    temperature: np.ndarray
    top_k: np.ndarray
    top_p: np.ndarray
    min_p: np.ndarray
    seed: np.ndarray
    least: np.ndarray
    num_drafts: np.ndarray
    traits: np.ndarray
    carried: np.ndarray

    def __len__(self) -> int:
        return len(self.id)


COLUMN_DTYPES = {
    "id": np.uint64,
    "status": np.int8,
    "place": np.int32,
    "bank": np.int8,
    "order": np.int64,
    "admitted": np.int64,
    "queued": np.int64,
    "settled": np.int64,
    "submitted": np.int64,
    "served": np.int64,
    "stamp": np.uint64,
    "length": np.int64,
    "processed": np.int64,
    "input_end": np.int64,
    "turn": np.uint64,
    "prompt_tokens": np.int64,
    "generated": np.int64,
    "max_generated": np.int64,
    "max_session": np.int64,
    "failures": np.int64,
    "undrained": np.int64,
    "temperature": np.float32,
    "top_k": np.int32,
    "top_p": np.float32,
    "min_p": np.float32,
    "seed": np.uint32,
    "least": np.int64,
    "num_drafts": np.int64,
    "traits": np.uint8,
    "carried": object,
}


@dataclasses.dataclass(frozen=True)
class StoredFailure:
    """The failure that ended an engine's work."""

    code: EngineErrorCode
    detail: str


@flax.struct.dataclass
class Control:
    """What the host knows.

    Attributes:
        requests: Columns of the live requests.
        tokens: Each request's sequence.
        blocks: Each request's block ids, in order of position.
        free_blocks: int32, ids of the blocks that can be handed out; the next one is the last. The others are in
            tables, or belong to the closed members of a running static batch.
        counters: int64, by the indices below: the newest request id, submission rank and admission rank; rows put off
            for lack of capacity by steps that ran; steps that ran rows; steps that failed; requests that gave their
            blocks back; drafts that ran, and those that were accepted.
        events: Published and undrained.
        suspects: Groups of requests whose steps failed for an unknown reason, each to be tried alone, first to last; an
            empty one for a step without requests.
        failure: What ended the engine's work, or None while it is healthy.
        config: The engine's limits.
        facts: The model's.
        kernels: Where attention and publication run.
    """

    requests: Requests
    tokens: LogTable
    blocks: LogTable
    free_blocks: np.ndarray
    counters: np.ndarray
    events: tuple[EventRecord, ...] = flax.struct.field(pytree_node=False)
    suspects: tuple[tuple[int, ...], ...] = flax.struct.field(pytree_node=False)
    failure: StoredFailure | None = flax.struct.field(pytree_node=False)
    config: EngineConfig = flax.struct.field(pytree_node=False)
    facts: ModelFacts = flax.struct.field(pytree_node=False)
    kernels: Kernels = flax.struct.field(pytree_node=False)

    @property
    def num_blocks(self) -> int:
        """Blocks of the pool."""
        assert self.config.num_blocks is not None, "init_state settles it"
        return self.config.num_blocks

    @property
    def table_width(self) -> int:
        """Columns of the block table: enough for the context length, or for the whole pool if that is smaller."""
        size = self.config.block_size
        return min(-(-self.facts.context_length // size), self.num_blocks)

    @property
    def blocks_held(self) -> np.ndarray:
        """int64[requests], blocks in each request's table."""
        return self.blocks.lengths


REQUEST_IDS, SUBMISSIONS, ADMISSIONS, DEFERRALS, STEPS, FAILED_STEPS, PREEMPTIONS, DRAFTED, ACCEPTED = range(
    9
)


@dataclasses.dataclass(eq=False)
class Lease:
    """Who may use a store: shared by every state value that refers to it, and marked when a commit takes it over."""

    spent: bool = False


@flax.struct.dataclass
class Store:
    """What the device holds.

    Attributes:
        pages: One array a layer, dtype[num_blocks, 2, num_kv_heads, block_size, head_dim]: keys at 0, values at 1. A
            layer with rings has dtype[max_batch_size, ring, 2, num_kv_heads, block_size, head_dim]; position p of the
            request in a place is in block (p // block_size) % ring there.
        block_table: int32[max_batch_size, table_width], block ids by place and block of positions; entries beyond a
            request's committed slots mean nothing.
        fixed: The decoder's fixed states, dtype[BANKS * max_batch_size, *shape] each; bank b of place p is at
            p + b * max_batch_size.
        lease: Marked once a commit has donated these arrays.
    """

    pages: tuple[jax.Array, ...]
    block_table: jax.Array
    fixed: tuple[jax.Array, ...]
    lease: Lease = flax.struct.field(pytree_node=False)


@flax.struct.dataclass
class EngineState:
    """The whole engine as a value; `commit` makes the next one and spends this one."""

    control: Control
    store: Store


def facts_of(model: Model) -> ModelFacts:
    """Reads off a model what a state keeps of it."""
    search = tuple(
        sorted((key, _plain(value)) for key, value in model.config.search.items() if value is not None)
    )
    return ModelFacts(
        identity=model.decoder.identity,
        vocab_size=model.decoder.vocab_size,
        num_ids=model.num_ids,
        has_text=model.tokenizer is not None,
        max_length=model.config.max_length,
        context_length=model.config.context_length,
        eos_token_ids=frozenset(model.config.eos_token_ids),
        search=search,
    )


def init_state(model: Model, config: EngineConfig) -> EngineState:
    """Makes the state of an engine with no requests.

    Args:
        model: The model; its attention layers size the pages.
        config: Sizes and limits.

    Returns:
        A state with an empty pool; no two of its arrays share memory.

    Raises:
        TypeError: `model` is no Model or `config` no EngineConfig.
        ValueError: The free memory is too small for the pool, of the given size or of any; or the folder's chunk size
            is out of range; or `config.backend` is a kernel that does not take some layer.
    """
    from jaxengine.model import require_model  # it needs this module

    require_model(model)
    if not isinstance(config, EngineConfig):
        raise TypeError(f"the config is {config!r}; give an EngineConfig")
    config = resolve_config(model, config)
    control = Control(
        requests=Requests(**{name: np.zeros(0, dtype) for name, dtype in COLUMN_DTYPES.items()}),
        tokens=LogTable.empty(),
        blocks=LogTable.empty(),
        free_blocks=whole_pool(config.num_blocks or 0),
        counters=np.zeros(9, np.int64),
        events=(),
        suspects=(),
        failure=None,
        config=config,
        facts=facts_of(model),
        kernels=choose_kernels(model.decoder.layers, config),
    )
    # Made by the device, one by one: a shared zeros array could not be donated, and `jnp.zeros` may return one.
    make = jax.jit(jnp.zeros, static_argnums=(0, 1))
    layers = model.decoder.layers
    rings = ring_blocks(layers, config, model.config.max_length)
    try:
        pages = tuple(
            make(pages_shape(spec, ring, config), spec.kv_dtype)
            for spec, ring in zip(layers, rings, strict=True)
        )
        table = make((config.max_batch_size, control.table_width), np.dtype(np.int32))
        slots = BANKS * config.max_batch_size
        fixed = tuple(make((slots, *spec.shape), spec.dtype) for spec in model.decoder.fixed)
        jax.block_until_ready((pages, table, fixed))
    except Exception as error:
        if not ran_out_of_memory(error):
            raise
        raise ValueError(
            f"memory ran out while a KV cache of {control.num_blocks} blocks of {config.block_size} tokens was made; "
            "use a smaller EngineConfig.num_blocks or memory_fraction"
        ) from error
    return EngineState(control, Store(pages, table, fixed, Lease()))


def _plain(value: object) -> bool | int | float | str:
    """The value itself, or a list's or section's text: hashable, and refused by name where a number is needed."""
    return value if isinstance(value, bool | int | float | str) else repr(value)


def require_unspent(state: EngineState) -> None:
    """Raises `SpentStateError` if a commit has taken this state's store over, `TypeError` if it is no state."""
    if not isinstance(state, EngineState):
        raise TypeError(
            f"the state is a {type(state).__name__}; give an EngineState, "
            "which the calls that change one return in front of their result"
        )
    if state.store.lease.spent:
        raise SpentStateError(
            "this state was spent by a commit: use the state that commit returned, "
            "or call commit(..., donate=False) to keep the old one"
        )


def require_healthy(control: Control) -> None:
    """Raises `EngineError` if a failure has ended the engine's work."""
    if control.failure is not None:
        raise EngineError(f"the engine has stopped: {control.failure.detail}; make a new one")


def row_of(control: Control, request_id: int) -> int:
    """Returns the row of a live request in the columns, or -1."""
    ids = control.requests.id
    row = int(np.searchsorted(ids, np.uint64(request_id)))
    return row if row < len(ids) and ids[row] == request_id else -1


def rows_of(control: Control, request_ids: np.ndarray) -> np.ndarray:
    """Returns int64[n], the row of each request in the columns, or -1."""
    ids = control.requests.id
    rows = np.searchsorted(ids, request_ids)
    found = rows < len(ids)
    found[found] = ids[rows[found]] == request_ids[found]
    return np.where(found, rows, -1)


def replace_rows(control: Control, rows: int | np.ndarray, **values: object) -> Control:
    """Returns `control` with the named request columns changed in `rows`."""
    changed = {}
    for name, value in values.items():
        column = getattr(control.requests, name).copy()
        column[rows] = value
        changed[name] = column
    return control.replace(requests=control.requests.replace(**changed))  # type: ignore[attr-defined]
