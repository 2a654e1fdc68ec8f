"""Two gloo processes under `accelerate launch` with the FSDP2 config that we ship, beside one process."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("trl", reason="needs TRL: pip install -c constraints.txt -e '.[trl]'")

HERE, ROOT = Path(__file__).parent, Path(__file__).resolve().parents[2]
ONE_AND_TWO = ["equal", "ours"]
CASES = [*ONE_AND_TWO, "split", "sampled"]
LAUNCH = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", "conf/accelerate/fsdp2.yaml"]


@pytest.fixture(scope="module")
def seen(scene, tmp_path_factory):
    """What one process and each of two saw of the same trainings."""
    import distributed

    directory = tmp_path_factory.mktemp("distributed")
    scene.lm.save(directory / "model")
    (directory / "prompts.json").write_text(json.dumps(scene.prompts))
    environment = os.environ | {
        "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(HERE), str(ROOT)]),
        "TRL_EXPERIMENTAL_SILENCE": "1", "HF_HUB_OFFLINE": "1",
    }  # fmt: skip
    two = subprocess.run(
        [*LAUNCH, "--main_process_port", "0", str(HERE / "distributed.py"), str(directory), *CASES],
        cwd=ROOT, env=environment, capture_output=True, text=True, timeout=540,
    )  # fmt: skip
    assert two.returncode == 0, two.stderr[-4000:]
    distributed.main(directory, ONE_AND_TWO)
    return {
        name: json.loads((directory / f"{name}.json").read_text())
        for name in ("rank0of1", "rank0of2", "rank1of2")
    }


@pytest.mark.parametrize("case", ONE_AND_TWO)
def test_two_processes_give_what_one_gives(seen, case):
    """Loss, gradient norm and every metric of three updates on the same rows, and the weights after them."""
    one, first, second = (seen[name][case] for name in ("rank0of1", "rank0of2", "rank1of2"))
    assert one["kinds"] == ["Parameter"] and first["kinds"] == ["DTensor"]
    assert len(first["history"]) == 3
    for alone, together in zip(one["history"], first["history"], strict=True):
        names = {n for n in alone if isinstance(alone[n], float | int)} - {"step_time"}
        reference = "kl" if case == "equal" else "kl/reference_k3"
        assert names >= {"loss", "grad_norm", reference, "drift/old", "clip_frac/token", "ratio/sequence_ess"}
        for name in names:
            assert together[name] == pytest.approx(alone[name], rel=1e-4, abs=1e-5), name
    assert one["history"][2]["drift/old"] > 0
    assert first["norms"] == second["norms"]
    assert first["norms"] == pytest.approx(one["norms"], rel=1e-4)


def test_trace_rows_follow_their_samples(seen):
    """Shuffled and split in each process: every trace is what the whole model chooses on its tokens."""
    for name in ("rank0of2", "rank1of2"):
        parts = seen[name]["split"]["rows"]
        assert [part["right"] for part in parts] == [[True, True], [True, True]]
        places = [place for part in parts for place in part["places"]]
        assert sorted(places) == [0, 1, 2, 3]
    orders = [part["places"] for name in ("rank0of2", "rank1of2") for part in seen[name]["split"]["rows"]]
    assert orders != [[0, 1], [2, 3]] * 2


def test_processes_sample_until_the_last_has_ended(seen):
    """Responses of other lengths in each process: nobody waits for ever, and the sampler's rows replay."""
    first, second = (seen[name]["sampled"] for name in ("rank0of2", "rank1of2"))
    assert max(first["lengths"]) != max(second["lengths"])
    assert [entry["replay/overridden"] > 0 for entry in first["history"]] == [False, True]
