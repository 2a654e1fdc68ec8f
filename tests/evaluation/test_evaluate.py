"""The command: what it writes, how it resumes, whose models it takes, and what it refuses."""

import json

import pandas as pd
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, TopPLogitsWarper

from experiments import evaluate, sampled_set
from experiments.nucleus import nucleus, outside_nucleus
from experiments.policies import load_policy
from moe_rl.evaluation import SandboxUnavailableError, mean_pass_at_1
from moe_rl.models import prepare
from moe_rl.store import RunStore
from moe_rl.tasks import bpe_tokenizer, get_task
from moe_rl.training.checkpoint import model_tensors

SIZES = {
    "hidden_size": 16,
    "moe_intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "max_position_embeddings": 512,
    "initializer_range": 0.3,
}


def tiny_model(tokenizer, seed=0):
    config = AutoConfig.for_model("qwen3_moe", vocab_size=len(tokenizer), **SIZES)
    torch.manual_seed(seed)
    return prepare(AutoModelForCausalLM.from_config(config), tokenizer)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    tiny_model(get_task("sort").default_tokenizer()).save(folder)
    return folder


@pytest.fixture
def problems(tmp_path):
    file = tmp_path / "problems.jsonl"
    records = [{"id": f"p{n}", "problem": f"{n}=", "answer": str(n)} for n in range(6)]
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    return file


@pytest.fixture
def command(tmp_path):
    """Run it on a set; its exit status and the run directory."""
    output = tmp_path / "outputs"

    def run(model, path, *more, evaluation="aime24"):
        given = [f"model={model}", f"evaluation={evaluation}", f"path={path}", f"output={output}"]
        status = evaluate.main([*given, "max_new_tokens=2", *more])
        return status, next(output.glob("evaluation/*/seed*"), None)

    return run


def lines(path):
    return [json.loads(line) for line in (path / "samples.jsonl").read_text().splitlines()]


MATH = ("k=5", "batch=3", "instruction=null")


def test_a_math_set(command, model, problems, capsys):
    pytest.importorskip("math_verify")
    status, path = command(model, problems, *MATH, "top_p=0.9", "max_new_tokens=1")
    assert status == 0
    records = lines(path)
    assert [(r["problem"], r["sample"]) for r in records] == [
        (f"p{n}", s) for n in range(6) for s in range(5)
    ]
    correct = [sum(r["correct"] for r in records if r["problem"] == f"p{n}") for n in range(6)]
    for record in records:  # a digit is right, and graded so, where it is the problem's own
        if record["response"].isdigit():
            assert record["correct"] == (int(record["response"]) == int(record["problem"][1:]))
    assert 0 < sum(correct) < 30
    table = pd.read_csv(path / "problems.csv")
    assert table["correct"].tolist() == correct and set(table["samples"]) == {5}
    summary, rate = json.loads((path / "summary.json").read_text()), mean_pass_at_1(correct, [5] * 6)
    assert summary["pass@1"] == vars(rate) and summary["samples"] == 5 and summary["problems"] == 6
    assert summary == json.loads((path / "DONE").read_text())
    said = capsys.readouterr().out
    assert (
        f"mean Pass@1 {rate.value:.4f} [{rate.low:.4f}, {rate.high:.4f}] (95 % bootstrap over problems)"
        in said
    )
    assert "wrote samples.jsonl, problems.csv and summary.json" in said
    assert command(model, problems, *MATH, "top_p=0.9", "max_new_tokens=1")[0] == 0
    assert "done already" in capsys.readouterr().out


def test_a_killed_evaluation_goes_on_with_the_same_samples(command, model, problems, monkeypatch, capsys):
    pytest.importorskip("math_verify")
    calls = []

    def interrupted(*given):
        calls.append(given)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return draw(*given)

    draw = sampled_set.draw
    monkeypatch.setattr(sampled_set, "draw", interrupted)
    status, path = command(model, problems, *MATH)
    assert status == 130 and not (path / "DONE").exists() and "continues it" in capsys.readouterr().err
    file = path / "samples.jsonl"
    begun = file.read_text().splitlines(keepends=True)
    file.write_text("".join(begun[:-2]) + begun[-2][:20])  # as a kill in the middle of a batch and a line
    assert command(model, problems, *MATH)[0] == 0
    resumed = lines(path)
    whole = path.with_name("whole")
    path.rename(whole)
    assert command(model, problems, *MATH)[0] == 0
    assert lines(path) == resumed


def test_it_does_not_go_on_with_other_weights_or_problems(command, model, problems, capsys):
    pytest.importorskip("math_verify")
    _, path = command(model, problems, *MATH)
    problems.write_text(problems.read_text().replace('"answer": "5"', '"answer": "6"'))
    for finished in (True, False):
        assert command(model, problems, *MATH)[0] == 1
        assert "other problems under the same configuration" in capsys.readouterr().err
        if finished:
            (path / "DONE").unlink()


CODE = [
    {
        "question_id": name,
        "question_content": f"Multiply by {factor}.",
        "rating": rating,
        "public_test_cases": [{"input": "3", "output": str(3 * factor), "testtype": "stdin"}],
    }
    for name, factor, rating in (("double", 2, 1200), ("triple", 3, 1600))
]


def test_code_is_graded_and_rated(command, tmp_path, sandbox, monkeypatch):
    """Responses with known grades in place of drawn ones: 3 of 4 and 1 of 4 right."""
    file = tmp_path / "code.jsonl"
    file.write_text("".join(json.dumps(record) + "\n" for record in CODE))
    tokenizer = bpe_tokenizer(["print(int(input()) * 2)" * 9], 300)
    tiny_model(tokenizer).save(tmp_path / "model")
    responses = {"double": [2, 2, 0, 2], "triple": [1, 3, 0, 2]}

    def canned(lm, name, prompt, sampling, numbers, share):
        texts = [f"```python\nprint(int(input()) * {responses[name][n]})\n```" for n in numbers]
        shared = {"problem": name, "finished": True}
        return [
            shared | {"sample": n, "response": text, "ids": tokenizer(text)["input_ids"], "tokens": 9}
            for n, text in zip(numbers, texts, strict=True)
        ]

    monkeypatch.setattr(sampled_set, "draw", canned)
    monkeypatch.setattr(evaluate, "open_sandbox", lambda: sandbox)
    status, path = command(tmp_path / "model", file, "k=4", evaluation="codeforces")
    assert status == 0
    summary = json.loads((path / "summary.json").read_text())
    assert summary["pass@1"]["value"] == 0.5 and summary["pass@4"]["value"] == 1.0
    assert summary["elo"]["rating"] == pytest.approx(1400, abs=1e-6)  # by symmetry
    assert summary["sandbox"] == sandbox.isolation.tool
    details = [record["detail"] for record in lines(path) if record["problem"] == "double"]
    assert details == ["passed 1 tests"] * 2 + ["test 1 of 1: wrong answer", "passed 1 tests"]


def test_code_is_not_graded_without_isolation(command, model, tmp_path, monkeypatch, capsys):
    """Runs anywhere: the refusal comes before the model is loaded, and leaves no run directory."""

    def unavailable():
        raise SandboxUnavailableError("graded code cannot be shut in by unshare here")

    monkeypatch.setattr(evaluate, "open_sandbox", unavailable)
    file = tmp_path / "code.jsonl"
    file.write_text(json.dumps(CODE[0]) + "\n")
    assert command(model, file, evaluation="livecodebench") == (1, None)
    assert "failed: graded code cannot be shut in by unshare here" in capsys.readouterr().err


# --- whose models ---


def same_weights(one, other):
    return all(
        torch.equal(a, b) for a, b in zip(one.state_dict().values(), other.state_dict().values(), strict=True)
    )


def test_a_run_directory_gives_its_last_checkpoint_then_its_final_model(tmp_path):
    tokenizer = get_task("sort").default_tokenizer()
    trained, final = tiny_model(tokenizer, 1), tiny_model(tokenizer, 2)
    config = {
        "model": {"name": "tiny", "source": "config", "architecture": "qwen3_moe", "config": SIZES},
        "task": {"name": "sort"},
    }
    with RunStore.open(tmp_path / "run", config) as store:
        tensors = {f"policy.{name}": tensor for name, tensor in model_tensors(trained.model).items()}
        with pytest.raises(Exception, match="neither a final model nor a checkpoint"):
            load_policy(str(tmp_path / "run"), device="cpu")
        store.save_checkpoint(3, tensors | {"value_head.weight": torch.zeros(1)}, {}, {"step": 3})
    assert same_weights(load_policy(str(tmp_path / "run"), device="cpu").model, trained.model)
    final.save(tmp_path / "run" / "final")
    assert same_weights(load_policy(str(tmp_path / "run"), device="cpu").model, final.model)


def test_the_nucleus_is_transformers():
    scores = torch.randn(7, 50, generator=torch.Generator().manual_seed(0)) * 3
    for top_p in (0.1, 0.5, 0.95):
        warped = TopPLogitsWarper(top_p)(None, scores / 0.7)
        assert torch.equal(outside_nucleus(scores, top_p, 0.7), warped.isinf())


def test_the_nucleus_cuts_the_last_logits_and_goes(model):
    lm = load_policy(str(model), device="cpu")
    ids = torch.tensor([[3, 4, 5]])
    with torch.no_grad():
        plain = lm.model(input_ids=ids).logits
        with nucleus(lm.model, 0.5, 1.0):
            cut = lm.model(input_ids=ids).logits
        assert torch.equal(lm.model(input_ids=ids).logits, plain)
    assert torch.equal(cut[:, :-1], plain[:, :-1])
    kept = torch.softmax(cut[0, -1], -1) > 0
    probabilities = torch.softmax(plain[0, -1], -1)
    assert probabilities[kept].sum() >= 0.5
    assert probabilities[kept].sum() - probabilities[kept].min() < 0.5


# --- what it refuses ---


@pytest.mark.parametrize(
    "arguments, message",
    [
        ([], "evaluation= is missing; expected: python -m experiments.evaluate"),
        (["aime24"], "'aime24' is no option"),
        (["model=m", "evaluation=aime24", "path=p", "temprature=1"], "'temprature' not in"),
        (["model=m", "evaluation=aime25", "path=p"], "expected aime24, livecodebench, codeforces"),
        (["model=m", "evaluation=aime24", "path=p", "k=0"], "k=0: must be at least 1"),
        (["model=m", "evaluation=aime24", "path=p", "k=many"], "'many'"),
        (["model=m", "evaluation=aime24", "path=p", "top_p=0"], "top_p=0"),
        (["model=m", "evaluation=aime24", "path=p", "temperature=0"], "temperature=0"),
        (["model=m", "evaluation=livecodebench", "path=p", "limits.seconds=0"], "limits.seconds=0"),
        (["model=m", "evaluation=aime24", "path=nowhere.jsonl"], "path=nowhere.jsonl: there is no such file"),
    ],
)
def test_wrong_options_are_one_line(arguments, message, capsys):
    assert evaluate.main(arguments) == 1
    said = capsys.readouterr().err
    assert message in said and said.count("\n") == 1


def test_a_tokenizer_that_loses_the_problems_is_refused(command, model, problems, capsys):
    pytest.importorskip("math_verify")
    assert command(model, problems, "k=1")[0] == 1  # the instruction is no digits
    assert "tokenizer cannot encode" in capsys.readouterr().err
