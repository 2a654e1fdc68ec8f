"""Recorded routing on disk as one trace, whatever wrote it: for commands that read traces without a model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from transformers import AutoConfig

from moe_rl.routing import RoutingError, RoutingTrace, TraceStream
from moe_rl.routing.formats import ModelRouting
from moe_rl.routing.formats.files import import_payload, is_own_trace, read_payloads


def model_sizes(
    model: str | Path | None,
    layers: int | None,
    experts: int | None,
    top_k: int | None,
    moe_layers: Sequence[int] | None,
) -> ModelRouting | None:
    """The sizes of a model, from its config (no weights are read) or from numbers; None where none is given.

    Raises RoutingError for a config that cannot be read, and where some of the numbers are missing.
    """
    if model is not None:
        try:
            config = AutoConfig.from_pretrained(model, local_files_only=True, trust_remote_code=False)
        except ValueError as error:  # a model type that transformers does not know
            raise RoutingError(f"{model}: {error}") from error
        return ModelRouting.from_config(config)
    if layers is None and experts is None and top_k is None:
        return None
    if layers is None or experts is None or top_k is None:
        raise RoutingError("the numbers of layers, of experts and of top-k experts go together")
    return ModelRouting(layers, tuple(range(layers) if moe_layers is None else moe_layers), experts, top_k)


def read_trace(
    path: str | Path, sizes: ModelRouting | None = None, format: str | None = None
) -> RoutingTrace:
    """Every sequence of a file or stream, padded on the right to the longest, checked.

    Own trace files and streams say what model they are of; those of other engines need `sizes`, and a batch
    in one array its `format`. Raises RoutingError for what is not routing, OSError for what cannot be read.
    """
    path = Path(path)
    if path.is_dir():
        return TraceStream(path).load().validate()
    if is_own_trace(path):
        return RoutingTrace.load(path)
    if sizes is None:
        raise RoutingError(f"{path}: its layers and K are unknown; name its model's config, or their numbers")
    traces = [import_payload(payload, sizes) for payload in read_payloads(path, format)]
    longest = max(trace.valid.shape[1] for trace in traces)
    return RoutingTrace.cat([trace.fit(longest) for trace in traces])
