"""`jaxengine chat`: several turns on one request that stays resident, so that each turn only runs what is new."""

import argparse
import contextlib
import sys

from jaxengine.cli.errors import FAILURE, CommandError
from jaxengine.cli.options import (
    add_model_options,
    add_turn_options,
    grammar_of,
    positive,
    proposer_of,
    sampling_of,
)
from jaxengine.cli.output import say, write_text
from jaxengine.cli.session import USUAL_TOKENS, engine_for, load, make_request, pool_tokens
from jaxengine.cli.turns import stream_reply, tell_of_grammar
from jaxengine.config import RequestOptions, TurnOptions
from jaxengine.events import FinishReason
from jaxengine.text import Message

EXIT = "/exit"


def add_to(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Adds the command to the parser."""
    parser = commands.add_parser(
        "chat",
        help="talk over several turns",
        description="Talk to the model, one line a message. Ctrl-C stops a reply and keeps the chat; "
        f"{EXIT}, Ctrl-D or Ctrl-C at the prompt leaves it.",
    )
    add_model_options(parser)
    add_turn_options(parser)
    parser.add_argument(
        "--max-session-tokens",
        type=positive,
        metavar="N",
        help=f"most tokens of the whole chat, yours and the model's (default: {USUAL_TOKENS}, or the model's limit)",
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Runs the command and returns its exit status."""
    if sys.stdin is None:
        raise CommandError("standard input is closed; give the chat something to read")
    sampling, grammar, proposer = sampling_of(arguments), grammar_of(arguments), proposer_of(arguments)
    model, tokenizer = load(arguments.model, arguments.weights)
    if tokenizer.chat_template is None:
        raise CommandError(
            f"{model.path} has no chat template, so it can't chat; use jaxengine generate --raw"
        )
    tokens = pool_tokens(model, arguments.max_session_tokens or 0)
    with engine_for(model, tokens) as engine:
        limit = arguments.max_session_tokens or tokens
        request = make_request(engine, RequestOptions(limit, sampling, grammar, proposer))
        messages: list[Message] = []
        if arguments.system is not None:
            messages.append({"role": "system", "content": arguments.system})
        status = 0
        for line in iter(_read_line, None):
            turn: list[Message] = [*messages, {"role": "user", "content": line}]
            try:
                ids = tokenizer.chat_ids(turn, first_turn=request.turn_id == 0)
                if arguments.show_ids:
                    say(f"prompt ids: {' '.join(map(str, ids))}")
                request.begin_turn(ids, TurnOptions(arguments.max_tokens))
            except ValueError as error:
                say(f"jaxengine: this message is refused: {error}")
                status = FAILURE
                continue
            reply = stream_reply(engine, request)
            write_text("\n")
            messages = [*turn, {"role": "assistant", "content": reply.text}]
            tell_of_grammar(reply)
            match reply.end.finish_reason:
                case FinishReason.CANCELLED:
                    say("jaxengine: interrupted; the chat goes on")
                case FinishReason.FAILED if engine.state.control.failure is not None:
                    raise CommandError(f"generation failed: {reply.end.detail}")
                case FinishReason.FAILED:
                    say(f"jaxengine: this reply failed: {reply.end.detail}")
                    status = FAILURE
                case FinishReason.MAX_GENERATED_TOKENS:
                    say(f"jaxengine: stopped at --max-tokens {arguments.max_tokens}")
                case FinishReason.MAX_SESSION_TOKENS:
                    raise CommandError(
                        f"the chat has reached its {request.max_session_tokens} tokens; start a new one, or allow more "
                        "with --max-session-tokens"
                    )
    return status


def _read_line() -> str | None:
    """The next message, without blank ones; None where the user leaves."""
    while True:
        try:
            if sys.stdin.isatty() and sys.stdout.isatty():
                with contextlib.suppress(ImportError):
                    import readline  # noqa: F401 (gives `input` line editing where the platform has it)
                line = input("> ")
            else:
                line = _plain_line()
        except EOFError:
            return None
        except UnicodeDecodeError as error:
            raise CommandError("the message is no valid UTF-8 text") from error
        if line.strip() == EXIT:
            return None
        if line.strip():
            return line


def _plain_line() -> str:
    if sys.stdin.isatty():
        sys.stderr.write("> ")
        sys.stderr.flush()
    line = sys.stdin.readline()
    if not line:
        raise EOFError
    return line.removesuffix("\n")
