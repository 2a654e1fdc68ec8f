"""The command: files in, a table and an exit code out."""

import io
import json
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from experiments.check_loss import main

ROOT = Path(__file__).resolve().parents[2]
GOLDEN = ROOT / "tests" / "golden"
CASES = json.loads((GOLDEN / "peer_values.json").read_text())["cases"]


def dump_of(peer, objective, scene="wild"):
    """A stored call of a peer, as float32 entries."""
    tensors = load_file(GOLDEN / "peer_values.safetensors")
    (case,) = (
        case
        for case in CASES
        if (case["peer"], case["objective"], case["scene"]) == (peer, objective, scene)
        and "advantages" not in case
    )
    entries = {
        name: tensors[f"{scene}/{name}"].float() for name in ("logp", "old_logp", "mask", "advantages")
    }
    return entries | {"loss": tensors[f"{case['key']}/loss"].float()}


@pytest.fixture
def verl_gspo():
    return dump_of("verl gspo seq-mean-token-mean", "gspo")


def as_numpy(entries):
    return {name: tensor.numpy() for name, tensor in entries.items()}


def test_a_trl_dump_by_the_real_command(tmp_path):
    path = tmp_path / "trl.safetensors"
    save_file(dump_of("trl GRPOTrainer loss_type=dapo level=token", "dapo"), path)
    result = subprocess.run(
        [sys.executable, "-m", "experiments.check_loss", str(path)],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    assert "MATCH: 1 convention\n" in result.stdout
    assert "grpo clip 0.2/0.28  token-mean   as given    nothing" in result.stdout
    assert 'TRL: loss_type="dapo"' in result.stdout


def test_a_verl_dump_in_npz(tmp_path, verl_gspo, capsys):
    path = tmp_path / "verl.npz"
    np.savez(path, **as_numpy(verl_gspo | {"clip_frac": torch.tensor(17 / 34), "step": torch.tensor(3)}))
    assert main([str(path)]) == 0
    out = capsys.readouterr().out
    assert "6 responses, 34 of 54 tokens; float32 loss, float32 tensors" in out
    assert "gspo clip 0.0003/0.0004  seq-mean-token-mean" in out
    assert "verl: policy_loss.loss_mode=gspo, loss_agg_mode=seq-mean-token-mean" in out
    assert "entries not used: step" in out
    (line,) = (line for line in out.splitlines() if "clip_frac/token " in line)
    assert line.split()[1:4] == ["0.5", "verl", "actor/pg_clipfrac"]
    assert line.endswith("<- the dump's clip_frac")


def test_the_trap_of_gspo_under_token_mean(tmp_path, verl_gspo, capsys):
    entries = verl_gspo
    log_ratio = ((entries["logp"] - entries["old_logp"]) * entries["mask"]).double()
    ratio = (log_ratio.sum(1) / entries["mask"].sum(1)).exp()
    advantages = entries["advantages"].double()
    objective = torch.minimum(ratio * advantages, ratio.clamp(1 - 3e-4, 1 + 4e-4) * advantages)
    loss = -(objective[:, None] * entries["mask"]).sum() / entries["mask"].sum()
    np.savez(tmp_path / "trap.npz", **as_numpy(entries | {"loss": loss.float()}))
    assert main([str(tmp_path / "trap.npz")]) == 0
    out = capsys.readouterr().out
    assert 'TRL: loss_type="dapo", importance_sampling_level="sequence"' in out
    assert "note: GSPO (Eq. 5) averages over responses" in out


def test_settings_of_peers_are_said_to_lack_the_departure(tmp_path, verl_gspo, capsys):
    np.savez(tmp_path / "flipped.npz", **as_numpy(verl_gspo | {"loss": -verl_gspo["loss"]}))
    assert main([str(tmp_path / "flipped.npz")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any(line.endswith("as given    × -1") for line in lines)
    settings = [line for line in lines if line.startswith(("TRL", "verl"))]
    assert settings == [
        'TRL without the departure: loss_type="grpo", importance_sampling_level="sequence"',
        "verl without the departure: policy_loss.loss_mode=gspo, loss_agg_mode=seq-mean-token-mean",
    ]


def test_nothing_matches(tmp_path, verl_gspo, capsys):
    np.savez(tmp_path / "odd.npz", **as_numpy(verl_gspo | {"loss": verl_gspo["loss"] * 1.0009}))
    assert main([str(tmp_path / "odd.npz")]) == 1
    out = capsys.readouterr().out
    assert "NO MATCH" in out
    assert "the loss is 1.0009 times the first" in out
    assert re.search("9.0e-04  gspo clip 0.0003/0.0004 +seq-mean-token-mean", out)


def grpo_loss(entries, low, high):
    """(token-mean loss of the clipped objective, clip fraction by token), in float64."""
    mask, advantages = entries["mask"].double(), entries["advantages"].double()[:, None]
    ratio = ((entries["logp"] - entries["old_logp"]).double() * mask).exp()
    bounded = ratio.clamp(1 - low, 1 + high) * advantages
    clipped = (bounded < ratio * advantages) & (mask > 0)
    loss = -(torch.minimum(ratio * advantages, bounded) * mask).sum() / mask.sum()
    return loss, clipped.sum() / mask.sum()


def test_a_round_clip_range_of_ones_own_is_found(tmp_path, verl_gspo, capsys):
    loss, _ = grpo_loss(verl_gspo, 0.15, 0.15)
    np.savez(tmp_path / "round.npz", **as_numpy(verl_gspo | {"loss": loss}))
    assert main([str(tmp_path / "round.npz")]) == 0
    out = capsys.readouterr().out
    assert re.search(r"grpo clip 0.15/0.15 +token-mean +as given +grpo clip 0.15/0.15", out)
    assert "note: this clip range was guessed from the loss" in out


def test_a_clip_width_is_solved_for(tmp_path, verl_gspo, capsys):
    loss, clip_frac = grpo_loss(verl_gspo, 0.137, 0.137)
    np.savez(tmp_path / "odd.npz", **as_numpy(verl_gspo | {"loss": loss}))
    assert main([str(tmp_path / "odd.npz")]) == 1
    out = capsys.readouterr().out
    assert "a clip range of its own gives the loss, but one width always fits one number" in out
    assert re.search("grpo clip 0.137/0.137 +token-mean", out)
    np.savez(tmp_path / "odd.npz", **as_numpy(verl_gspo | {"loss": loss, "clip_frac": clip_frac}))
    assert main([str(tmp_path / "odd.npz")]) == 1
    out = capsys.readouterr().out
    assert "and the dump's clip_frac with it: another clip range is the likely difference" in out
    assert re.search("grpo clip 0.137/0.137 +token-mean", out)


def test_a_dump_that_cannot_tell(tmp_path, verl_gspo, capsys):
    entries = verl_gspo | {"old_logp": verl_gspo["logp"], "loss": -verl_gspo["advantages"].mean()}
    save_file(
        {name: tensor.contiguous().clone() for name, tensor in entries.items()}, tmp_path / "on.safetensors"
    )
    assert main([str(tmp_path / "on.safetensors"), "--top", "2"]) == 0
    out = capsys.readouterr().out
    assert "this dump cannot tell them apart:\n  - every ratio is 1" in out
    assert "more (--top)" in out


def test_rewards_beside_advantages(tmp_path, verl_gspo, capsys):
    rewards = torch.tensor([1.0, 0, 0.5, 2, 0, 0])
    grouped = rewards.reshape(2, 3)
    advantages = ((grouped - grouped.mean(1, keepdim=True)) / (grouped.std(1, keepdim=True) + 1e-4)).flatten()
    entries = verl_gspo | {"rewards": rewards, "advantages": advantages, "group_size": torch.tensor(3)}
    np.savez(tmp_path / "both.npz", **as_numpy(entries))
    main([str(tmp_path / "both.npz")])
    assert "the advantages are the rewards under: trl, G=3" in capsys.readouterr().out


def write_npz_claiming_a_huge_array(path, arrays):
    """An archive whose logp is a header for 10^6 x 10^6 numbers and nothing behind it."""
    np.savez(path, **{name: array for name, array in arrays.items() if name != "logp"})
    header = io.BytesIO()
    claim = {"descr": "<f8", "fortran_order": False, "shape": (10**6, 10**6)}
    np.lib.format.write_array_header_1_0(header, claim)
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("logp.npy", header.getvalue())


def test_other_entries_are_left_alone_whatever_they_hold(tmp_path, verl_gspo, capsys):
    others = {
        "run": np.array("name"),
        "when": np.array("2025-07-25", "M8[D]"),
        "pair": np.zeros(2, dtype=[("a", "f4"), ("b", "i4")]),
        "pickled": np.array([{}], dtype=object),
    }
    np.savez(tmp_path / "more.npz", **as_numpy(verl_gspo), **others)
    assert main([str(tmp_path / "more.npz")]) == 0
    assert "entries not used: pair, pickled, run, when" in capsys.readouterr().out


def test_big_endian_arrays_and_unsigned_masks(tmp_path, verl_gspo, capsys):
    swapped = {
        name: array.astype(array.dtype.newbyteorder(">")) for name, array in as_numpy(verl_gspo).items()
    }
    np.savez(tmp_path / "big.npz", **(swapped | {"mask": swapped["mask"].astype(">u2")}))
    assert main([str(tmp_path / "big.npz")]) == 0
    assert "gspo clip 0.0003/0.0004  seq-mean-token-mean" in capsys.readouterr().out


def test_log_probabilities_above_zero_are_doubted(tmp_path, verl_gspo, capsys):
    moved = {name: verl_gspo[name] + 9 for name in ("logp", "old_logp")}  # ratios, and so the loss, stay
    np.savez(tmp_path / "above.npz", **as_numpy(verl_gspo | moved))
    assert main([str(tmp_path / "above.npz")]) == 0
    warnings = [line for line in capsys.readouterr().out.splitlines() if line.startswith("WARNING")]
    assert [line.split()[1] for line in warnings] == ["logp", "old_logp"]
    assert "is above 0 at 34 response tokens" in warnings[0]


@pytest.mark.parametrize(
    ("name", "write", "message"),
    [
        ("gone.npz", lambda path, e: None, "gone.npz: no such file"),
        (
            "dump.pt",
            lambda path, e: path.write_bytes(b"x"),
            "expected .safetensors or .npz (a pickle is never",
        ),
        ("bad.npz", lambda path, e: path.write_bytes(b"x"), "bad.npz: "),
        ("bad.safetensors", lambda path, e: path.write_bytes(b"x" * 99), "not a readable .safetensors file"),
        (
            "object.npz",
            lambda path, e: np.savez(path, **(as_numpy(e) | {"loss": np.array([{}], dtype=object)})),
            "object.npz: loss cannot be read: Object arrays cannot be loaded",
        ),
        (
            "text.npz",
            lambda path, e: np.savez(path, **(as_numpy(e) | {"mask": np.full((6, 9), "1")})),
            "text.npz: mask must be a numeric array, got <U1",
        ),
        (
            "dates.npz",
            lambda path, e: np.savez(path, **(as_numpy(e) | {"loss": np.array("2025-07-25", "M8[D]")})),
            "dates.npz: loss must be a numeric array, got datetime64[D]",
        ),
        (
            "long.npz",
            lambda path, e: np.savez(path, **(as_numpy(e) | {"logp": e["logp"].numpy().astype("g")})),
            "long.npz: logp: no tensor can hold float128",
        ),
        (
            "huge.npz",
            lambda path, e: write_npz_claiming_a_huge_array(path, as_numpy(e)),
            "huge.npz: logp claims more numbers than memory holds",
        ),
        (
            "group.npz",
            lambda path, e: np.savez(path, **as_numpy(e), group_size=np.array(2.4)),
            "group_size must divide the 6 responses, got 2.4",
        ),
        (
            "short.npz",
            lambda path, e: np.savez(path, **{k: v for k, v in as_numpy(e).items() if k != "mask"}),
            "missing mask; got advantages, logp, loss, old_logp",
        ),
        (
            "nan.npz",
            lambda path, e: np.savez(path, **(as_numpy(e) | {"logp": np.full((6, 9), np.nan, np.float32)})),
            "logp is NaN or infinite at 34 response tokens",
        ),
    ],
)
def test_bad_input_is_one_line_and_exit_2(tmp_path, verl_gspo, name, write, message, capsys):
    write(tmp_path / name, verl_gspo)
    assert main([str(tmp_path / name)]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert message in captured.err
    assert captured.err.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--clip-low", "0.2"], "--clip-low and --clip-high are given together"),
        (["--kl-coef", "-1"], "--kl-coef must be greater than 0, got -1"),
        (["--departures", "5"], "invalid choice"),
        (["--kl-coef", "0.1"], "--kl-coef needs the entry ref_logp in the dump"),
        (["--entropy-coef", "0.1"], "--entropy-coef needs the entry entropy in the dump"),
        (["--group-size", "4"], "--group-size must divide the 6 responses, got 4"),
    ],
)
def test_bad_options_exit_2(tmp_path, verl_gspo, arguments, message, capsys):
    np.savez(tmp_path / "dump.npz", **as_numpy(verl_gspo))
    try:
        code = main([str(tmp_path / "dump.npz"), *arguments])
    except SystemExit as stop:
        code = stop.code
    assert code == 2
    assert message in capsys.readouterr().err
