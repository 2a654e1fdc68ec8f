"""Print what a file of recorded routing holds, or why it is refused.

    python -m experiments.inspect_trace trace.safetensors
    python -m experiments.inspect_trace response.json rollout.npy --model path/to/config.json
    python -m experiments.inspect_trace batch.npy --format tunix --layers 48 --experts 128 --top-k 8

One line per sequence; the exit status is 1 when any was refused. Files of other engines need the sizes of
the model: `--model` (a directory or a config.json; no weights are read), or `--layers`, `--experts` and
`--top-k`, with `--moe-layers` where some layers are dense.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from experiments.traces import model_sizes
from moe_rl.routing import RoutingError, RoutingTrace, TraceStream
from moe_rl.routing.formats import ModelRouting
from moe_rl.routing.formats.files import DECODERS, import_payload, is_own_trace, read_payloads


def main(arguments: Sequence[str] | None = None) -> int:
    """Inspect the files named on the command line; 0 when all were accepted, 1 otherwise."""
    parser = _parser()
    options = parser.parse_args(arguments)
    try:
        routing = model_sizes(
            options.model, options.layers, options.experts, options.top_k, options.moe_layers
        )
    except (RoutingError, OSError) as error:
        parser.error(str(error))
    refused = 0
    for path in options.files:
        for place, result in _inspect(path, routing, options):
            name = f"{path} ({place})" if place else str(path)
            if isinstance(result, Exception):
                refused += 1
                result = f"refused: {result}"
            print(f"{name}: {result}")
    return int(refused > 0)


def _inspect(
    path: Path, routing: ModelRouting | None, options: argparse.Namespace
) -> Iterator[tuple[str, str | Exception]]:
    """The place of every sequence of a file, and its description or why it is refused."""
    try:
        if path.is_dir():
            stream = TraceStream(path)
            state = "complete" if stream.complete else "unfinished"
            yield "", f"moe_rl {state} stream of {describe(stream.load())}"
            return
        if is_own_trace(path):
            yield "", f"moe_rl trace of {_own(path, routing)}"
            return
        if routing is None:
            raise RoutingError(
                "its layers and K are unknown; pass --model, or --layers, --experts and --top-k"
            )
        payloads = read_payloads(path, options.format)
    except (RoutingError, OSError) as error:
        yield "", error
        return
    for payload in payloads:
        try:
            trace = import_payload(payload, routing, options.tokens, options.start)
        except RoutingError as error:
            yield payload.place, error
            continue
        checked = options.tokens or payload.tokens
        note = "" if checked else "; the number of rows is unchecked, pass --tokens"
        yield payload.place, f"{payload.format}, {describe(trace)}{note}"


def _own(path: Path, routing: ModelRouting | None) -> str:
    trace = RoutingTrace.load(path)
    geometry = (trace.layer_ids, trace.num_experts, trace.top_k)
    if routing and geometry != (routing.moe_layer_ids, routing.num_experts, routing.top_k):
        raise RoutingError(f"it is of another model than the one given: {describe(trace)}")
    known = [f"from {trace.source}"] if trace.source else []
    known += [f"weights version {trace.weights_version}"] if trace.weights_version is not None else []
    known += ["with token hashes"] if trace.token_hash is not None else []
    return ", ".join([f"{len(trace.valid)} sequences", describe(trace), *known])


def describe(trace: RoutingTrace) -> str:
    """One line: tokens, rows with routing, layers, experts."""
    T, rows = trace.valid.shape[1], int(trace.valid.sum())
    last = int(trace.valid[:, -1].sum())
    ending = "" if len(trace.valid) > 1 else f", the last token {'has one' if last else 'has none'}"
    return (
        f"{rows} routed rows of {trace.valid.numel()} (T = {T}{ending}), {len(trace.layer_ids)} MoE layers "
        f"{_ranges(trace.layer_ids)}, {trace.top_k} of {trace.num_experts} experts per token"
    )


def _ranges(layers: Sequence[int]) -> str:
    """0-2,5 for (0, 1, 2, 5)."""
    runs: list[list[int]] = []
    for layer in layers:
        if runs and layer == runs[-1][1] + 1:
            runs[-1][1] = layer
        else:
            runs.append([layer, layer])
    return ",".join(str(low) if low == high else f"{low}-{high}" for low, high in runs)


def _layer_list(text: str) -> tuple[int, ...]:
    """The inverse of `_ranges`."""
    bounds = [part.split("-") for part in text.split(",")]
    return tuple(layer for part in bounds for layer in range(int(part[0]), int(part[-1]) + 1))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="experiments.inspect_trace", description=__doc__.partition("\n")[0])
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE")
    parser.add_argument("--model", type=Path, help="directory or config.json of the model")
    parser.add_argument("--layers", type=int, help="decoder layers, dense ones included")
    parser.add_argument("--experts", type=int, help="experts per layer")
    parser.add_argument("--top-k", type=int, help="experts per token")
    parser.add_argument("--moe-layers", type=_layer_list, help="MoE layers such as 1-47 (default: all)")
    parser.add_argument("--tokens", type=int, help="tokens of a sequence, to check the number of rows")
    parser.add_argument("--start", type=int, default=0, help="first position that was asked for")
    parser.add_argument("--format", choices=sorted(DECODERS), help="when a file's looks do not tell")
    return parser


if __name__ == "__main__":
    sys.exit(main())
