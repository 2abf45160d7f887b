"""A model made ready for one conversation: its tokenizer and an engine of one row."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import jax
from rich.console import Console

from jaxengine.cli.errors import CommandError
from jaxengine.cli.options import in_words_of_options
from jaxengine.config import EngineConfig, RequestOptions
from jaxengine.demo import demo_model_folder
from jaxengine.demo.cache import cache_root
from jaxengine.engine import Engine
from jaxengine.handles import Request
from jaxengine.model import Model, load_model
from jaxengine.text import Tokenizer

BLOCK_SIZE = 16
USUAL_TOKENS = 4096
"""Pool size that most conversations fit in; one size means that compiled programs are found again."""


def keep_programs() -> None:
    """Keeps compiled programs in the user's cache, unless JAX was told a place: a later run starts in half the time."""
    if jax.config.jax_compilation_cache_dir is None:  # type: ignore[attr-defined]
        jax.config.update("jax_compilation_cache_dir", str(cache_root() / "programs"))


def load(folder: Path | None, weights: Literal["exact", "fast"]) -> tuple[Model, Tokenizer]:
    """The model and the tokenizer of a folder, or of the demo model, with a sign of life on a terminal meanwhile."""
    require_jax()
    folder = demo_model_folder(progress=True) if folder is None else folder
    model = load_folder(folder, weights)
    tokenizer = Tokenizer.from_folder(folder)
    tokenizer.require_fits(model.decoder.vocab_size)
    return model, tokenizer


def load_folder(
    folder: Path, weights: Literal["exact", "fast"], overrides: Mapping[str, Any] | None = None
) -> Model:
    """The model of a folder, with overrides of its configuration, with a sign of life on a terminal meanwhile."""
    require_jax()
    keep_programs()
    with Console(stderr=True).status(f"Loading {folder.name}"):
        return load_model(folder, weights=weights, overrides=overrides)


def require_jax() -> None:
    """Raises `CommandError` where JAX finds no device to run on."""
    try:
        jax.devices()
    except (AssertionError, RuntimeError) as error:
        reason = (str(error).splitlines() or ["its platform is not there"])[0]
        raise CommandError(f"JAX can't start: {reason}; check JAX_PLATFORMS and the installed JAX") from error


def pool_tokens(model: Model, wanted: int) -> int:
    """Tokens of the pool for a session of `wanted`: the usual size, doubled as needed, within the model's limit."""
    tokens = USUAL_TOKENS
    while tokens < wanted:
        tokens *= 2
    return min(tokens, model.config.max_length)


def make_request(engine: Engine, options: RequestOptions) -> Request:
    """A request, or a `CommandError` that says which option or folder setting keeps it from being made."""
    try:
        return engine.create_request(options)
    except (TypeError, ValueError) as error:
        raise CommandError(in_words_of_options(error)) from error


def engine_for(model: Model, tokens: int) -> Engine:
    """An engine of one row whose pool holds `tokens`, or a `CommandError` if the memory doesn't."""
    num_blocks = -(-tokens // BLOCK_SIZE)
    try:
        return Engine(model, EngineConfig(max_batch_size=1, num_blocks=num_blocks, block_size=BLOCK_SIZE))
    except ValueError as error:
        raise CommandError(
            f"the memory doesn't hold a KV cache of {tokens} tokens; ask for fewer tokens"
        ) from error
