"""Directories that appear whole or not at all, and can be told from damaged ones."""

import hashlib
import os
import re
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from moe_rl.store.files import StoreError, sync, writing

SUMS = "SHA256SUMS"  # in the format of sha256sum, so that `sha256sum -c SHA256SUMS` checks a directory too


@contextmanager
def whole_directory(path: Path) -> Iterator[Path]:
    """A directory to fill, which takes the place of `path` when the block ends and vanishes if it fails.

    Every file in it is hashed into SHA256SUMS and fsynced before the rename.  Raises StoreError when the disk
    is full or `path` cannot be written; what was there stays.  One process at a time.
    """
    temporary, replaced = _temporary(path), _replaced(path)
    with writing(path):
        try:
            recover(path)
            temporary.mkdir(parents=True)
            with _system_errors_of_safetensors():
                yield temporary
            _seal(temporary)
            if path.exists():
                os.rename(path, replaced)
            os.rename(temporary, path)
            sync(path.parent)
        except BaseException:
            recover(path)  # gives the space back, too
            raise
    shutil.rmtree(replaced, ignore_errors=True)


@contextmanager
def _system_errors_of_safetensors() -> Iterator[None]:
    """safetensors wraps the OSError of a failed write into a class of its own."""
    from safetensors import SafetensorError  # not needed by who only reads and writes metrics

    try:
        yield
    except SafetensorError as error:
        number = re.search(r"\(os error (\d+)\)", str(error))
        if number is None:
            raise
        raise OSError(int(number[1]), os.strerror(int(number[1]))) from error


def recover(path: Path) -> None:
    """Take away what a kill in `whole_directory` or `discard` left, and put back what was being replaced."""
    replaced = _replaced(path)
    if replaced.exists() and not path.exists():
        os.rename(replaced, path)
    for leftover in (replaced, _temporary(path)):
        shutil.rmtree(leftover, ignore_errors=True)


def recover_all(directory: Path) -> None:
    """`recover` for every directory that has leftovers in `directory`."""
    for leftover in [*directory.glob(".*.tmp"), *directory.glob(".*.replaced")]:
        recover(directory / leftover.name[1:].rpartition(".")[0])


def discard(path: Path) -> None:
    """Remove a directory; a kill in the middle leaves no half of it under its name."""
    temporary = _temporary(path)
    shutil.rmtree(temporary, ignore_errors=True)
    with writing(path):
        os.rename(path, temporary)
    shutil.rmtree(temporary, ignore_errors=True)


def verify(directory: Path, names: Sequence[str]) -> None:
    """Check the named files against SHA256SUMS; StoreError says which is missing or damaged."""
    try:
        lines = (directory / SUMS).read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError) as error:
        raise StoreError(f"{directory / SUMS} cannot be read: {error!r}") from error
    expected = {name: digest for digest, _, name in (line.partition("  ") for line in lines)}
    for name in names:
        file = directory / name
        if name not in expected:
            raise StoreError(f"{directory / SUMS} is damaged: it has no line for {name}")
        try:
            found = _sha256(file)
        except FileNotFoundError as error:
            raise StoreError(f"{file} is missing") from error
        except OSError as error:
            raise StoreError(f"{file} cannot be read: {error!r}") from error
        if found != expected[name]:
            raise StoreError(
                f"{file} is damaged: expected sha256 {expected[name][:12]}…, found {found[:12]}…"
            )


def _seal(directory: Path) -> None:
    files = sorted(path for path in directory.rglob("*") if path.is_file())
    lines = [f"{_sha256(file)}  {file.relative_to(directory).as_posix()}\n" for file in files]
    (directory / SUMS).write_text("".join(lines), encoding="utf-8")
    for file in (*files, directory / SUMS, directory):
        sync(file)


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _temporary(path: Path) -> Path:
    return path.with_name(f".{path.name}.tmp")


def _replaced(path: Path) -> Path:
    return path.with_name(f".{path.name}.replaced")
