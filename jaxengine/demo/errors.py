"""The one error of this package: whatever keeps the demo model from being made, in one sentence."""


class DemoModelError(RuntimeError):
    """The demo model can't be made; the message names the culprit and the remedy in one sentence."""
