"""Chat templates: a list of messages to one prompt text, by the Jinja source that comes with a model.

The source is foreign code, so it runs in Jinja's immutable sandbox and sees plain data only. Settings and
helper functions are those that `transformers` gives to templates, because authors write them against it.
"""

import datetime as dt
import json
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from jaxengine.text.errors import TextError

Message = Mapping[str, Any]
"""One message of a chat: `role` and `content`, and whatever else the template knows."""


class _Generation(Extension):
    """`{% generation %}` marks the assistant's share for training; a prompt simply has its body."""

    tags = {"generation"}  # noqa: RUF012 (Jinja declares it so)

    def parse(self, parser: Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as it is: Jinja's own filter escapes HTML."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _strftime_now(layout: str) -> str:
    return dt.datetime.now().strftime(layout)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


class ChatTemplate:
    """A compiled chat template.

    Args:
        source: The Jinja source.
        variables: What the template may use besides the messages: texts of special tokens (`bos_token`).

    Raises:
        TextError: The source is no valid template.
    """

    def __init__(self, source: str, variables: Mapping[str, str] | None = None) -> None:
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateError as error:
            raise TextError(f"the chat template can't be compiled (line {_line(error)}): {error}") from error
        self._variables = dict(variables or {})

    def render(self, messages: Sequence[Message], *, add_generation_prompt: bool = True) -> str:
        """The prompt text of `messages`, ready for the assistant's answer if `add_generation_prompt`.

        Raises:
            TextError: The template refuses the messages; the text is the template's own.
        """
        try:
            return self._template.render(
                **self._variables,
                messages=[dict(message) for message in messages],
                tools=None,
                documents=None,
                add_generation_prompt=add_generation_prompt,
            )
        except Exception as error:  # whatever foreign code may raise
            raise TextError(f"the chat template refuses these messages: {error}") from error


def _line(error: jinja2.TemplateError) -> object:
    return getattr(error, "lineno", "unknown")
