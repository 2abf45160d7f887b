"""ONNX tensors written one by one into an external data file, so that no second copy of the weights is held."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray
from onnx import TensorProto, helper

_ALIGNMENT = 64  # bytes; a mapped tensor then starts on a cache line


class ExternalData:
    """Appends tensors to one open file and remembers how the graph refers to them."""

    def __init__(self, file: IO[bytes], location: str) -> None:
        self._file = file
        self._location = location
        self.initializers: list[TensorProto] = []

    def add(self, name: str, array: NDArray[Any]) -> str:
        """Write `array` (float32, uint8 or int64) as the initializer `name`; returns the name."""
        self._file.write(bytes(-self._file.tell() % _ALIGNMENT))
        offset = self._file.tell()
        stored = np.ascontiguousarray(array, array.dtype.newbyteorder("<"))
        self._file.write(stored.data)
        tensor = TensorProto(
            name=name, data_type=helper.np_dtype_to_tensor_dtype(array.dtype), dims=array.shape
        )
        tensor.data_location = TensorProto.EXTERNAL
        for key, value in (("location", self._location), ("offset", offset), ("length", stored.nbytes)):
            tensor.external_data.add(key=key, value=str(value))
        self.initializers.append(tensor)
        return name


@contextmanager
def external_data(path: Path) -> Iterator[ExternalData]:
    """Open `path` for the tensors of a model that lies in the same folder."""
    with path.open("wb") as file:
        yield ExternalData(file, path.name)
