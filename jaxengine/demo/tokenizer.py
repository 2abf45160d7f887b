"""The GGUF file's tokenizer as `tokenizer.json` and `tokenizer_config.json`.

Byte-level BPE behind the `smollm` pre-tokenizer of llama.cpp (llama-vocab.cpp): every numeral (Unicode category N)
stands alone, then the GPT-2 split. Both are written as expressions, since ONNX Runtime GenAI's tokenizer passes over
the `Digits` step of the tokenizers library. Bytes that the vocabulary has no token for are lost, as in llama.cpp.
"""

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

from jaxengine.demo.errors import DemoModelError
from jaxengine.demo.gguf_reader import TokenizerTables

_NUMERAL = r"\p{N}"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


def build_tokenizer(tables: TokenizerTables) -> Tokenizer:
    """The tokenizer that `tables` describe; control tokens are special and match in text before anything else.

    Raises:
        DemoModelError: the pre-tokenizer isn't `smollm`.
    """
    if tables.pre_tokenizer != "smollm":
        raise DemoModelError(
            f"The GGUF file wants the {tables.pre_tokenizer} pre-tokenizer; smollm is supported."
        )
    vocabulary = {token: i for i, token in enumerate(tables.tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=list(tables.merges)))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_NUMERAL), "isolated"),
            pre_tokenizers.Split(Regex(_GPT2), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(tables.tokens[i], special=True, normalized=False) for i in tables.control_ids]
    )
    return tokenizer


def tokenizer_config(tables: TokenizerTables, context_length: int) -> dict[str, Any]:
    """The content of `tokenizer_config.json`: chat template and the special tokens by role."""
    roles = {"bos": tables.bos_id, "eos": tables.eos_id, "unk": tables.unk_id, "pad": tables.pad_id}
    return {
        "tokenizer_class": "GPT2Tokenizer",
        "add_prefix_space": False,
        "add_bos_token": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": context_length,
        **{f"{role}_token": tables.tokens[i] for role, i in roles.items() if i is not None},
        "chat_template": tables.chat_template,
    }


def write_tokenizer(tables: TokenizerTables, context_length: int, folder: Path) -> None:
    """Write `tokenizer.json` and `tokenizer_config.json` into `folder`."""
    build_tokenizer(tables).save(str(folder / "tokenizer.json"))
    config = json.dumps(tokenizer_config(tables, context_length), indent=2, ensure_ascii=False)
    (folder / "tokenizer_config.json").write_text(config, encoding="utf-8")
