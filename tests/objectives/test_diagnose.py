"""Losses planted by hand and stored ones of TRL and verl are named; what a dump cannot tell apart is said."""

import json
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from moe_rl.objectives.diagnose import (
    DumpError,
    Settings,
    diagnose,
    make_dump,
    peer_settings,
    reproduce_advantages,
    solve_clip_width,
    why_indistinguishable,
)
from moe_rl.objectives.diagnose.explain import notes, peer_counts
from moe_rl.objectives.diagnose.inputs import masks

GOLDEN = Path(__file__).parents[1] / "golden"
HEADER = json.loads((GOLDEN / "peer_values.json").read_text())
TENSORS = load_file(GOLDEN / "peer_values.safetensors")
ROWS, WIDTH, GROUP = 8, 16, 4
STM, TM, SUM = "seq-mean-token-mean", "token-mean", "seq-mean-token-sum"


@pytest.fixture(scope="module")
def entries():
    """Two groups of four responses, mixed lengths, ratios of 0.2 to 5, numbers on both sides of the mask."""
    generator = torch.Generator().manual_seed(3)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    old = -0.1 - 2 * torch.rand(ROWS, WIDTH, generator=generator, dtype=torch.float64)
    lengths = torch.tensor([11, 3, 7, 1, 9, 5, 12, 2])
    position = torch.arange(WIDTH)[None, :]
    return {
        "old_logp": old,
        "logp": old + 0.7 * normal(ROWS, WIDTH),
        "ref_logp": old + 0.3 * normal(ROWS, WIDTH),
        "sampler_logp": old + 0.5 * normal(ROWS, WIDTH),
        "entropy": normal(ROWS, WIDTH).abs(),
        "mask": ((position >= 2) & (position < 2 + lengths[:, None])).double(),
        "rewards": torch.tensor([1.0, 0.0, 0.25, 0.5, 2.0, 0.0, 0.0, 1.0], dtype=torch.float64),
        "advantages": torch.tensor([1.3, -0.7, 0.2, -1.1, 1.9, -0.4, -0.9, 0.6], dtype=torch.float64),
    }


def pick(entries, *names):
    return {name: entries[name] for name in ("logp", "old_logp", "mask", *names)}


# The formulas below are written out again, so that the search is not checked against itself.
def ratio(entries):
    return (entries["logp"] - entries["old_logp"]).exp()


def geometric(entries, mask=None):
    mask = entries["mask"] if mask is None else mask
    log_ratio = (entries["logp"] - entries["old_logp"]) * mask
    return (log_ratio.sum(1) / mask.sum(1)).exp()[:, None].expand(ROWS, WIDTH)


def clipped(r, a, low, high):
    return torch.minimum(r * a, r.clamp(1 - low, 1 + high) * a)


def per_token(entries, low=0.2, high=0.2, a=None):
    a = entries["advantages"] if a is None else a
    return clipped(ratio(entries), a[:, None], low, high)


def stm(values, mask):
    return -((values * mask).sum(1) / mask.sum(1)).mean()


def tm(values, mask):
    return -(values * mask).sum() / mask.sum()


def total(values, mask):
    return -(values * mask).sum()


def without_last(mask):
    return mask * torch.cat([mask[:, 1:], torch.zeros(ROWS, 1)], dim=1)


def dual(entries):
    a = entries["advantages"][:, None]
    values = per_token(entries, 0.2, 0.2)
    return torch.where(a < 0, torch.maximum(values, 3 * a), values)


def micro_batches(entries, size):
    values, mask = per_token(entries), entries["mask"]
    parts = zip(values.split(size), mask.split(size), strict=True)
    return torch.stack([tm(v, m) for v, m in parts]).mean()


PLANTED = {
    "GRPO": (lambda e: stm(per_token(e), e["mask"]), "grpo clip 0.2/0.2", STM, ()),
    "DAPO": (lambda e: tm(per_token(e, 0.2, 0.28), e["mask"]), "grpo clip 0.2/0.28", TM, ()),
    "dual clip": (lambda e: stm(dual(e), e["mask"]), "grpo clip 0.2/0.2 dual 3", STM, ()),
    "Dr.GRPO over the padded width": (
        lambda e: total(per_token(e), e["mask"]) / (ROWS * WIDTH),
        "grpo clip 0.2/0.2",
        "seq-mean-token-sum-norm /16",
        (),
    ),
    "Dr.GRPO over the longest response": (
        lambda e: total(per_token(e), e["mask"]) / (ROWS * 12),
        "grpo clip 0.2/0.2",
        "seq-mean-token-sum-norm /12",
        ("seq-mean-token-sum-norm /12",),
    ),
    "Dr.GRPO over 1024": (
        lambda e: total(per_token(e), e["mask"]) / (ROWS * 1024),
        "grpo clip 0.2/0.2",
        "seq-mean-token-sum-norm /1024",
        ("seq-mean-token-sum-norm /1024",),
    ),
    "Dr.GRPO over 40, no round number": (
        lambda e: total(per_token(e), e["mask"]) / (ROWS * 40),
        "grpo clip 0.2/0.2",
        "seq-mean-token-sum-norm /40",
        ("seq-mean-token-sum-norm /40",),
    ),
    "a sum over tokens": (
        lambda e: total(per_token(e), e["mask"]),
        "grpo clip 0.2/0.2",
        "token-sum",
        ("token-sum",),
    ),
    "token means of micro-batches": (
        lambda e: micro_batches(e, 4),
        "grpo clip 0.2/0.2",
        "token-mean of every 4 rows",
        ("token-mean of every 4 rows",),
    ),
    "flipped sign": (lambda e: -stm(per_token(e), e["mask"]), "grpo clip 0.2/0.2", STM, ("× -1",)),
    "accumulation undivided": (
        lambda e: 16 * stm(per_token(e), e["mask"]),
        "grpo clip 0.2/0.2",
        STM,
        ("× 16",),
    ),
    "world size divided twice": (
        lambda e: tm(per_token(e), e["mask"]) / 4,
        "grpo clip 0.2/0.2",
        TM,
        ("× 1/4",),
    ),
    "GSPO": (
        lambda e: stm(clipped(geometric(e), e["advantages"][:, None], 3e-4, 4e-4), e["mask"]),
        "gspo clip 0.0003/0.0004",
        STM,
        (),
    ),
    "GSPO by token-mean": (
        lambda e: tm(clipped(geometric(e), e["advantages"][:, None], 3e-4, 4e-4), e["mask"]),
        "gspo clip 0.0003/0.0004",
        TM,
        (),
    ),
    "GSPO without length normalisation": (
        lambda e: stm(
            clipped(geometric(e) ** e["mask"].sum(1)[:, None], e["advantages"][:, None], 0.2, 0.2), e["mask"]
        ),
        "gspo clip 0.2/0.2",
        STM,
        ("product ratio",),
    ),
    "GSPO with arithmetic means": (
        lambda e: stm(
            clipped(
                ((ratio(e) * e["mask"]).sum(1) / e["mask"].sum(1))[:, None],
                e["advantages"][:, None],
                0.2,
                0.28,
            ),
            e["mask"],
        ),
        "gspo clip 0.2/0.28",
        STM,
        ("mean of ratios",),
    ),
    "CISPO capped at 1.2": (
        lambda e: tm(ratio(e).clamp(max=1.2) * e["advantages"][:, None] * e["logp"], e["mask"]),
        "cispo ratio 0 to 1.2",
        TM,
        (),
    ),
    "CISPO under TRL's unset epsilon_high": (
        lambda e: tm(ratio(e).clamp(max=0.2) * e["advantages"][:, None] * e["logp"], e["mask"]),
        "cispo ratio 0 to 0.2",
        TM,
        (),
    ),
    "REINFORCE": (
        lambda e: tm(e["advantages"][:, None] * e["logp"], e["mask"]),
        "reinforce",
        TM,
        (),
    ),
    "EOS without loss": (
        lambda e: tm(per_token(e), without_last(e["mask"])),
        "grpo clip 0.2/0.2",
        TM,
        ("last token dropped",),
    ),
    "mask off by one": (
        lambda e: tm(per_token(e), e["mask"].roll(1, 1)),
        "grpo clip 0.2/0.2",
        TM,
        ("mask shifted right",),
    ),
    "mask off by one, the other way": (
        lambda e: stm(per_token(e), e["mask"].roll(-1, 1)),
        "grpo clip 0.2/0.2",
        STM,
        ("mask shifted left",),
    ),
    "padding counted": (
        lambda e: stm(per_token(e), torch.ones(ROWS, WIDTH)),
        "grpo clip 0.2/0.2",
        STM,
        ("mask ignored",),
    ),
    "old over new": (
        lambda e: tm(clipped(1 / ratio(e), e["advantages"][:, None], 0.2, 0.2), e["mask"]),
        "grpo clip 0.2/0.2",
        TM,
        ("old/new",),
    ),
    "A negated": (
        lambda e: tm(per_token(e, a=-e["advantages"]), e["mask"]),
        "grpo clip 0.2/0.2",
        TM,
        ("negated",),
    ),
}


@pytest.mark.parametrize("case", PLANTED.values(), ids=PLANTED.keys())
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_planted_losses_are_named(entries, case, dtype):
    loss, policy, aggregation, departures = case
    dump = {name: value.to(dtype) for name, value in pick(entries, "advantages").items()}
    dump["loss"] = loss(entries).to(dtype)
    first = diagnose(make_dump(dump)).matches[0]
    assert (first.unit.policy.name, first.aggregation.name, first.departures) == (
        policy,
        aggregation,
        departures,
    )
    assert first.error < 1e-5


@pytest.mark.parametrize(
    ("name", "make"),
    [
        ("paper, G=4", lambda r: (r - r.mean(1, keepdim=True)) / r.std(1, keepdim=True)),
        (
            "population, G=4",
            lambda r: (r - r.mean(1, keepdim=True)) / r.std(1, keepdim=True, correction=0),
        ),
        ("trl, G=4", lambda r: (r - r.mean(1, keepdim=True)) / (r.std(1, keepdim=True) + 1e-4)),
        ("trl batch std, G=4", lambda r: (r - r.mean(1, keepdim=True)) / (r.std() + 1e-4)),
        ("mean, G=4", lambda r: r - r.mean(1, keepdim=True)),
        ("leave-one-out, G=4", lambda r: r - (r.sum(1, keepdim=True) - r) / 3),
        (
            "ddof 0, ε 0.0001, G=4",
            lambda r: (r - r.mean(1, keepdim=True)) / (r.std(1, keepdim=True, correction=0) + 1e-4),
        ),
        ("raw rewards", lambda r: r),
        ("mean over the batch", lambda r: r - r.mean()),
    ],
)
@pytest.mark.parametrize("known", [True, False])
def test_advantage_conventions(entries, name, make, known):
    """From rewards alone, whether or not the group size is given, and against advantages in the dump."""
    values = make(entries["rewards"].reshape(-1, GROUP)).flatten()
    dump = pick(entries, "rewards") | {"loss": tm(per_token(entries, a=values), entries["mask"])}
    settings = Settings(group_size=GROUP if known else None)
    names = {match.advantages.name for match in diagnose(make_dump(dump), settings).matches}
    if name == "mean over the batch" and not known:
        name = "mean, G=8"  # one prompt of eight responses is the same thing
    assert name in names
    # These advantages nearly cancel, so verl's 1e-6 is below the tolerance; in the vector it is not.
    assert names <= {name, "verl, G=4"}
    both = make_dump(dump | {"advantages": values})
    found = reproduce_advantages(both, settings.group_size, 1e-9)
    assert [choice.name for choice, _ in found] == [name]


def test_regularisers_and_sampler(entries):
    e, mask = entries, entries["mask"]
    k = e["logp"] - e["ref_logp"]
    k3 = (-k).exp() + k - 1
    weight = (e["old_logp"] - e["sampler_logp"]).exp()

    def first(loss, *names, settings=None):
        dump = make_dump(pick(e, "advantages", *names) | {"loss": loss})
        return diagnose(dump, settings).matches[0]

    with_kl = stm(per_token(e) - 0.04 * k3, mask)
    assert first(with_kl, "ref_logp").departures == ("+ 0.04 KL k3",)
    given = first(with_kl, "ref_logp", settings=Settings(kl_coef=0.04))
    assert (given.term.name, given.departures) == ("+ 0.04 KL k3", ())
    odd = stm(per_token(e) - 0.037 * k, mask)
    assert first(odd, "ref_logp", settings=Settings(kl_coef=0.037)).term.name == "+ 0.037 KL k1"
    trl = first(tm(per_token(e) - 0.01 * ratio(e) * k3, mask), "ref_logp")
    assert trl.departures == ("+ 0.01 KL ratio*k3",)
    assert "use_bias_correction_kl" in " ".join(notes(trl))
    bonus = first(stm(per_token(e) + 0.001 * e["entropy"], mask), "entropy")
    assert bonus.departures == ("- 0.001 entropy",)
    bonus = first(stm(per_token(e), mask) + 0.01 * tm(e["entropy"], mask), "entropy")
    assert bonus.departures == ("- 0.01 token-mean entropy",)
    truncated = first(tm(per_token(e) * weight.clamp(max=2), mask), "sampler_logp")
    assert truncated.departures == ("token_tis",)
    bypassed = clipped((e["logp"] - e["sampler_logp"]).exp(), e["advantages"][:, None], 0.2, 0.2)
    assert first(tm(bypassed, mask), "sampler_logp").departures == ("ratio to sampler",)


def test_a_clip_range_of_ones_own(entries):
    dump = make_dump(
        pick(entries, "advantages") | {"loss": tm(per_token(entries, 0.13, 0.41), entries["mask"])}
    )
    assert not diagnose(dump).matches
    (match,) = diagnose(dump, Settings(clip=(0.13, 0.41))).matches
    assert match.unit.policy.name == "grpo clip 0.13/0.41"
    assert match.departures == ()


def golden_entries(case, dtype):
    scene = f"{case['scene']}/"
    names = {"logp": "logp", "old_logp": "old_logp", "mask": "mask"}
    names["advantages"] = case.get("advantages", "advantages")
    names |= {"ref_logp": "ref_logp"} if case["extra"] else {}
    dump = {ours: TENSORS[scene + theirs].to(dtype) for ours, theirs in names.items()}
    return dump | {"loss": TENSORS[f"{case['key']}/loss"].to(dtype)}


def expected_of(case):
    """(family, aggregation) that a stored peer value was checked against."""
    default = TM if case["objective"] in ("dapo", "cispo", "dppo_tv", "dppo_kl") else STM
    aggregation = case["options"].get("aggregation", default)
    if case["objective"] == "dr_grpo":
        aggregation = "seq-mean-token-sum-norm /12"
    family = {"dapo": "grpo", "dr_grpo": "grpo"}.get(case["objective"], case["objective"])
    return family, aggregation


# SAPO's stored temperature is none of the defaults; weights are no entry of a dump.
PEERS = [
    case
    for case in HEADER["cases"]
    if case["scene"] in ("wild", "empty_row")
    and case["options"].get("tau_neg") is None
    and ["weights_BT", "weights"] not in case["extra"]
    and not (case["scene"] == "empty_row" and "GMPOTrainer" in case["peer"])  # its loss there is no mean
]


@pytest.mark.parametrize("case", PEERS, ids=lambda case: f"{case['scene']}-{case['peer']}")
def test_stored_losses_of_trl_and_verl(case):
    dump = make_dump(golden_entries(case, torch.float64))
    first, *others = diagnose(dump, Settings(kl_coef=0.05 if case["extra"] else None)).matches
    family, aggregation = expected_of(case)
    found = {(match.unit.policy.family, match.aggregation.name.split(",")[0]) for match in (first, *others)}
    if family == "gspo_token" and case.get("advantages") is None:
        family = "gspo"  # equal in value
    assert (family, aggregation) in found
    if case["scene"] != "empty_row":
        assert {aggregation for _, aggregation in found} == {aggregation}
    elif case["peer"].startswith("verl") and aggregation in (STM, SUM) and family != "gmpo":
        assert first.aggregation.name.endswith("empty left out")
    if "loss_type" in peer_settings(first).get("TRL", "") and case["peer"].startswith("trl"):
        loss_type = case["peer"].split("loss_type=")[1].split()[0]
        assert f'"{loss_type}"' in peer_settings(first)["TRL"]
    for name, value in case["counts"].items():
        assert first.counts[name] == pytest.approx(value, abs=2e-7)


def test_the_parametrised_cases_have_both_peers_and_most_objectives():
    assert {case["peer"].split()[0] for case in PEERS} == {"trl", "verl"}
    assert len({case["objective"] for case in PEERS}) >= 9


@pytest.mark.parametrize(
    ("peer", "family", "aggregation"),
    [
        ("trl GRPOTrainer loss_type=luspo level=sequence", "gspo", SUM),
        ("verl vanilla token-mean", "grpo", TM),
        ("verl gspo seq-mean-token-mean", "gspo", STM),
    ],
)
def test_bfloat16_dumps(peer, family, aggregation):
    """Rounded to 8 bits: the truth is among the matches, and the report says how far chance would go."""
    case = next(case for case in HEADER["cases"] if case["peer"] == peer and case["scene"] == "far")
    diagnosis = diagnose(make_dump(golden_entries(case, torch.bfloat16)))
    assert diagnosis.tolerance == 2**-8
    assert (family, aggregation) in {
        (match.unit.policy.family, match.aggregation.name) for match in diagnosis.matches
    }
    assert diagnosis.chance > 0.05


def test_a_float32_loss_of_bfloat16_log_probabilities_is_held_to_float32(entries):
    """numpy has no bfloat16, so the tensors come upcast; the loss was computed from just these numbers."""
    rounded = {k: v.bfloat16().float() for k, v in pick(entries, "advantages").items()}
    loss = tm(per_token({k: v.double() for k, v in rounded.items()}), rounded["mask"]).float()
    dump = make_dump(rounded | {"loss": loss})
    assert (dump.loss_dtype, dump.value_dtype) == (torch.float32, torch.bfloat16)
    diagnosis = diagnose(dump)
    assert diagnosis.tolerance == 2e-6
    assert [match.unit.policy.name for match in diagnosis.matches] == ["grpo clip 0.2/0.2"]


def test_a_python_float_of_a_float32_loss(entries):
    """loss.item() is a float64 that holds a float32: it must not be held to float64."""
    loss = torch.tensor(tm(per_token(entries), entries["mask"]).float().item(), dtype=torch.float64)
    diagnosis = diagnose(make_dump(pick(entries, "advantages") | {"loss": loss}))
    assert diagnosis.tolerance == 2e-6
    assert diagnosis.matches[0].unit.policy.name == "grpo clip 0.2/0.2"


def reasons_of(dump):
    matches = diagnose(dump).matches
    assert len(matches) > 1
    return " ".join(why_indistinguishable(matches, dump)), matches


def test_on_policy_dump_cannot_tell_objectives_apart(entries):
    dump = pick(entries, "advantages") | {"old_logp": entries["logp"]}
    dump["loss"] = -entries["advantages"].mean()
    reasons, matches = reasons_of(make_dump(dump))
    assert "every ratio is 1" in reasons
    families = {match.unit.policy.family for match in matches}
    assert {"grpo", "gspo"} <= families
    assert not {"cispo", "reinforce"} & families
    assert {match.aggregation.name for match in matches} == {STM}


def test_zero_loss_says_why(entries):
    dump = pick(entries, "rewards") | {"old_logp": entries["logp"]}
    dump |= {"loss": torch.tensor(1e-9, dtype=torch.float32), "group_size": torch.tensor(GROUP)}
    reasons, _ = reasons_of(make_dump(dump))
    assert "the loss is 0" in reasons


def test_equal_lengths_cannot_tell_aggregations_apart(entries):
    mask = torch.zeros(ROWS, WIDTH).double()
    mask[:, 3:8] = 1
    dump = make_dump(pick(entries, "advantages") | {"mask": mask, "loss": tm(per_token(entries), mask)})
    reasons, matches = reasons_of(dump)
    assert "all responses have 5 tokens" in reasons
    assert {match.aggregation.name for match in matches} >= {STM, TM}


def test_nothing_between_clip_ranges(entries):
    dump = pick(entries, "advantages")
    dump["old_logp"] = dump["logp"] - 0.05 * (dump["logp"] - dump["old_logp"])
    moved = entries | dump
    dump["loss"] = tm(per_token(moved, 0.2, 0.28), entries["mask"])
    reasons, matches = reasons_of(make_dump(dump))
    assert "no token's ratio lies where these clip ranges treat it differently" in reasons
    assert {match.unit.policy.family for match in matches} == {"grpo"}


def test_clip_frac_decides_between_equal_losses(entries):
    """Both ranges fit a coarse loss; the one whose clip fraction was logged comes first."""
    dump = pick(entries, "advantages")
    dump["advantages"] = dump["advantages"].abs()
    dump["logp"] = entries["old_logp"] + math.log(1.275)  # between the bounds 1.27 and 1.28
    dump["loss"] = tm(per_token(entries | dump, 0.2, 0.28, a=dump["advantages"]), entries["mask"])
    coarse = Settings(tolerance=1e-2)
    assert diagnose(make_dump(dump), coarse).matches[0].counts["clip_frac/token"] == 0
    first = diagnose(make_dump(dump | {"clip_frac": torch.tensor(1.0)}), coarse).matches[0]
    assert first.unit.policy.name == "grpo clip 0.2/0.27"
    assert {name: value for name, value, _ in peer_counts(first)} == {
        "clip_frac/token": 1.0,
        "clip_frac/sequence": 1.0,
        "clip_frac/token_signblind": 1.0,
        "kl/k1": pytest.approx(-math.log(1.275)),
    }


def test_no_match_names_the_nearest(entries):
    loss = 1.0137 * tm(per_token(entries), entries["mask"])
    diagnosis = diagnose(make_dump(pick(entries, "advantages") | {"loss": loss}))
    assert not diagnosis.matches
    assert min(match.error for match in diagnosis.nearest) <= 0.0137 / 1.0137 + 1e-9
    assert [bool(match.departures) for match in diagnosis.nearest] == [False] * 3 + [True] * 3


def test_chance_is_not_a_finding(entries):
    """An arbitrary loss in a coarse dtype lies near some departure; that is counted, not claimed."""
    dump = {name: value.bfloat16() for name, value in pick(entries, "advantages").items()}
    diagnosis = diagnose(make_dump(dump | {"loss": torch.tensor(0.5234).bfloat16()}))
    assert not any(match.departures for match in diagnosis.matches)
    assert diagnosis.matches or diagnosis.coincidences > 0


def test_two_departures_when_asked(entries):
    loss = -8 * tm(per_token(entries), without_last(entries["mask"]))
    dump = make_dump(pick(entries, "advantages") | {"loss": loss})
    assert not diagnose(dump).matches
    loss = -tm(per_token(entries), without_last(entries["mask"]))
    dump = make_dump(pick(entries, "advantages") | {"loss": loss})
    first = diagnose(dump, Settings(departures=2)).matches[0]
    assert first.departures == ("last token dropped", "× -1")


def test_masks_by_hand(entries):
    """A hole (a tool's text) stays a hole; the ends move by one token."""
    mask = torch.tensor([[0.0, 1, 0, 1, 1, 0]])
    zeros = torch.zeros(1, 6)
    entry = {"logp": zeros, "old_logp": zeros, "mask": mask, "advantages": torch.ones(1)}
    found = {
        choice.name: choice.values.int().tolist()[0]
        for choice in masks(make_dump(entry | {"loss": zeros[0, 0]}))
    }
    assert found == {
        "": [0, 1, 0, 1, 1, 0],
        "last token dropped": [0, 1, 0, 1, 0, 0],
        "one more token": [0, 1, 0, 1, 1, 1],
        "first token dropped": [0, 0, 0, 1, 1, 0],
        "one token before": [1, 1, 0, 1, 1, 0],
        "mask shifted right": [0, 0, 1, 0, 1, 1],
        "mask shifted left": [1, 0, 1, 1, 0, 0],
        "mask ignored": [1, 1, 1, 1, 1, 1],
    }


def test_names_of_trl_and_verl(entries):
    """The same dump under the peers' own names; advantages broadcast over tokens as verl keeps them."""
    loss = tm(per_token(entries), entries["mask"])
    trl = {
        "per_token_logps": entries["logp"],
        "old_per_token_logps": entries["old_logp"],
        "completion_mask": entries["mask"],
        "advantages": entries["advantages"][:, None],
        "loss": loss,
    }
    verl = {
        "log_prob": entries["logp"],
        "old_log_probs": entries["old_logp"],
        "response_mask": entries["mask"].bool(),
        "advantages": entries["advantages"][:, None] * entries["mask"],
        "pg_loss": loss,
        "temperature": torch.ones(1),
    }
    ours = make_dump(pick(entries, "advantages") | {"loss": loss})
    for theirs in map(make_dump, (trl, verl)):
        assert torch.equal(theirs.advantages, ours.advantages)
        assert torch.equal(theirs.mask, ours.mask)
        assert theirs.loss == ours.loss
    assert make_dump(verl).ignored == ("temperature",)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"logp": None}, "missing logp; got advantages, loss, mask, old_logp"),
        ({"old_logp": None}, "missing old_logp.*save it twice"),
        ({"advantages": None}, "missing advantages or rewards"),
        ({"logp": torch.zeros(4)}, r"logp must be \[B, T\]"),
        ({"mask": torch.zeros(2, 2)}, r"mask must have logp's shape \(8, 16\), got \(2, 2\)"),
        ({"mask": torch.full((8, 16), 2.0)}, "only 0 and 1"),
        ({"mask": torch.zeros(8, 16)}, "no response token"),
        ({"old_logp": torch.zeros(8, 3)}, "old_logp must have logp's shape"),
        ({"old_logp": torch.zeros(8, 16).long()}, "old_logp must be a floating tensor"),
        ({"logp": torch.full((8, 16), math.nan)}, "logp is NaN or infinite at 50 response tokens"),
        ({"advantages": torch.full((8,), math.inf)}, "advantages is NaN or infinite"),
        ({"advantages": torch.zeros(3)}, "advantages must be"),
        ({"rewards": torch.zeros(3)}, "rewards must be"),
        ({"rewards": torch.full((8,), math.nan)}, "rewards must be finite"),
        ({"loss": torch.zeros(2)}, "loss must be one number"),
        ({"loss": torch.tensor(math.nan)}, "loss must be finite"),
        ({"group_size": torch.tensor(3)}, "group_size must divide the 8 responses, got 3"),
        ({"router_shift": torch.full((8, 16), 1.5)}, "router_shift is gamma"),
        ({"log_probs": torch.zeros(8, 16)}, "logp is there twice"),
    ],
)
def test_bad_dumps(entries, change, message):
    dump = pick(entries, "advantages") | {"loss": torch.tensor(0.5)} | change
    with pytest.raises(DumpError, match=message):
        make_dump({name: value for name, value in dump.items() if value is not None})


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("garbage", [math.nan, math.inf, 1e4])
def test_padding_may_hold_anything(entries, garbage):
    dump = pick(entries, "advantages") | {"loss": -tm(per_token(entries), entries["mask"])}
    dump["logp"] = torch.where(entries["mask"] == 1, entries["logp"], torch.tensor(garbage).double())
    first = diagnose(make_dump(dump)).matches[0]
    assert (first.unit.policy.name, first.departures) == ("grpo clip 0.2/0.2", ("× -1",))


def test_all_advantages_zero(entries):
    dump = make_dump(pick(entries) | {"advantages": torch.zeros(ROWS), "loss": torch.tensor(0.0)})
    reasons, _ = reasons_of(dump)
    assert "the loss is 0" in reasons


def test_dpo_is_recognised(entries):
    """-mean over pairs of log sigmoid(beta (h_w - h_l)), the better of two neighbours by advantage."""
    reward = ((entries["logp"] - entries["ref_logp"]) * entries["mask"]).sum(1).reshape(4, 2)
    better = entries["advantages"].reshape(4, 2).diff(dim=1)[:, 0] < 0
    margin = torch.where(better, 1, -1) * (reward[:, 0] - reward[:, 1])
    for beta, departures in ((0.1, ()), (0.3, ("dpo beta 0.3",))):
        loss = torch.nn.functional.softplus(-beta * margin).mean()
        dump = make_dump(pick(entries, "advantages", "ref_logp") | {"loss": loss})
        first = diagnose(dump).matches[0]
        assert (first.unit.policy.name, first.departures) == (f"dpo beta {beta:g}", departures)
    assert peer_settings(first) == {"TRL": 'DPOTrainer, loss_type="sigmoid", beta=0.3'}


@pytest.mark.parametrize("known", [True, False])
def test_contrastive_is_recognised(entries, known):
    mask = entries["mask"]
    score = (((entries["logp"] - entries["old_logp"]) * mask).sum(1) / mask.sum(1)).reshape(2, GROUP)
    centred = score - score.mean(1, keepdim=True)
    loss = -torch.sigmoid(centred * entries["advantages"].reshape(2, GROUP)).sum(1).mean()
    dump = pick(entries, "advantages") | {"loss": loss}
    dump |= {"group_size": torch.tensor(GROUP)} if known else {}
    first = diagnose(make_dump(dump)).matches[0]
    assert (first.unit.policy.name, first.departures) == ("contrastive beta 1 G=4", ())
    assert first.aggregation.name == STM


def test_an_odd_number_of_rows_has_no_pairs(entries):
    dump = {name: value[:7] for name, value in pick(entries, "advantages", "ref_logp").items()}
    assert not diagnose(make_dump(dump | {"loss": torch.tensor(0.123456)})).matches


def test_the_clip_width_that_is_solved_for(entries):
    """The loss falls as the interval widens, so that one width fits; clip_frac picks the convention."""
    loss = tm(per_token(entries, 0.137, 0.137), entries["mask"])
    dump = pick(entries, "advantages") | {"loss": loss}
    found = solve_clip_width(make_dump(dump), Settings())
    (by_token,) = (m for m in found if (m.unit.policy.family, m.aggregation.name) == ("grpo", TM))
    assert by_token.unit.policy.name == "grpo clip 0.137/0.137"
    assert by_token.loss == pytest.approx(float(loss), abs=1e-12)
