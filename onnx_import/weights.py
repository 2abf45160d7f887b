"""Weight data by memory map: resolved beside the model file, never outside its folder, sizes checked first."""

import hashlib
import math
import mmap
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from onnx_import.errors import WeightError
from onnx_import.graph import PACKED_TYPES, Graph, Tensor

_SAMPLES = 64
_SAMPLE_BYTES = 4096


def leads_inside(folder: Path, path: Path) -> bool:
    """Whether `path`, links followed, lies in `folder`; False too for what no file system can follow."""
    try:
        return path.resolve().is_relative_to(folder.resolve())
    except (
        OSError,
        RuntimeError,
        ValueError,
    ):  # too long, a loop of links (Python < 3.13), a NUL in the name
        return False


def resolve_inside(folder: Path, location: str, what: str) -> Path:
    """The path of `location` beside the model file.

    Raises WeightError when it is empty, absolute, or leaves the folder by `..` or a symbolic link.
    """
    path = folder / location
    if not location or Path(location).is_absolute() or not leads_inside(folder, path):
        raise WeightError(f"{what} points to {path}, outside the model folder {folder}.")
    return path


class WeightFiles:
    """The external data files of one model, each mapped once and only read."""

    def __init__(self, graph: Graph) -> None:
        self._folder = graph.file.parent
        self._maps: dict[str, mmap.mmap] = {}

    def check(self, tensors: Iterable[Tensor]) -> None:
        """Raise WeightError for the first tensor whose bytes aren't all there; reads no data."""
        for tensor in tensors:
            if tensor.location is not None:
                self._bytes(tensor)

    def read(self, tensor: Tensor) -> np.ndarray:
        """The tensor as a read-only view of the file (or of the bytes held in the graph)."""
        if tensor.raw is not None:
            return tensor.view(tensor.raw)
        data = self._bytes(tensor)
        if tensor.dtype.name in PACKED_TYPES:
            return tensor.view(_unpacked(data, tensor))
        return tensor.view(data.view(tensor.dtype))

    def release(self, tensors: Iterable[Tensor]) -> None:
        """Let the system take back the memory behind these tensors; views stay valid and read the file anew."""
        for tensor in tensors:
            mapped = self._maps.get(tensor.location or "")
            if mapped is not None and hasattr(mmap, "MADV_DONTNEED"):
                start = tensor.offset // mmap.PAGESIZE * mmap.PAGESIZE
                mapped.madvise(mmap.MADV_DONTNEED, start, tensor.offset + tensor.length - start)

    def paths(self, tensors: Iterable[Tensor]) -> tuple[Path, ...]:
        """The data files that these tensors live in, sorted."""
        locations = {tensor.location for tensor in tensors if tensor.location is not None}
        return tuple(self._folder / location for location in sorted(locations))

    def _bytes(self, tensor: Tensor) -> np.ndarray:
        path = resolve_inside(self._folder, tensor.location or "", f"Tensor {tensor.source!r}")
        if tensor.length != tensor.nbytes:
            raise WeightError(
                f"Tensor {tensor.source!r} of shape {list(tensor.stored)} and type {tensor.dtype} needs "
                f"{tensor.nbytes} bytes, but {tensor.length} are declared in {path}."
            )
        data = self._map(path, tensor)
        end = tensor.offset + tensor.length
        if tensor.offset < 0 or end > data.size:
            raise WeightError(
                f"Tensor {tensor.source!r} lies at bytes {tensor.offset} to {end} of {path}, "
                f"which holds {data.size} bytes; the file is truncated or belongs to another model."
            )
        return data[tensor.offset : end]

    def _map(self, path: Path, tensor: Tensor) -> np.ndarray:
        location = str(tensor.location)
        if location not in self._maps:
            if not path.is_file():
                what = "is no file" if path.exists() else "doesn't exist"
                raise WeightError(f"Tensor {tensor.source!r} needs the data file {path}, which {what}.")
            if path.stat().st_size == 0:
                return np.empty(0, np.uint8)
            with path.open("rb") as file:
                self._maps[location] = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        return np.frombuffer(self._maps[location], np.uint8)


def _unpacked(data: np.ndarray, tensor: Tensor) -> np.ndarray:
    """4-bit elements from their bytes; a signed one's sign is its fourth bit."""
    halves = np.stack((data & 15, data >> 4), axis=-1).reshape(-1)[: math.prod(tensor.stored)]
    if tensor.dtype.name == "int4":
        halves = (halves ^ 8).astype(np.int8) - np.int8(8)
    return halves.astype(tensor.dtype)


def model_identity(graph: Graph, paths: Iterable[Path], mode: str) -> str:
    """A short hash of the graph, the way weights are held, and each data file's name, size and samples.

    Samples (64 evenly spaced blocks of 4 KiB a file) tell fine-tunes of one base apart without reading all.
    """
    digest = hashlib.sha256(graph.file.read_bytes())
    digest.update(mode.encode())
    for path in paths:
        size = path.stat().st_size
        digest.update(f"{path.name}:{size}".encode())
        with path.open("rb") as file:
            for index in range(_SAMPLES):
                file.seek(index * max(size - _SAMPLE_BYTES, 0) // (_SAMPLES - 1))
                digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()[:16]
