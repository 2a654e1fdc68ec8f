"""The tables of sizes by model and length, against sums worked by hand."""

import pytest

from experiments.footprint import length_table, markdown, model_table


def test_models_by_hand():
    table = model_table().set_index("model")
    qwen = table.loc["Qwen3-30B-A3B-Base"]
    assert (qwen["trace"], qwen["ordered"], qwen["sets"]) == (
        48 * 8 + 1,
        (48 * 56 + 1) / 8,
        (48 * 41 + 1) / 8,
    )
    assert qwen["KV cache"] == 2 * 48 * 2 * 4 * 128
    assert table.loc["Kimi-K2-Instruct"]["trace"] == 60 * 8 * 2 + 1  # ids of 384 experts take two bytes
    assert qwen["trace / KV"] == 385 / 98304
    assert table["trace / KV"].idxmax() == "Kimi-K2-Instruct"


def test_lengths_by_hand():
    table = length_table([1000, 2000], responses=10).set_index(["model", "trace"])
    memory = table.loc[("DeepSeek-V3", "in memory")]
    assert memory["1,000"] == 10 * 1000 * (58 * 8 + 1) / 1e9 and memory["2,000"] == 2 * memory["1,000"]
    sets = table.loc[("DeepSeek-V3", "file, sets")]["1,000"]
    assert sets == pytest.approx(10 * (58 * 49 * 1000 / 8 + 125 + 4) / 1e9)  # C(256, 8) is below 2^49
    assert "| DeepSeek-V3 | in memory | 0.00465 | 0.00930 |" in markdown(table.reset_index(), 5)
