"""Tensors out of the two file formats that hold nothing but arrays: .safetensors and .npz."""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Collection
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

_UNREADABLE = (SafetensorError, zipfile.BadZipFile, zlib.error, OSError, EOFError, NotImplementedError)


class DumpError(ValueError):
    """The dump cannot be used: what was expected, what came, and what to do, in one line."""


def read_entries(path: Path, wanted: Collection[str]) -> tuple[dict[str, Tensor], tuple[str, ...]]:
    """(the wanted entries of a file, the names of the others, which stay unread); never a pickle.

    DumpError where the file or a wanted entry cannot be read.
    """
    if not path.is_file():
        raise DumpError(f"{path}: no such file")
    if path.suffix not in (".safetensors", ".npz"):
        raise DumpError(
            f"{path}: expected .safetensors or .npz (a pickle is never read): save the tensors with "
            "safetensors.torch.save_file or numpy.savez"
        )
    try:
        if path.suffix == ".safetensors":
            with safe_open(path, "pt") as file:
                names = sorted(file.keys())
                entries = {name: file.get_tensor(name) for name in names if name in wanted}
        else:
            with np.load(path, allow_pickle=False) as archive:
                names = sorted(archive.files)
                entries = {name: _array(archive, name) for name in names if name in wanted}
    except DumpError as error:
        raise DumpError(f"{path}: {error}") from error
    except (*_UNREADABLE, ValueError) as error:
        raise DumpError(f"{path}: not a readable {path.suffix} file: {error}") from error
    return entries, tuple(name for name in names if name not in wanted)


def _array(archive: np.lib.npyio.NpzFile, name: str) -> Tensor:
    """A numeric array as a tensor in this machine's byte order."""
    try:
        array = np.asarray(archive[name])
    except MemoryError as error:
        raise DumpError(f"{name} claims more numbers than memory holds: {error}") from error
    except (*_UNREADABLE, ValueError) as error:
        raise DumpError(f"{name} cannot be read: {error}") from error
    if array.dtype.kind not in "biuf":
        raise DumpError(f"{name} must be a numeric array, got {array.dtype}")
    try:
        return torch.from_numpy(np.array(array, dtype=array.dtype.newbyteorder("=")))
    except TypeError as error:  # float128
        raise DumpError(f"{name}: no tensor can hold {array.dtype}: save it as float64") from error
