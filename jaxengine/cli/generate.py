"""`jaxengine generate`: one prompt, its answer streamed."""

import argparse

from jaxengine.cli.errors import INTERRUPTED, USAGE, CommandError
from jaxengine.cli.options import (
    add_model_options,
    add_turn_options,
    grammar_of,
    positive,
    proposer_of,
    sampling_of,
)
from jaxengine.cli.output import say, write_text
from jaxengine.cli.session import engine_for, load, make_request, pool_tokens
from jaxengine.cli.turns import Reply, stream_reply, tell_of_grammar
from jaxengine.config import RequestOptions, TurnOptions
from jaxengine.events import FinishReason
from jaxengine.llm import seeded
from jaxengine.text import Message, Tokenizer


def add_to(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Adds the command to the parser."""
    parser = commands.add_parser(
        "generate",
        help="answer one prompt",
        description="Answer one prompt and stream the text to standard output; everything else goes to standard error.",
    )
    parser.add_argument("prompt", help="what to say to the model")
    parser.add_argument(
        "--raw", action="store_true", help="give the prompt as it is, without the model's chat template"
    )
    add_model_options(parser)
    add_turn_options(parser)
    parser.add_argument(
        "--n",
        type=positive,
        default=1,
        metavar="N",
        help="answer so many times, one behind the other; seeds count up from --seed (default: %(default)s)",
    )
    parser.add_argument(
        "--logprobs",
        type=int,
        metavar="N",
        help="print each token's log-probability and those of the N likeliest on standard error",
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Runs the command and returns its exit status."""
    if not arguments.prompt:
        raise CommandError("the prompt is empty; give at least one character")
    if arguments.raw and arguments.system is not None:
        raise CommandError(
            "--system needs the chat template that --raw switches off; drop one of them", USAGE
        )
    sampling = sampling_of(arguments, arguments.logprobs)
    grammar, proposer = grammar_of(arguments), proposer_of(arguments)
    model, tokenizer = load(arguments.model, arguments.weights)
    ids = _prompt_ids(arguments, tokenizer)
    if arguments.show_ids:
        say(f"prompt ids: {' '.join(map(str, ids))}")
    with engine_for(model, pool_tokens(model, len(ids) + arguments.max_tokens)) as engine:
        for nth in range(arguments.n):
            options = RequestOptions(sampling=seeded(sampling, 0, nth), grammar=grammar, proposer=proposer)
            request = make_request(engine, options)
            try:
                request.begin_turn(ids, TurnOptions(arguments.max_tokens))
            except ValueError as error:
                raise CommandError(f"the prompt is refused: {error}") from error
            if arguments.n > 1:
                say(f"jaxengine: answer {nth + 1} of {arguments.n}")
            reply = stream_reply(engine, request)
            request.close()
            write_text("\n")
            _tell_of_tokens(reply, tokenizer)
            tell_of_grammar(reply)
            match reply.end.finish_reason:
                case FinishReason.CANCELLED:
                    say("jaxengine: interrupted")
                    return INTERRUPTED
                case FinishReason.FAILED:
                    raise CommandError(f"generation failed: {reply.end.detail}")
                case FinishReason.MAX_GENERATED_TOKENS:
                    say(f"jaxengine: stopped at --max-tokens {arguments.max_tokens}")
                case FinishReason.MAX_SESSION_TOKENS:
                    say(f"jaxengine: stopped at the model's limit of {model.config.max_length} tokens in all")
    return 0


def _tell_of_tokens(reply: Reply, tokenizer: Tokenizer) -> None:
    """Prints a line a token: its text and log-probability, and those of the likeliest, best first."""
    for token, logprobs in reply.logprobs:
        scored = [(token, logprobs.chosen), *logprobs.top]
        own, *top = [f"{_shown(tokenizer, token)} {logprob:.3f}" for token, logprob in scored]
        say(f"{own}  of {', '.join(top)}" if top else own)


def _shown(tokenizer: Tokenizer, token: int) -> str:
    """A token's text in quotes, with escapes for what a terminal wouldn't show; part of a character as bytes."""
    if token in tokenizer.special_tokens:
        return tokenizer.special_tokens[token]
    piece = tokenizer.piece(token, first=False) or b""
    try:
        return repr(piece.decode())
    except UnicodeDecodeError:
        return repr(piece)


def _prompt_ids(arguments: argparse.Namespace, tokenizer: Tokenizer) -> list[int]:
    if arguments.raw:
        return tokenizer.encode(arguments.prompt)
    if tokenizer.chat_template is None and arguments.system is None:
        say("jaxengine: this model has no chat template; the prompt is given as it is")
        return tokenizer.encode(arguments.prompt)
    messages: list[Message] = [{"role": "user", "content": arguments.prompt}]
    if arguments.system is not None:
        messages.insert(0, {"role": "system", "content": arguments.system})
    return tokenizer.chat_ids(messages)
