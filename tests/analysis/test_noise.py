"""Compact tables of noise, and statements and figures from numbers that can be worked out by hand."""

import json
import math
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from moe_rl.analysis.claims_noise import exponent, noise_statements
from moe_rl.analysis.evidence_report import write_evidence
from moe_rl.analysis.measured_files import (
    COLUMNS,
    Measured,
    by_settings,
    compact_measured,
    export_measured,
    read_measured,
)
from moe_rl.analysis.noise_figures import noise_figures
from moe_rl.analysis.run_files import config_hash
from moe_rl.store import Run, RunStore, StoreError

LENGTHS = (16, 256, 4096)
CONFIG: dict[str, Any] = {
    "arm": "grpo",
    "noise": {"sampler_dtype": "bfloat16", "responses": 16},
    "rollout": {"max_new_tokens": 14},
    "optim": {"lr": 3e-5},
}


def rows(seed: int) -> list[dict[str, Any]]:
    """σ² = 0.01 (1 + seed/10) and twice the variance of independent tokens; replay adds 0.1 of cosine."""
    found = []

    def add(table: str, subject: str, metric: str, value: float, at: int | None = None) -> None:
        cells = (table, subject, metric, at, value, math.nan, math.nan, 16, "responses")
        found.append(dict(zip(COLUMNS, cells, strict=True)))

    sigma_sq = 0.01 * (1 + seed / 10)
    for subject, size in (("update", 1.0), ("sampler", 0.1)):
        for n in LENGTHS:
            add("length", subject, "inflation", 2.0 + 0.1 * seed, n)
            for kind, power in (("sequence", -1), ("product", 1)):
                add("length", subject, f"{kind}/variance", 2 * size * sigma_sq * n**power, n)
                add("length", subject, f"{kind}/independent", size * sigma_sq * n**power, n)
            add("length", subject, "sequence/mean", -0.002 * size, n)
            add("length", subject, "product/outside", 0.5, n)
            add("length", subject, "product/not_float32", 0.0, n)
            add("length", subject, "grpo/token_outside", 0.001, n)
            add("length", subject, "grpo/token", 0.1 * size, n)
            add("length", subject, "gspo/sequence_outside", 1.0 if n == 16 else 0.25, n)
            add("length", subject, "gspo/sequence", 100 * size / math.sqrt(n), n)
    for subject, size in (("bfloat16 sampler", 0.02), ("float32 sampler", 1e-6), ("update", 0.2)):
        add("clip_units", subject, "grpo/token", size)
        add("clip_units", subject, "grpo/token_outside", size / 10)
        add("clip_units", subject, "gspo/sequence", 400 * size)
        add("clip_units", subject, "gspo/sequence_outside", 0.8 if size == 0.02 else 0.0)
    for arm, cosine in (
        ("grpo", 0.2), ("grpo+replay", 0.3), ("gspo", 0.2), ("grpo unclipped", 0.25), ("gspo unclipped", 0.2),
    ):  # fmt: skip
        add("gradients", arm, "cosine_pairs", cosine + 0.01 * seed)
        add("gradients", arm, "signal", 0.1 if seed else -0.1)  # of seeds 0 to 5: 0.4/6
        add("gradients", arm, "noise", 0.4)
        add("gradients", arm, "norm", 1.0)
    return found


def made(seed: int, **changes: Any) -> Measured:
    config = CONFIG | changes | {"seed": seed}
    header = {
        "suite": "noise",
        "arm": "grpo",
        "seed": seed,
        "config_hash": config_hash(config),
        "config": config,
        "command": ["python", "-m", "experiments.measure_noise"],
    }
    return Measured(header, pd.DataFrame(rows(seed)))


def test_a_run_directory_becomes_one_file_and_back(tmp_path: Path) -> None:
    path = tmp_path / "noise" / "grpo-0123abcd" / "seed3"
    table = pd.DataFrame(rows(3)).assign(rows="response", by="all", sum=1.0, count=1.0)
    with RunStore.open(path, CONFIG | {"seed": 3}, {"command": ["python", "-m", "x"]}) as store:
        (path / "tables").mkdir()
        for name, part in table.groupby("table"):
            part.drop(columns="table").to_csv(path / "tables" / f"{name}.csv", index=False)
        assert compact_measured(Run(path), "noise") is None  # not done yet
        store.finish({})
    (file,) = export_measured([Run(path)], "noise", tmp_path / "measured")
    assert file.parent.name == "noise" and file.name.endswith("-seed3.csv")
    (found,) = read_measured(tmp_path / "measured")
    assert found.header["command"] == ["python", "-m", "x"] and found.config == CONFIG | {"seed": 3}
    assert found.value("length", "update", "inflation", 256) == pytest.approx(2.3)
    assert found.value("gradients", "gspo", "cosine_pairs") == pytest.approx(0.23)
    assert math.isnan(found.value("gradients", "gspo", "cosine_pairs", 16))
    assert list(found.values("length", "sampler", "inflation").index) == list(LENGTHS)


@pytest.mark.parametrize(
    "text",
    ["", "# {}\n", "no header\n1,2\n", '# {"suite": "noise", "arm": "a", "seed": 1, "config": {}}\n'],
)
def test_any_other_file_is_named_in_the_error(tmp_path: Path, text: str) -> None:
    (tmp_path / "noise").mkdir()
    (tmp_path / "noise" / "a.csv").write_text(text)
    with pytest.raises(StoreError, match=r"a\.csv is no table of a measurement"):
        read_measured(tmp_path)


def test_a_file_under_another_name_is_refused(tmp_path: Path) -> None:
    one = made(0)
    (tmp_path / "noise").mkdir()
    text = f"# {json.dumps(one.header)}\n{one.rows.to_csv(index=False)}"
    (tmp_path / "noise" / "renamed.csv").write_text(text)
    with pytest.raises(StoreError, match="it says that it is noise/grpo-"):
        read_measured(tmp_path)


def test_exponent() -> None:
    assert exponent(pd.Series([8.0, 4.0, 2.0], index=[1, 2, 4])) == pytest.approx(-1)
    assert exponent(pd.Series([0.0, 1.0, 16.0], index=[1, 2, 8])) == pytest.approx(2)  # zeros have no log
    assert math.isnan(exponent(pd.Series([1.0, 0.0], index=[1, 2])))


def test_statements() -> None:
    statements = noise_statements([made(seed) for seed in range(6)])
    update, sampler, outside, precision = statements[:4]
    # means over seeds 0 to 5: σ² 0.0125, inflation 2.25
    assert "log π_θ/π_old at 4096 tokens: variance 6.1e-06 nats² with and 1e+02 without" in update.measured
    assert "2.25 times that of independent tokens" in update.measured
    assert (
        "n^-1.00 and n^1.00" in update.measured and "50 % of products leave GRPO's range" in update.measured
    )
    assert "mean log s -0.002, which no length averages out" in update.measured
    assert update.interval.startswith("95 %: 2.") and update.n == "6 seeds of 16 responses of 4096 tokens"
    assert "log π_old/μ at 4096 tokens: variance 6.1e-07 nats² with" in sampler.measured
    assert (
        "at 16 and 4096 tokens: 0.1 and 0.1 % of tokens (GRPO), 100 and 25 % of responses" in outside.measured
    )
    assert "of a token is 0.02 GRPO ranges off (0.2 % outside)" in precision.measured
    assert "of a response 8 GSPO ranges off (80 % outside); of 4096 tokens 0.16 GSPO" in precision.measured
    assert "the update: 0.2 and 80" in precision.measured and "|" not in precision.measured
    said = {s.measured.partition(":")[0] if "scale" in s.measured else s.measured: s for s in statements[4:]}
    assert said["grpo"].measured.endswith("of two mini-batches 0.225 (noise scale 6 mini-batches)")
    assert said["grpo"].interval.startswith("95 %: 0.2") and said["grpo+replay"].n == "6 seeds"

    def difference(words: str) -> str:
        (found,) = [one for one in said if words in one]
        return found.partition(words)[2]

    # 6 equal differences: 2 of 64 sign patterns are as extreme, and Holm doubles it
    none = "; 6 pairs give no p below 0.0625 among 2 comparisons: not separated)"
    assert difference("mini-batches, grpo+replay − grpo:") == f" +0.1 (p = 0.062{none}"
    assert difference("mini-batches, gspo − grpo:").startswith(" +0 (p = 1.000")
    assert difference("mini-batches, grpo − grpo unclipped:") == f" -0.05 (p = 0.062{none}"
    assert difference("mini-batches, gspo − gspo unclipped:").startswith(" +0 (p = 1.000")
    assert len(update.runs) == 6 and update.runs[0] == made(0).id


def test_configurations_are_kept_apart_and_named() -> None:
    both = [made(0), made(1), made(0, optim={"lr": 1e-4}), made(1, optim={"lr": 1e-4})]
    assert list(by_settings(both)) == ["optim.lr=3e-05: ", "optim.lr=0.0001: "]
    assert [s.n for s in noise_statements(both) if "(nothing shared" in s.measured] == ["2 seeds"] * 6
    alone = [Measured(one.header, one.rows[one.rows["table"] == "gradients"]) for one in both]
    assert set(noise_figures(alone)) == {"noise_1_gradients", "noise_2_gradients"}


def test_the_report_takes_measurements_without_runs(tmp_path: Path) -> None:
    one = made(0)
    folder = tmp_path / "measured" / "noise"
    folder.mkdir(parents=True)
    (folder / f"{one.id.partition('/')[2]}.csv").write_text(
        f"# {json.dumps(one.header)}\n{one.rows.to_csv(index=False)}"
    )
    assert len(write_evidence(tmp_path, {"noise": "make evidence size=full block=noise"})) == 11
    assert (tmp_path / "claims.md").read_text().count("`make evidence size=full block=noise`") == 11
    assert {path.name for path in (tmp_path / "figures").iterdir()} == {
        "noise_length.png", "noise_gradients.png",
    }  # fmt: skip


def test_what_the_figure_draws() -> None:
    figure = noise_figures([made(seed) for seed in range(3)])["noise_length"]
    (line,) = [line for line in figure.axes[0].lines if line.get_label() == "log π_θ/π_old"]
    assert line.get_ydata() == pytest.approx([2 * 0.011 / n for n in LENGTHS])
    (prediction,) = [line for line in figure.axes[0].lines if "old, tokens" in str(line.get_label())]
    assert prediction.get_ydata() == pytest.approx([0.011 / n for n in LENGTHS])
