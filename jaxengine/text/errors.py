"""The one error of this package: text that can't become tokens, or files that can't say how."""


class TextError(ValueError):
    """A tokenizer file, chat template or text is unusable; the sentence names the culprit and the remedy."""
