"""A folder in the user's cache that is made once: either whole under its final name, or absent.

Makers take turns by a lock file that the system frees when its holder dies. The holder works in a sibling folder, syncs
it to disk and renames it; what a dead maker left behind, the next holder removes.
"""

import contextlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import platformdirs
from filelock import FileLock

from jaxengine.demo.errors import DemoModelError

MANIFEST = "manifest.json"  # file name -> bytes; written last


def cache_root() -> Path:
    """The user's cache folder for jaxengine, or the one that the environment variable JAXENGINE_CACHE names."""
    override = os.environ.get("JAXENGINE_CACHE")
    return Path(override).expanduser().absolute() if override else platformdirs.user_cache_path("jaxengine")


def is_complete(folder: Path) -> bool:
    """Whether `folder` holds every file of its manifest at its full size."""
    try:
        sizes = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        return all((folder / name).stat().st_size == size for name, size in sizes.items())
    except (OSError, ValueError, AttributeError):  # absent, or not a manifest
        return False


def make_once(folder: Path, build: Callable[[Path], Path]) -> None:
    """Make `folder` unless it is complete; a damaged one is replaced.

    Args:
        folder: final name; its parents are made as needed.
        build: given an empty workspace on the same file system, makes a folder inside it and returns that folder.

    Raises:
        DemoModelError: the cache can't be written.
        Exception: whatever `build` raises; the cache is then as before.
    """
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(folder.parent / f".{folder.name}.lock"):
            if not is_complete(folder):
                _make(folder, build)
    except (OSError, NotImplementedError) as error:  # the latter: a file system without locks
        raise DemoModelError(
            f"The demo model can't be written to {folder} ({error}): make room there, or name another folder in the "
            "environment variable JAXENGINE_CACHE."
        ) from error


def _make(folder: Path, build: Callable[[Path], Path]) -> None:
    prefix = f".{folder.name}.making-"
    for left_behind in folder.parent.glob(f"{prefix}*"):
        shutil.rmtree(left_behind, ignore_errors=True)
    with _workspace(folder.parent, prefix) as workspace:
        made = build(workspace)
        _seal(made)
        if folder.exists():
            folder.rename(workspace / "damaged")
        made.rename(folder)
        _sync(folder.parent)


@contextlib.contextmanager
def _workspace(parent: Path, prefix: str) -> Iterator[Path]:
    workspace = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
    try:
        yield workspace
    finally:
        shutil.rmtree(workspace, ignore_errors=True)


def _seal(folder: Path) -> None:
    """Write the manifest of `folder`'s files and bring all of it to disk."""
    files = sorted(path for path in folder.iterdir() if path.is_file())
    manifest = folder / MANIFEST
    manifest.write_text(
        json.dumps({path.name: path.stat().st_size for path in files}, indent=2), encoding="utf-8"
    )
    for path in (*files, manifest, folder):
        _sync(path)


def _sync(path: Path) -> None:
    if path.is_dir() and os.name == "nt":  # Windows can't open folders
        return
    descriptor = os.open(path, os.O_RDWR if path.is_file() else os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
