"""From a block of the evidence to measured tables, statements and figures; and what the command refuses."""

import pytest
import torch
import yaml

from experiments import blocks, evidence
from experiments.measure_noise import main
from moe_rl.analysis.measured_files import read_measured

torch.set_num_threads(1)
SMALL = ["model.config.num_hidden_layers=1", "model.config.hidden_size=32", "task.min_length=2",
         "task.max_length=2", "rollout.max_new_tokens=3", "rollout.prompts=16", "rollout.responses=8",
         "optim.minibatches=4", "cold_start.steps=200", "cold_start.batch_size=32",
         "cold_start.eval_every=10", "noise.lengths=[4,16]", "noise.responses=2", "noise.rounds=2",
         "noise.resamples=50", "launcher=basic"]  # fmt: skip


@pytest.mark.slow
def test_a_block_from_measurement_to_the_table(monkeypatch, tmp_path, capsys):
    """In this process, on a model of one layer; the same command again measures nothing."""
    block = {"suite": "noise", "entry": "measure_noise", "minutes": 1, "quick_seeds": [0], "quick": [SMALL]}
    file = tmp_path / "evidence.yaml"
    file.write_text(yaml.safe_dump({"b": block}))
    monkeypatch.setattr(blocks, "BLOCKS", file)
    monkeypatch.setattr(evidence, "RESULTS", tmp_path / "results")
    monkeypatch.chdir(tmp_path)
    assert evidence.main(["size=quick"]) == 0
    results = tmp_path / "outputs" / "evidence" / "quick" / "results"
    (found,) = read_measured(results / "measured")
    assert found.header["command"][2] == "experiments.measure_noise" and found.seed == 0
    assert set(found.rows["table"]) == {"clip_units", "length", "gradients"}
    assert list(found.values("length", "update", "inflation").index) == [4, 16]
    assert -1 <= found.value("gradients", "gspo", "cosine_pairs") <= 1
    claims = (results / "claims.md").read_text()
    assert "log π_θ/π_old at 16 tokens" in claims and "bfloat16 sampler with KV cache" in claims
    assert {path.name for path in (results / "figures").iterdir()} == {
        "noise_length.png", "noise_gradients.png",
    }  # fmt: skip
    capsys.readouterr()
    assert evidence.main(["size=quick"]) == 0
    assert "the tables of its runs are in" in capsys.readouterr().out


@pytest.mark.parametrize(
    "words, said",
    [
        (["noise.updates=8"], "at least 2 must be left to compare their gradients"),
        (["rollout.refill=2"], "rollout.refill: an option of training"),
        (["noise.lengths=[]"], "noise.lengths"),
        (["replay=old_policy"], "replay.source: an option of training"),
    ],
)
def test_what_does_not_go_together_is_one_line_before_any_work(monkeypatch, tmp_path, capsys, words, said):
    monkeypatch.setattr("sys.argv", ["x", *words, "launcher=basic", f"output={tmp_path}"])
    with pytest.raises(SystemExit) as stopped:
        main()
    assert stopped.value.code == 1
    assert said in capsys.readouterr().err
    assert not list(tmp_path.rglob("config.yaml")) and not (tmp_path / "cold_starts").exists()
