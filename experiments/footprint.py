"""What published MoE models and the traces of their rollouts weigh, computed from their configs:

    python -m experiments.footprint

The formulas are those that a dry run uses; that computed traces equal measured ones is a test.
"""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd

from moe_rl.analysis.claims_cost import CLAIM, SOURCE
from moe_rl.analysis.evidence import Statement
from moe_rl.analysis.markdown import markdown_table
from moe_rl.models.footprint import footprint
from moe_rl.models.published import PUBLISHED, published_config

LENGTHS = (1_024, 4_096, 16_384, 32_768, 131_072)
RESPONSES = 4_096  # a rollout batch of 256 prompts x 16
LONG = 32_768  # tokens of a response in the claim table
SUITE = "footprint"


def main() -> None:
    """Print both tables."""
    print(markdown(model_table(), 1), end="\n\n")
    print(f"A rollout batch of {RESPONSES:,} responses, GB by tokens of a response:\n")
    print(markdown(length_table(LENGTHS, RESPONSES), 1))


def model_table() -> pd.DataFrame:
    """One row a model: parameters in billions; bytes a token of the KV cache in bfloat16 and of a trace in
    memory, in a file in the router's order and in one of sets, and the first as a share of the KV cache."""
    rows = []
    for name in PUBLISHED:
        sizes = footprint(published_config(name))
        trace, cached = sizes.trace, sizes.kv_per_token
        assert trace is not None and cached is not None
        rows.append(
            {
                "model": name.split("/")[1],
                "parameters": sizes.parameters / 1e9,
                "active": sizes.active / 1e9,
                "layers": sizes.layers,
                "MoE layers": trace.layers,
                "E": trace.num_experts,
                "K": trace.top_k,
                "KV cache": 2 * cached,
                "trace": trace.bytes_per_token,
                "ordered": trace.file_bytes_per_token(),
                "sets": trace.file_bytes_per_token(ordered=False),
                "trace / KV": trace.bytes_per_token / (2 * cached),
            }
        )
    return pd.DataFrame(rows)


def length_table(lengths: Sequence[int], responses: int) -> pd.DataFrame:
    """GB (1e9 bytes) of the trace of `responses` responses of equal length, by model and kind of storage."""
    rows = []
    for name in PUBLISHED:
        trace = footprint(published_config(name)).trace
        assert trace is not None
        per_response = {
            "in memory": [trace.bytes_per_token * length for length in lengths],
            "file, ordered": [trace.file_bytes([length], length) for length in lengths],
            "file, sets": [trace.file_bytes([length], length, ordered=False) for length in lengths],
        }
        for kind, held in per_response.items():
            columns = {f"{n:,}": responses * size / 1e9 for n, size in zip(lengths, held, strict=True)}
            rows.append({"model": name.split("/")[1], "trace": kind} | columns)
    return pd.DataFrame(rows)


def published_statements() -> list[Statement]:
    """A row of the claim table for each model: what its routing weighs, from its config."""
    return [
        Statement(
            CLAIM,
            SOURCE,
            SUITE,
            f"{model['model']} ({model['MoE layers']} MoE layers, {model['K']} of {model['E']} experts): "
            f"{model['trace']} bytes a token in memory, {model['trace / KV']:.2%} of a KV cache in bfloat16, "
            f"{model['ordered']:.1f} in a file, {model['sets']:.1f} as sets; a batch of "
            f"{RESPONSES:,} responses of {LONG:,} tokens: {RESPONSES * LONG * model['sets'] / 1e9:.0f} to "
            f"{RESPONSES * LONG * model['trace'] / 1e9:.0f} GB",
            "computed",
            "1 model",
            headline=place == 0,  # the paper's base
        )
        for place, model in enumerate(model_table().to_dict("records"))
    ]


def markdown(table: pd.DataFrame, digits: int) -> str:
    """Numbers with so many digits behind the point, shares in per cent."""
    rows = [
        [
            value if isinstance(value, str) else f"{value:,}" if isinstance(value, int) else
            f"{value:.2%}" if column.endswith("/ KV") else f"{value:,.{digits}f}"
            for column, value in row.items()
        ]
        for row in table.to_dict("records")
    ]  # fmt: skip
    return markdown_table(list(table.columns), rows)


if __name__ == "__main__":
    main()
