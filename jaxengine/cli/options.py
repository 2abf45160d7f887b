"""Options that several commands share, and the engine's values that they become."""

import argparse
import re
from pathlib import Path

from jaxengine.cli.errors import USAGE, CommandError
from jaxengine.grammars import Grammar
from jaxengine.proposers import NgramDrafts
from jaxengine.sampling_params import SamplingParams

MOST_TOKENS = 2**31 - 1
"""What the engine's own limits go up to."""
_OPTION_NAMES = {"no_repeat_ngram_size": "no_repeat_ngram", "stop_token_ids": "stop_token"}
"""Options that are called otherwise than the engine's settings."""


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
        "--temperature nor --top-k nor --top-p nor --min-p the folder's do_sample decides too; mostly that is the "
        "likeliest token.",
    )
    sampling.add_argument(
        "--temperature", type=float, metavar="T", help="divides the logits; 0 is the likeliest token"
    )
    sampling.add_argument("--top-k", type=int, metavar="K", help="keep the K likeliest tokens; 0 keeps all")
    sampling.add_argument(
        "--top-p", type=float, metavar="P", help="keep the likeliest tokens that reach P together"
    )
    sampling.add_argument(
        "--min-p",
        type=float,
        default=0.0,
        metavar="P",
        help="keep tokens of that share of the likeliest one's chance",
    )
    sampling.add_argument(
        "--seed", type=int, metavar="N", help="choose the random stream (default: the same each time)"
    )
    sampling.add_argument(
        "--repetition-penalty", type=float, metavar="R", help="make what was said less likely; 1 is off"
    )
    sampling.add_argument(
        "--presence-penalty",
        type=float,
        default=0.0,
        metavar="X",
        help="taken from the logit of what this reply has said",
    )
    sampling.add_argument(
        "--frequency-penalty", type=float, default=0.0, metavar="X", help="the same, once more for each time"
    )
    sampling.add_argument(
        "--no-repeat-ngram", type=int, metavar="N", help="say no run of N tokens twice; 0 is off"
    )
    sampling.add_argument(
        "--logit-bias",
        type=_bias,
        action="append",
        default=[],
        metavar="ID=VALUE",
        help="added to a token's logit; may be given again",
    )
    _add_ends(parser)
    _add_grammars(parser)
    parser.add_argument(
        "--drafts",
        type=positive,
        metavar="N",
        help="guess up to N tokens a step from the text so far, for speed; the reply stays the same",
    )
    parser.add_argument(
        "--show-ids", action="store_true", help="print the prompt's token ids on standard error"
    )


def _add_ends(parser: argparse.ArgumentParser) -> None:
    ends = parser.add_argument_group("ends of a reply")
    ends.add_argument(
        "--stop",
        action="append",
        default=[],
        metavar="TEXT",
        help="end before this text; may be given again",
    )
    ends.add_argument(
        "--stop-token",
        type=int,
        action="append",
        default=[],
        metavar="ID",
        help="end before this token; may be given again",
    )
    ends.add_argument(
        "--min-new-tokens", type=int, default=0, metavar="N", help="don't end by a token before there are N"
    )
    ends.add_argument("--ignore-eos", action="store_true", help="don't end by the model's own EOS tokens")


def _add_grammars(parser: argparse.ArgumentParser) -> None:
    grammars = parser.add_argument_group("grammars", "What a reply must follow, at most one of them.")
    one = grammars.add_mutually_exclusive_group()
    one.add_argument("--json-schema", metavar="FILE_OR_TEXT", help="a JSON schema, or the file that holds it")
    one.add_argument("--regex", metavar="PATTERN", help="a regular expression for the whole reply")
    one.add_argument("--lark", type=Path, metavar="FILE", help="the file of a Lark grammar")


def sampling_of(arguments: argparse.Namespace, logprobs: int | None = None) -> SamplingParams:
    """The sampling options as the engine's value; raises `CommandError`, naming the option, for one out of range."""
    try:
        return SamplingParams(
            temperature=arguments.temperature,
            top_k=arguments.top_k,
            top_p=arguments.top_p,
            min_p=arguments.min_p,
            seed=arguments.seed,
            repetition_penalty=arguments.repetition_penalty,
            presence_penalty=arguments.presence_penalty,
            frequency_penalty=arguments.frequency_penalty,
            no_repeat_ngram_size=arguments.no_repeat_ngram,
            logit_bias=tuple(arguments.logit_bias),
            min_new_tokens=arguments.min_new_tokens,
            stop_token_ids=arguments.stop_token,
            ignore_eos=arguments.ignore_eos,
            stop=arguments.stop,
            logprobs=logprobs,
        )
    except ValueError as error:
        raise CommandError(in_words_of_options(error), USAGE) from error


def grammar_of(arguments: argparse.Namespace) -> Grammar | None:
    """The grammar that a reply must follow, or None; raises `CommandError` for one that can't be read or used."""
    try:
        if arguments.json_schema is not None:
            given = arguments.json_schema
            return Grammar.json_schema(given if given.lstrip().startswith("{") else _content(Path(given)))
        if arguments.regex is not None:
            return Grammar.regex(arguments.regex)
        if arguments.lark is not None:
            return Grammar.lark(_content(arguments.lark))
    except ValueError as error:
        raise CommandError(str(error), USAGE) from error
    except ImportError as error:
        raise CommandError(str(error)) from error
    return None


def proposer_of(arguments: argparse.Namespace) -> NgramDrafts | None:
    """Where drafts come from, or None for no drafts."""
    return None if arguments.drafts is None else NgramDrafts(arguments.drafts)


def _content(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise CommandError(f"{path} is no valid UTF-8 text", USAGE) from error
    except (OSError, ValueError) as error:
        raise CommandError(
            f"{path} can't be read: {getattr(error, 'strerror', None) or error}", USAGE
        ) from error


def _bias(text: str) -> tuple[int, float]:
    token, equals, value = text.partition("=")
    try:
        if equals:
            return int(token), float(value)
    except ValueError:
        pass
    raise argparse.ArgumentTypeError(f"{text!r} is no ID=VALUE, as in 42=-1.5")


def in_words_of_options(sentence: object) -> str:
    """The engine's sentence about one of its settings, with the option's name in the setting's place."""
    return re.sub(
        r"\b(?:SamplingParams|RequestOptions|TurnOptions)\.(\w+)",
        lambda match: "--" + _OPTION_NAMES.get(match[1], match[1]).replace("_", "-"),
        str(sentence),
    )


def positive(text: str) -> int:
    """An option's value as a whole number above 0 that the engine can count to."""
    if not text.isdecimal() or len(text) > len(str(MOST_TOKENS)) or not 1 <= int(text) <= MOST_TOKENS:
        shown = text if len(text) <= 20 else f"{text[:20]}..."
        raise argparse.ArgumentTypeError(f"{shown!r} is no whole number from 1 to {MOST_TOKENS}")
    return int(text)
