"""A folder's tokenizer files are read as they are, and what is wrong with one is said with its name."""

import json

import pytest

from jaxengine.text import TextError, Tokenizer
from tests.text import toy_tokenizers as toy

HELLO = [{"role": "user", "content": "Hello"}]


@pytest.fixture
def folder(tmp_path):
    toy.byte_level(adds_bos=True).save(str(tmp_path / "tokenizer.json"))
    return tmp_path


def configure(folder, **entries):
    (folder / "tokenizer_config.json").write_text(json.dumps(entries))


def test_a_tokenizer_alone_is_enough_for_raw_text(folder):
    tokenizer = Tokenizer.from_folder(folder)
    assert tokenizer.decode(tokenizer.encode("Hello world")) == "Hello world"
    assert tokenizer.chat_template is None
    with pytest.raises(TextError, match="no chat template"):
        tokenizer.chat_ids(HELLO)


def test_special_tokens_of_the_configuration_reach_the_template(folder):
    """An entry is a text or, as older files have it, a mapping that holds one."""
    template = "{{ bos_token }}|{{ eos_token }}|{{ messages[0].content }}"
    configure(
        folder,
        bos_token="<s>",
        eos_token={"content": "</s>", "lstrip": False},
        pad_token=None,
        chat_template=template,
    )
    assert Tokenizer.from_folder(folder).chat_template.render(HELLO) == "<s>|</s>|Hello"


def test_the_template_file_goes_before_the_configuration_and_the_default_before_other_names(folder):
    configure(
        folder, chat_template=[{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]
    )
    assert Tokenizer.from_folder(folder).chat_template.render(HELLO) == "d"
    (folder / "chat_template.jinja").write_text("file")
    assert Tokenizer.from_folder(folder).chat_template.render(HELLO) == "file"


def test_truncation_and_padding_in_the_file_are_switched_off(folder):
    backend = toy.byte_level()
    backend.enable_truncation(3)
    backend.enable_padding(length=64)
    backend.save(str(folder / "tokenizer.json"))
    tokenizer = Tokenizer.from_folder(folder)
    assert tokenizer.decode(tokenizer.encode("a long text")) == "a long text"


def test_vocabulary_size_counts_to_the_highest_id(folder):
    assert Tokenizer.from_folder(folder).vocab_size == toy.byte_level().get_vocab_size()


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        (
            "tokenizer.json",
            None,
            "tokenizer.json can't be read .No such file.*put the model's tokenizer there",
        ),
        ("tokenizer.json", b"{", "tokenizer.json is no tokenizer that this version of tokenizers reads"),
        ("tokenizer_config.json", b"{", "tokenizer_config.json can't be read"),
        ("tokenizer_config.json", b"[]", "tokenizer_config.json holds no mapping"),
        ("tokenizer_config.json", b"\xff", "tokenizer_config.json can't be read"),
        ("tokenizer_config.json", b'{"chat_template": 3}', "chat_template is neither text nor a list"),
        ("tokenizer_config.json", b'{"chat_template": "{% if %}"}', "chat template can't be compiled"),
        ("chat_template.jinja", b"\xff", "chat_template.jinja can't be read"),
    ],
)
def test_case_C19_a_bad_file_is_named(folder, name, content, problem):
    if content is None:
        (folder / name).unlink()
    else:
        (folder / name).write_bytes(content)
    with pytest.raises(TextError, match=problem):
        Tokenizer.from_folder(folder)
