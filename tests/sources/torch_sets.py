"""Data sets of PyTorch's kinds, imported only where torch is installed."""

from __future__ import annotations

import torch
from torch.utils import data

from .values import LENGTH, X


class Dataset(data.Dataset):
    """Map-style, of dicts of tensors."""

    def __len__(self):
        return LENGTH

    def __getitem__(self, index):
        return {"i": torch.tensor(index, dtype=torch.int32), "x": torch.from_numpy(X)[index]}


class Pairs(Dataset):
    """Map-style, of a tensor and a Python number, as torchvision's are."""

    def __getitem__(self, index):
        return torch.from_numpy(X)[index], index


class Stream(data.IterableDataset):
    """Iterable-style; divides its examples among a loader's workers."""

    def __iter__(self):
        worker = data.get_worker_info()
        first, step = (worker.id, worker.num_workers) if worker else (0, 1)
        yield from (Dataset()[i] for i in range(first, LENGTH, step))
