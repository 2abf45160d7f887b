"""A model as the engine sees it: a decoder that maps packed tokens to logits, and the folder's settings."""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import onnx_import
from jaxengine.guidance import Guides
from jaxengine.programs import Decoder, Programs
from jaxengine.text import TextError, Tokenizer


@dataclasses.dataclass(frozen=True, eq=False)
class Model:
    """A loaded model; compiled programs live and die with it.

    Attributes:
        decoder: The imported graph, its weights and its attention layers.
        config: What the folder's `genai_config.json` says, overrides included.
        path: The folder, for the tokenizer and the chat template.
        programs: The compiled programs of this decoder.
        read_tokenizer: Reads the folder's tokenizer; None where it has none that can be used.
    """

    decoder: Decoder
    config: onnx_import.FolderConfig
    path: Path
    programs: Programs
    read_tokenizer: Callable[[], Tokenizer | None] = lambda: None

    @functools.cached_property
    def tokenizer(self) -> Tokenizer | None:
        """The folder's tokenizer, read when it is first asked for; None where it has none that can be used."""
        return self.read_tokenizer()

    @functools.cached_property
    def guides(self) -> Guides | None:
        """The masks of grammars; None without a tokenizer. Made for the first grammar, which takes a moment."""
        if self.tokenizer is None:
            return None
        return Guides(self.tokenizer, self.config.eos_token_ids, self.decoder.vocab_size)

    @property
    def num_ids(self) -> int:
        """How many ids, from 0, may be chosen: those that the tokenizer has, or all that have a logit."""
        width = self.decoder.vocab_size
        return width if self.tokenizer is None else self.tokenizer.vocab_size


def require_model(model: object) -> None:
    """Raises `TypeError` unless `model` is a Model."""
    if not isinstance(model, Model):
        raise TypeError(f"the model is {model!r}; give what load_model returned")


def load_model(
    folder: str | os.PathLike[str],
    weights: Literal["exact", "fast"] = "exact",
    overrides: Mapping[str, Any] | None = None,
) -> Model:
    """Loads a model folder that the ONNX Runtime GenAI model builder wrote.

    Args:
        folder: The folder, with `genai_config.json` and the ONNX file it names.
        weights: How quantised matrices are multiplied: "exact" dequantises them block by block to float32, "fast" runs
            them on the CPU's integer dot at a stated loss (docs/benchmarks.md). Float matrices are the same in both.
        overrides: Values in place of the folder's, shaped like its `genai_config.json` and merged into a copy as a JSON
            merge patch (RFC 7396): objects merge key by key, None removes a key, anything else replaces. All of them
            count or none: the outcome is checked like a file that says the same. The folder's files stay as they are.

    Raises:
        onnx_import.ImportFailure: The folder cannot be read, an override does not fit its configuration, or its graph
            holds something that is not supported.
    """
    read = onnx_import.read_folder(Path(folder), overrides)
    decoder = onnx_import.import_decoder(read, weights=weights)
    read_tokenizer = functools.partial(_usable_tokenizer, read.path, decoder.vocab_size)
    return Model(decoder, read.config, read.path, Programs(decoder), read_tokenizer)


def _usable_tokenizer(folder: Path, width: int) -> Tokenizer | None:
    """A folder's tokenizer, or None: whoever wants text is told by `Tokenizer.from_folder`, token ids need none."""
    try:
        tokenizer = Tokenizer.from_folder(folder)
        tokenizer.require_fits(width)
    except TextError:
        return None
    return tokenizer
