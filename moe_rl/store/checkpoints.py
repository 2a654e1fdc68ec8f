"""Checkpoints: safetensors and JSON, hashed, whole or absent."""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moe_rl.store.files import StoreError, to_json
from moe_rl.store.whole import discard, verify, whole_directory

if TYPE_CHECKING:
    from torch import Tensor

TENSOR_FILES = ("model.safetensors", "optimizer.safetensors")
STATE_FILE = "state.json"
KEEP = 2  # one to resume from, and one for the case that it turns out to be damaged


@dataclass(frozen=True)
class Checkpoint:
    """A verified checkpoint on disk; tensors are read when asked for.

    `state` is the JSON-able dictionary given to `save_checkpoint`.
    """

    step: int
    path: Path
    state: dict[str, Any]

    def model(self) -> "dict[str, Tensor]":
        """Model tensors by name, on the CPU."""
        return _load_tensors(self.path / "model.safetensors")

    def optimizer(self) -> "dict[str, Tensor]":
        """Optimiser tensors by name, on the CPU."""
        return _load_tensors(self.path / "optimizer.safetensors")


def save_checkpoint(
    directory: Path,
    step: int,
    model: "dict[str, Tensor]",
    optimizer: "dict[str, Tensor]",
    state: dict[str, Any],
) -> Path:
    """Write `directory/step-XXXXXXXX` whole or not at all, then drop all but the last two.

    Raises StoreError when it cannot be written; the checkpoints that were there stay.
    """
    final = directory / f"step-{step:08d}"
    with whole_directory(final) as folder:
        for name, tensors in zip(TENSOR_FILES, (model, optimizer), strict=True):
            _save_tensors(folder / name, tensors)
        (folder / STATE_FILE).write_text(to_json({"step": step, "state": state}), encoding="utf-8")
    drop_old(directory)
    return final


def drop_old(directory: Path) -> None:
    """Remove all but the last two checkpoints."""
    for _, old in step_directories(directory)[:-KEEP]:
        discard(old)


def load_checkpoint(path: Path) -> Checkpoint:
    """Read and verify one checkpoint; raises StoreError that says what is damaged."""
    verify(path, (*TENSOR_FILES, STATE_FILE))
    try:
        content = json.loads((path / STATE_FILE).read_text(encoding="utf-8"))
        return Checkpoint(step=content["step"], path=path, state=content["state"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise StoreError(f"{path / STATE_FILE} cannot be read: {error!r}") from error


def step_directories(directory: Path) -> list[tuple[int, Path]]:
    """(step, path) of every checkpoint directory, in the order of steps."""
    if not directory.exists():
        return []
    matches = ((re.fullmatch(r"step-(\d{8,})", path.name), path) for path in directory.iterdir())
    return sorted((int(match[1]), path) for match, path in matches if match)


def _save_tensors(path: Path, tensors: "dict[str, Tensor]") -> None:
    from safetensors.torch import save_file

    plain: dict[str, Tensor] = {}
    storages: set[int] = set()
    for name, tensor in tensors.items():
        value = tensor.detach().to("cpu").contiguous()
        # safetensors refuses names that share memory (tied embeddings): each gets bytes of its own
        if value.untyped_storage().data_ptr() in storages:
            value = value.clone()
        storages.add(value.untyped_storage().data_ptr())
        plain[name] = value
    save_file(plain, path)


def _load_tensors(path: Path) -> "dict[str, Tensor]":
    from safetensors.torch import load_file

    return load_file(path)
