"""Options that several commands share, and the engine's values that they become."""

import argparse
import re
from pathlib import Path

from jaxengine.cli.errors import USAGE, CommandError
from jaxengine.sampling_params import SamplingParams

MOST_TOKENS = 2**31 - 1
"""What the engine's own limits go up to."""


def add_model_options(parser: argparse.ArgumentParser) -> None:
    """`--model` and `--weights`."""
    parser.add_argument(
        "--model",
        type=Path,
        metavar="FOLDER",
        help="a model folder (default: the demo model, downloaded and converted on first use)",
    )
    add_weights_option(parser)


def add_weights_option(parser: argparse.ArgumentParser) -> None:
    """`--weights`."""
    parser.add_argument(
        "--weights",
        choices=("exact", "fast"),
        default="exact",
        help="how quantised matrices are multiplied: in float32, or in int8 at a small loss (default: exact)",
    )


def add_turn_options(parser: argparse.ArgumentParser) -> None:
    """What to say first, how tokens are chosen, and how many."""
    parser.add_argument("--system", metavar="TEXT", help="a system message in front of the chat")
    parser.add_argument(
        "--max-tokens",
        type=positive,
        default=512,
        metavar="N",
        help="most new tokens a reply, the prompt not counted (default: %(default)s)",
    )
    sampling = parser.add_argument_group(
        "sampling",
        "What isn't given here is taken from the search section of the folder's genai_config.json. With neither "
        "--temperature nor --top-k nor --top-p the folder's do_sample decides too; mostly that is the likeliest token.",
    )
    sampling.add_argument(
        "--temperature", type=float, metavar="T", help="divides the logits; 0 is the likeliest token"
    )
    sampling.add_argument("--top-k", type=int, metavar="K", help="keep the K likeliest tokens; 0 keeps all")
    sampling.add_argument(
        "--top-p", type=float, metavar="P", help="keep the likeliest tokens that reach P together"
    )
    sampling.add_argument(
        "--seed", type=int, metavar="N", help="choose the random stream (default: the same each time)"
    )
    parser.add_argument(
        "--show-ids", action="store_true", help="print the prompt's token ids on standard error"
    )


def sampling_of(arguments: argparse.Namespace) -> SamplingParams:
    """The sampling options as the engine's value; raises `CommandError`, naming the option, for one out of range."""
    try:
        return SamplingParams(
            temperature=arguments.temperature,
            top_k=arguments.top_k,
            top_p=arguments.top_p,
            seed=arguments.seed,
        )
    except ValueError as error:
        raise CommandError(in_words_of_options(error), USAGE) from error


def in_words_of_options(sentence: object) -> str:
    """The engine's sentence about one of its settings, with the option's name in the setting's place."""
    return re.sub(
        r"\b(?:SamplingParams|RequestOptions|TurnOptions)\.(\w+)",
        lambda match: "--" + match[1].replace("_", "-"),
        str(sentence),
    )


def positive(text: str) -> int:
    """An option's value as a whole number above 0 that the engine can count to."""
    if not text.isdecimal() or len(text) > len(str(MOST_TOKENS)) or not 1 <= int(text) <= MOST_TOKENS:
        shown = text if len(text) <= 20 else f"{text[:20]}..."
        raise argparse.ArgumentTypeError(f"{shown!r} is no whole number from 1 to {MOST_TOKENS}")
    return int(text)
