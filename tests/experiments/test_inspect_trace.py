import json

import numpy as np
import pytest
import torch

from experiments.inspect_trace import main
from moe_rl.routing import RoutingTrace, TraceWriter

SIZES = ["--layers", "3", "--experts", "8", "--top-k", "2", "--moe-layers", "1-2"]


@pytest.fixture
def rows():
    """Routing of 5 rows in 3 layers, the first of them dense."""
    generator = np.random.default_rng(0)
    experts = generator.random((5, 3, 8)).argsort(axis=2)[:, :, :2]
    experts[:, 0] = 0
    return experts.astype(np.uint8)


def test_an_accepted_file_is_described_in_one_line(rows, tmp_path, capsys):
    file = tmp_path / "rollout.npy"
    np.save(file, rows)
    assert main([str(file), *SIZES, "--tokens", "6"]) == 0
    assert capsys.readouterr().out == (
        f"{file}: vllm, 5 routed rows of 6 (T = 6, the last token has none), 2 MoE layers 1-2, "
        "2 of 8 experts per token\n"
    )


def test_an_unknown_length_is_said_to_be_unchecked(rows, tmp_path, capsys):
    file = tmp_path / "rollout.npy"
    np.save(file, rows)
    assert main([str(file), *SIZES]) == 0
    assert capsys.readouterr().out.endswith("the number of rows is unchecked, pass --tokens\n")


def test_a_refused_file_gives_its_reason_and_a_non_zero_status(rows, tmp_path, capsys):
    good, bad, missing = tmp_path / "good.npy", tmp_path / "bad.npy", tmp_path / "missing.npy"
    np.save(good, rows)
    np.save(bad, np.where(rows == rows[2, 2, 0], 9, rows))
    assert main([str(good), str(bad), str(missing), *SIZES]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert "5 routed rows" in lines[0]
    assert lines[1].startswith(f"{bad}: refused: vLLM: expert ids must lie in [0, 8), layer")
    assert lines[2].startswith(f"{missing}: refused: [Errno 2]")


def test_geometry_comes_from_a_config_without_weights(rows, tmp_path, capsys):
    config = {
        "model_type": "qwen3_moe",
        "num_hidden_layers": 3,
        "mlp_only_layers": [0],
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "hidden_size": 64,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    file = tmp_path / "rollout.npy"
    np.save(file, rows)
    for model in (tmp_path, tmp_path / "config.json"):
        assert main([str(file), "--model", str(model), "--tokens", "6"]) == 0
        assert "2 MoE layers 1-2, 2 of 8 experts" in capsys.readouterr().out


def test_own_traces_need_no_geometry_but_must_match_one_that_is_given(tmp_path, capsys):
    file = tmp_path / "trace.safetensors"
    experts = torch.tensor([[[[0, 1], [2, 3]]]])
    RoutingTrace(experts, torch.ones(1, 1, dtype=torch.bool), (1, 2), 8).save(file)
    assert main([str(file)]) == 0
    assert capsys.readouterr().out == (
        f"{file}: moe_rl trace of 1 sequences, 1 routed rows of 1 (T = 1, the last token has one), "
        "2 MoE layers 1-2, 2 of 8 experts per token\n"
    )
    assert main([str(file), *SIZES]) == 0
    assert main([str(file), "--layers", "3", "--experts", "8", "--top-k", "2"]) == 1
    assert "of another model" in capsys.readouterr().out


def test_a_foreign_file_without_geometry_says_what_to_pass(rows, tmp_path, capsys):
    file = tmp_path / "rollout.npy"
    np.save(file, rows)
    assert main([str(file)]) == 1
    assert "pass --model" in capsys.readouterr().out


@pytest.mark.parametrize("arguments", [["--layers", "3"], ["--model", "nowhere/config.json"]])
def test_incomplete_or_unreadable_geometry_is_a_usage_error(arguments):
    with pytest.raises(SystemExit) as stopped:
        main(["file.npy", *arguments])
    assert stopped.value.code == 2


def test_own_traces_say_where_they_come_from(rows, tmp_path, capsys):
    experts = torch.from_numpy(rows)[None, :, 1:]
    trace = RoutingTrace(
        experts, torch.ones(1, 5, dtype=torch.bool), (1, 2), 8, source="vLLM", weights_version=3
    ).for_tokens(torch.arange(5)[None])
    trace.save(tmp_path / "own.safetensors")
    with TraceWriter(tmp_path / "stream", (1, 2), 8, 2) as writer:
        writer.append(trace)
        writer.append(trace)
    assert main([str(tmp_path / "own.safetensors"), str(tmp_path / "stream")]) == 0
    own, stream = capsys.readouterr().out.splitlines()
    assert own.endswith(", 2 of 8 experts per token, from vLLM, weights version 3, with token hashes")
    assert "moe_rl complete stream of 10 routed rows of 10" in stream
    assert main([str(tmp_path)]) == 1
    assert "is not a stream of traces" in capsys.readouterr().out.splitlines()[-1]
