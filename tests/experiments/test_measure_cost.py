"""The cost of replay, measured on a model of one layer: tables, and what the command refuses."""

import pandas as pd
import pytest
import torch

from experiments.benchmarks.stepper import Stepper
from experiments.measure_cost import main
from moe_rl.store import find_runs

torch.set_num_threads(1)
SMALL = ["model.config.num_hidden_layers=1", "model.config.hidden_size=32", "task.min_length=2",
         "task.max_length=2", "rollout.prompts=4", "rollout.responses=2", "cost.rounds=2",
         "launcher=basic"]  # fmt: skip


@pytest.mark.slow
def test_tables_of_both_kinds_of_replay_and_measured_bytes_are_the_computed(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr("sys.argv", ["x", *SMALL, "cost.lengths=[64,8]", f"output={tmp_path}"])
    replayed, advance = [], Stepper.advance

    def watched(loop):
        record = advance(loop)
        replayed.append("replay/overridden" in record)
        return record

    monkeypatch.setattr(Stepper, "advance", watched)
    main()
    assert sum(replayed) == 2 * (len(replayed) - sum(replayed)) > 0, "two of three kinds of step replay"
    (run,) = find_runs(tmp_path)
    table = pd.read_csv(run.path / "tables" / "cost.csv").set_index(["subject", "metric", "at"])["value"]
    for subject in ("none", "replay", "rollout_replay"):
        assert table[subject, "step/ms", 64] > 0 and table[subject, "memory/mib", 8] > 0
    assert table["replay", "step/ratio", 8] == pytest.approx(
        table["replay", "step/ms", 8] / table["none", "step/ms", 8], rel=0.5
    )
    # 1 layer, 2 of 16 experts: 2 bytes and the validity in memory; 8 bits, or 7 as a set, and 1 in a file
    assert table["trace", "bytes/memory", 64] == table["trace", "bytes/memory_computed", 64] == 3
    assert table["trace", "bytes/ordered_computed", 64] == pytest.approx(9 / 8 + 4 * 4 / 256)
    header = 1024 / (4 * 64)  # of a safetensors file, at most, a token
    for kind in ("ordered", "sets"):
        computed = table["trace", f"bytes/{kind}_computed", 64]
        assert computed <= table["trace", f"bytes/{kind}", 64] <= computed + header
    assert "at 64 tokens" in capsys.readouterr().out


@pytest.mark.parametrize(
    "words, said",
    [
        (["cost.lengths=[]"], "at least one length"),
        (["cost.rounds=0"], "cost.rounds=0"),
        (["replay=old_policy"], "every kind of replay is measured anyway"),
        (["cost.lengths=[8]", "model.config.max_position_embeddings=10"], "must be at least"),
    ],
)
def test_what_cannot_be_measured_is_one_line(monkeypatch, tmp_path, capsys, words, said):
    monkeypatch.setattr("sys.argv", ["x", *SMALL, *words, f"output={tmp_path}"])
    with pytest.raises(SystemExit) as stopped:
        main()
    assert stopped.value.code == 1
    assert said in capsys.readouterr().err
