"""Traces appended to disk as they come, in bounded memory.

A stream is a directory: `stream.json`, which says what model it is of and, once it is finished, how many
files it has, with a CRC-32 of what it says, and `000000.safetensors`, `000001.safetensors`, …, each a trace
that `RoutingTrace.open` reads.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from moe_rl.routing.errors import RoutingError
from moe_rl.routing.trace import RoutingTrace

MANIFEST = "stream.json"
FORMAT_VERSION = 2
_OBJECT_BYTES = 2_048  # of a trace and its tensors besides the ids: what single decode steps weigh


class TraceWriter:
    """Writes traces of one model to a new directory, one after the other.

    with TraceWriter(path, layer_ids, num_experts, top_k) as writer:
        writer.append(trace)             # any number of sequences
    for trace in TraceStream(path): ...

    `dim` is what appending extends: 0, sequences (shorter ones are padded on the right with rows that are not
    valid), or 1, the rows of the same sequences, such as decode steps. `ordered` is as in RoutingTrace.save.
    A file is written whenever `buffer_bytes` of traces have come: memory holds about three times that,
    packing included, whatever the length of the stream.

    Files appear whole. After a crash or an exception the directory holds every file written before, not the
    buffer, and the stream reads as not complete. Raises RoutingError for a directory that is not empty and
    for a trace of another model.
    """

    def __init__(
        self,
        path: str | Path,
        layer_ids: Sequence[int],
        num_experts: int,
        top_k: int,
        dim: int = 0,
        ordered: bool = True,
        buffer_bytes: int = 32 << 20,
    ) -> None:
        self.path = Path(path)
        self._model = {"layer_ids": list(layer_ids), "num_experts": num_experts, "top_k": top_k}
        self._dim, self._ordered, self._buffer_bytes = dim, ordered, buffer_bytes
        self._buffer: list[RoutingTrace] = []
        self._held_bytes = 0
        self._files = 0
        self._sequences: int | None = None
        self.path.mkdir(parents=True, exist_ok=True)
        if any(self.path.iterdir()):
            raise RoutingError(f"{self.path} is not empty; a stream of traces needs a directory of its own")
        self._write_manifest(files=None)

    def __enter__(self) -> TraceWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is None:
            self.finish()

    def append(self, trace: RoutingTrace) -> None:
        """Add a trace, which is copied or kept until it is written: do not change its tensors in place."""
        _require_model(self._model, trace)
        if self._dim == 1 and self._sequences not in (None, len(trace.valid)):
            raise RoutingError(
                f"the stream extends {self._sequences} sequences by rows, got rows of {len(trace.valid)}"
            )
        self._sequences = len(trace.valid)
        self._buffer.append(trace.compact().to("cpu"))
        self._held_bytes += self._buffer[-1].nbytes + _OBJECT_BYTES
        if self._held_bytes >= self._buffer_bytes:
            self._flush()

    def finish(self) -> None:
        """Write what is buffered and mark the stream complete."""
        self._flush()
        self._write_manifest(files=self._files)

    def _flush(self) -> None:
        if self._buffer:
            _join(self._buffer, self._dim).save(_file(self.path, self._files), self._ordered)
            self._buffer.clear()
            self._held_bytes = 0
            self._files += 1

    def _write_manifest(self, files: int | None) -> None:
        manifest = {"version": FORMAT_VERSION, **self._model, "dim": self._dim, "files": files}
        manifest["checksum"] = _checksum(manifest)
        temporary = self.path / f".{MANIFEST}.tmp"
        with open(temporary, "w", encoding="utf-8") as file:
            json.dump(manifest, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, self.path / MANIFEST)


class TraceStream:
    """Reads what a TraceWriter wrote, also while it writes: iteration gives one RoutingTrace a file.

    complete     whether the writer finished; else these are the files it had written when this was opened
    dim          what the traces extend one after the other: sequences (0) or rows of the same sequences (1)

    Raises RoutingError for a directory that is no stream, of which a file is missing, or damaged.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        try:
            manifest = json.loads((self.path / MANIFEST).read_text(encoding="utf-8"))
            if manifest["version"] != FORMAT_VERSION:
                raise RoutingError(
                    f"{path} is a stream of format {manifest['version']}; this version reads {FORMAT_VERSION}"
                )
            if manifest["checksum"] != _checksum(manifest):  # a flipped bit of dim would join along the other
                raise RoutingError(f"{path} is damaged: the checksum of {MANIFEST} does not match")
            self._model = {name: manifest[name] for name in ("layer_ids", "num_experts", "top_k")}
            self.dim: int = manifest["dim"]
            files: int | None = manifest["files"]
            if files is not None and (type(files) is not int or files < 0):
                raise RoutingError(f"{path} is damaged: {MANIFEST} counts {files!r} files")
        except (FileNotFoundError, NotADirectoryError) as error:
            raise RoutingError(f"{path} is not a stream of traces: it has no {MANIFEST}") from error
        except (ValueError, RecursionError, KeyError, TypeError) as error:
            if isinstance(error, RoutingError):
                raise
            raise RoutingError(f"{path} is not a stream of traces, or damaged: {error!r}") from error
        present = sorted(self.path.glob("*.safetensors"))
        self.complete = files is not None
        self._paths = [_file(self.path, i) for i in range(len(present))]
        if present != self._paths or files not in (None, len(present)):
            expected = len(present) if files is None else files
            raise RoutingError(
                f"{path} should hold {expected} traces numbered from 0, found {[f.name for f in present]}"
            )

    def __len__(self) -> int:
        """The number of files."""
        return len(self._paths)

    def __iter__(self) -> Iterator[RoutingTrace]:
        for path in self._paths:
            trace = RoutingTrace.load(path)
            _require_model(self._model, trace)
            yield trace

    def load(self) -> RoutingTrace:
        """Everything as one trace, in memory. Raises RoutingError for a stream without traces."""
        return _join(list(self), self.dim)


def _join(traces: Sequence[RoutingTrace], dim: int) -> RoutingTrace:
    if dim == 1:
        return RoutingTrace.cat(traces, dim=1)
    length = max((trace.valid.shape[1] for trace in traces), default=0)
    return RoutingTrace.cat([trace.fit(length) for trace in traces])


def _require_model(model: dict[str, Any], trace: RoutingTrace) -> None:
    of_trace = {
        "layer_ids": list(trace.layer_ids),
        "num_experts": trace.num_experts,
        "top_k": trace.top_k,
    }
    if of_trace != model:
        raise RoutingError(f"the stream is of a model with {model}, the trace of one with {of_trace}")


def _checksum(manifest: dict[str, Any]) -> int:
    """CRC-32 of everything else in a manifest."""
    rest = {name: value for name, value in manifest.items() if name != "checksum"}
    return zlib.crc32(json.dumps(rest, sort_keys=True).encode())


def _file(path: Path, number: int) -> Path:
    return path / f"{number:06d}.safetensors"
