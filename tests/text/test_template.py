"""Templates render as they do for their authors, inside a sandbox."""

import re

import pytest

from jaxengine.text import ChatTemplate, TextError

HELLO = [{"role": "user", "content": "<b>Hello</b>"}]


def test_blocks_are_trimmed_and_trailing_newline_dropped():
    source = "{% for m in messages %}\n  {% if true %}\n{{ m.content }}\n  {% endif %}\n{% endfor %}\nend\n"
    assert ChatTemplate(source).render(HELLO) == "<b>Hello</b>\nend"


def test_helpers_of_the_environment():
    assert (
        ChatTemplate("{{ messages | tojson }}").render(HELLO)
        == '[{"role": "user", "content": "<b>Hello</b>"}]'
    )
    assert ChatTemplate("{{ {'b': 1, 'a': 'é'} | tojson(indent=1, sort_keys=true) }}").render(HELLO) == (
        '{\n "a": "é",\n "b": 1\n}'
    )
    assert re.fullmatch(r"\d{4}", ChatTemplate("{{ strftime_now('%Y') }}").render(HELLO))
    assert (
        ChatTemplate(
            "{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}"
        ).render(HELLO)
        == "01"
    )
    assert (
        ChatTemplate("a{% generation %}{{ messages[0].role }}{% endgeneration %}b").render(HELLO) == "auserb"
    )
    assert ChatTemplate("{{ bos_token }}{{ tools }}", {"bos_token": "<s>"}).render(HELLO) == "<s>None"
    generation = ChatTemplate("{% if add_generation_prompt %}go{% endif %}")
    assert generation.render(HELLO) == "go"
    assert generation.render(HELLO, add_generation_prompt=False) == ""


@pytest.mark.parametrize(
    "attack",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ raise_exception.__globals__['json'] }}",
        "{% for i in range(999999999) %}{% endfor %}",
        "{{ messages[0].update({'role': 'system'}) }}",
    ],
)
def test_a_template_cannot_leave_the_sandbox(attack):
    with pytest.raises(TextError, match="the chat template refuses"):
        ChatTemplate(attack).render(HELLO)


def test_T2_a_broken_template_is_named_with_its_line():
    with pytest.raises(TextError, match=r"can't be compiled \(line 2\)"):
        ChatTemplate("\n{% if %}")


def test_an_exception_of_the_template_is_its_own_sentence():
    with pytest.raises(TextError, match="roles must alternate"):
        ChatTemplate("{{ raise_exception('roles must alternate') }}").render(HELLO)
