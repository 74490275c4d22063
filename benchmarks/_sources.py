"""Sources of examples for `input_sources.py`, each read by the loaders of three libraries."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np

EXAMPLES, SIDE = 20_000, 64
WAITED = 1e-3
LOOPS = 16_000  # about 1 ms of Python


class Sleeps:
    """A source that waits 1 ms per example without using the processor, as for a disk or a network."""

    def __len__(self) -> int:
        return EXAMPLES

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        time.sleep(WAITED)
        return {"x": np.full(256, index % 7, np.float32)}


class Computes(Sleeps):
    """A source that runs about 1 ms of Python per example, holding the interpreter's lock."""

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        total = 0
        for i in range(LOOPS):
            total += i & index
        return {"x": np.full(256, total % 7, np.float32)}


class ComputesInNumpy(Sleeps):
    """A source that runs about 1 ms of numpy functions per example, mostly without the interpreter's lock."""

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        x = np.linspace(0, index % 7, 64_000, dtype=np.float32)
        return {"x": np.tanh(x).reshape(256, -1).mean(1)}


class Rows(Sleeps):
    """Rows of an array in memory, of a memory-mapped file, or of an HDF5 file that each process opens for itself."""

    def __init__(self, array: Any = None, path: Path | None = None):
        self.array, self.path = array, path

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        if self.array is None:
            self.array = opened(self.path)
        return {"x": np.array(self.array[int(index)])}


def opened(path: Path | None) -> Any:
    """Open a stored array whose rows are read on demand."""
    if path is None or path.suffix == ".npy":
        return np.load(path, mmap_mode="r")  # type: ignore[arg-type]
    import h5py

    return h5py.File(path, "r")["x"]


def write(folder: Path) -> None:
    """Write the files of the stored sources."""
    images = np.random.default_rng(0).integers(0, 255, (EXAMPLES, SIDE, SIDE), dtype=np.uint8)
    np.save(folder / "images.npy", images)
    import h5py

    with h5py.File(folder / "images.h5", "w") as file:
        file.create_dataset("x", data=images, chunks=(16, SIDE, SIDE))


SOURCES = ("sleeps 1 ms", "computes in Python", "computes in numpy", "uint8 images in memory", "HDF5", "mapped file")


def source(name: str, folder: Path) -> tuple[Any, Any]:
    """Return a source as a map-style data set, and in the form that this library takes."""
    match name:
        case "sleeps 1 ms":
            return (both := Sleeps()), both
        case "computes in Python":
            return (both := Computes()), both
        case "computes in numpy":
            return (both := ComputesInNumpy()), both
        case "uint8 images in memory":
            images = np.load(folder / "images.npy")
            return Rows(images), {"x": images}
        case "HDF5":
            return Rows(path=folder / "images.h5"), {"x": opened(folder / "images.h5")}
        case _:
            return Rows(path=folder / "images.npy"), {"x": opened(folder / "images.npy")}
