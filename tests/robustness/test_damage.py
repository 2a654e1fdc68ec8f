"""Damaged checkpoints, and two processes on one run directory."""

import signal

from moe_rl.store import Run, RunStore

LAST = r"\.DONE\.tmp"  # when it is opened, everything else is written


def test_a_damaged_checkpoint_falls_back_and_two_start_over(small_run, whole, results, tmp_path):
    last = {"at": LAST, "below": str(tmp_path)}
    assert small_run(tmp_path, crash=last).code == -signal.SIGKILL
    run = Run(small_run.directory(tmp_path))
    (run.path / "checkpoints" / "step-00000003" / "state.json").unlink()
    fallen = small_run(tmp_path, crash=last)  # step 3 again, from checkpoint 2
    assert "checkpoint of step 3 passed over" in fallen.err and "SHA256SUMS" not in fallen.err
    assert [phase[0] for phase in fallen.phases].count("rollout") == 1
    assert [event["step"] for event in run.events() if event["event"] == "resumed"] == [2]

    for step in (2, 3):
        tensors = run.path / "checkpoints" / f"step-0000000{step}" / "model.safetensors"
        content = bytearray(tensors.read_bytes())
        content[len(content) // 2] ^= 1
        tensors.write_bytes(content)
    over = small_run(tmp_path)
    assert over.code == 0
    assert over.err.count("passed over") == 2 and "the run starts over" in over.err
    assert [phase[0] for phase in over.phases].count("rollout") == 3
    names = [event["event"] for event in run.events()]
    assert names.count("damaged_checkpoint") == 3 and names.count("started_over") == 1
    assert results(tmp_path) == whole.results


def test_a_second_process_is_refused_in_one_line(small_run, whole, results, tmp_path):
    assert small_run(tmp_path, kill={"phase": "checkpoint", "occurrence": 2, "delay": 1}).code < 0
    run = Run(small_run.directory(tmp_path))
    with RunStore.open(run.path, run.config, run.environment):
        before = {file: file.read_bytes() for file in run.path.rglob("*") if file.is_file()}
        ended = small_run(tmp_path)
        assert ended.code == 1 and ended.phases == []
        (line,) = ended.err.splitlines()
        assert "is in use by another process" in line
        assert {file: file.read_bytes() for file in run.path.rglob("*") if file.is_file()} == before
    assert small_run(tmp_path).code == 0
    assert results(tmp_path) == whole.results
