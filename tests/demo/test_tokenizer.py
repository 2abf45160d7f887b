"""The tokenizer built from GGUF tables: nothing of a text is lost, digits stand alone, special tokens match."""

import json

import jinja2
import onnxruntime_genai
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from jaxengine.demo.errors import DemoModelError
from jaxengine.demo.gguf_reader import read_gguf
from jaxengine.demo.tokenizer import build_tokenizer
from tests.demo import synthetic as tiny

# What texts are made of where pre-tokenizers disagree: runs of blanks before words and numerals, contractions,
# numerals beyond ASCII, letters of several scripts, line ends.
PIECES = [
    "hello",
    "HE",
    "ll",
    " ",
    "  ",
    "\n",
    "\t",
    "\r\n",
    "'s",
    "'ll",
    "'",
    "12",
    "7",
    "²",
    "½",
    "１",
    "Ⅳ",
]
PIECES += ["é", "世界", "😀", "👩‍👧", ".", ",", "(", "{}", "_", "+=", "<|im_start|>", "<|im_end|>\n"]


@pytest.fixture(scope="module")
def tokenizer(tiny_folder) -> Tokenizer:
    return Tokenizer.from_file(str(tiny_folder / "tokenizer.json"))


@given(text=st.text())
def test_any_text_survives_encoding_and_decoding(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


@given(text=st.text(st.characters(categories=["N"]) | st.sampled_from("ab 12")))
def test_every_digit_stands_alone(tokenizer, text):
    """The tables hold the merge `1 2`, which the pre-tokenizer must keep from ever being used."""
    assert tokenizer.token_to_id("12") not in tokenizer.encode(text).ids


def test_merges_apply_in_order_and_never_across_words(tokenizer):
    assert tokenizer.encode("hello hello").tokens == ["hello", "Ġ", "hello"]
    assert tokenizer.encode("a  b").tokens == ["a", "Ġ", "Ġ", "b"]
    assert tokenizer.encode("a  ").tokens == ["a", "ĠĠ"]
    assert tokenizer.encode("a  1").tokens == ["a", "ĠĠ", "1"]


def test_special_tokens_match_inside_text_and_hold_their_ids(tokenizer):
    ids = tokenizer.encode("<|im_start|>hello<|im_end|>").ids
    assert ids == [1, tokenizer.token_to_id("hello"), 2]
    assert tokenizer.decode(ids) == "hello"
    assert tokenizer.get_vocab_size() == len(tiny.TOKENS)


@pytest.fixture(scope="module")
def genai(tiny_folder) -> onnxruntime_genai.Tokenizer:
    return onnxruntime_genai.Tokenizer(onnxruntime_genai.Model(str(tiny_folder)))


@given(pieces=st.lists(st.sampled_from(PIECES), max_size=12))
def test_onnx_runtime_genais_tokenizer_agrees_on_the_same_folder(tokenizer, genai, pieces):
    text = "".join(pieces)
    assert [int(i) for i in genai.encode(text)] == tokenizer.encode(text).ids


def test_the_chat_template_and_its_default_system_prompt_survive(tiny_folder):
    config = json.loads((tiny_folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    assert config["chat_template"] == tiny.CHAT_TEMPLATE
    roles = [config[f"{role}_token"] for role in ("bos", "eos", "unk", "pad")]
    assert roles == ["<|im_start|>", "<|im_end|>", "<|endoftext|>", "<|im_end|>"]
    messages = [{"role": "user", "content": "hi"}]
    template = jinja2.Template(config["chat_template"], keep_trailing_newline=True)
    assert template.render(messages=messages, add_generation_prompt=True) == (
        "<|im_start|>system\nYou are tiny.<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    )


def test_another_pre_tokenizer_is_refused_by_name(tmp_path):
    tables = read_gguf(tiny.write_tiny_gguf(tmp_path / "other.gguf", pre_tokenizer="llama-bpe")).tokenizer
    with pytest.raises(DemoModelError, match="llama-bpe"):
        build_tokenizer(tables)
