"""Tokenizers of the kinds that decoders come with, small enough to build in a test."""

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

BOS, EOS, START, END = "<s>", "</s>", "<|im_start|>", "<|im_end|>"
CONTROL = (BOS, EOS, START, END)
HEADERS = ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
WORDS = ("the", "he", "ello", "Hello", "world", "user", "assistant", "system", "世界", "😀")


def byte_level(*, adds_bos: bool = False) -> Tokenizer:
    """GPT-2's kind: every byte has a token, some pairs are merged (across character borders too)."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {symbol: place for place, symbol in enumerate(alphabet)}
    merges = []
    for word in (*WORDS, " the", " world", "é", "�"):
        encoded = "".join(piece for piece, _ in pre_tokenizers.ByteLevel(False, False).pre_tokenize_str(word))
        left = encoded[0]
        for right in encoded[1:]:
            if left + right not in vocab:
                vocab[left + right] = len(vocab)
                merges.append((left, right))
            left += right
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return with_control_tokens(tokenizer, adds_bos)


def sentencepiece(*, adds_bos: bool = True, strips: bool = True) -> Tokenizer:
    """Llama 2's kind: spaces are ▁, one is put in front, and what has no piece is spelled in bytes."""
    vocab = {"<unk>": 0} | {f"<0x{byte:02X}>": 1 + byte for byte in range(256)}
    merges = []
    for letter in "▁abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.,!?[]/<>|_é�":
        vocab[letter] = len(vocab)
    for word in ("▁the", "▁Hello", "▁world", "▁user", "ing"):
        left = word[0]
        for right in word[1:]:
            if left + right not in vocab:
                vocab[left + right] = len(vocab)
                merges.append((left, right))
            left += right
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if strips else steps)
    return with_control_tokens(tokenizer, adds_bos)


def metaspace(*, adds_bos: bool = True) -> Tokenizer:
    """A Unigram model with the Metaspace pre-tokenizer, as converted SentencePiece models have it."""
    letters = "▁abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.,!?[]/<>|_é"
    pieces = [("<unk>", -20.0), *((letter, -5.0) for letter in letters), ("▁the", -2.0), ("▁Hello", -2.0)]
    tokenizer = Tokenizer(models.Unigram(pieces, unk_id=0, byte_fallback=False))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="first")
    return with_control_tokens(tokenizer, adds_bos)


def word_level() -> Tokenizer:
    """Whole words and no decoder at all."""
    tokenizer = Tokenizer(models.WordLevel({"hello": 0, "big": 1, "world": 2}, unk_token="hello"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return tokenizer


def with_control_tokens(tokenizer: Tokenizer, adds_bos: bool) -> Tokenizer:
    """Adds the control tokens, a BOS in front of plain text if asked for, and returns the tokenizer."""
    tokenizer.add_special_tokens([AddedToken(text, normalized=False) for text in (*CONTROL, *HEADERS)])
    tokenizer.add_tokens([AddedToken("<two words>", normalized=False)])  # visible, and in no byte alphabet
    if adds_bos:
        bos = tokenizer.token_to_id(BOS)
        tokenizer.post_processor = processors.TemplateProcessing(f"{BOS} $A", special_tokens=[(BOS, bos)])
    return tokenizer
