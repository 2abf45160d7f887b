"""What can go wrong while importing a model folder: one base class, one sentence each."""

from collections.abc import Sequence


class ImportFailure(ValueError):
    """The folder can't be imported; the text is one sentence naming the culprit."""


class FolderError(ImportFailure):
    """The folder, its configuration or its ONNX file can't be read or contradicts itself."""


class WeightError(ImportFailure):
    """A tensor's data is missing, truncated, out of range or outside the model folder."""


class UnsupportedGraph(ImportFailure):
    """The graph needs something that isn't implemented; `problems` lists all of it, one entry a cause."""

    def __init__(self, model: str, problems: Sequence[str]) -> None:
        self.problems = tuple(problems)
        super().__init__(f"{model} can't be imported: " + "; ".join(self.problems) + ".")
