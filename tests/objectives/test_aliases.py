import re
from pathlib import Path

import pytest
import torch

from moe_rl.objectives import OBJECTIVES, get_mismatch_correction, get_objective, peer_metrics
from moe_rl.objectives.aliases import _ALIASES, _CLIP_FRACTIONS

DOCS = (Path(__file__).resolve().parents[2] / "docs" / "objectives.md").read_text(encoding="utf-8")


def scene():
    """Two responses of 3 and 1 tokens with A = 1, -1; ratios 1.5, 1.1, 1.0 and 0.5."""
    ratio_BT = torch.tensor([[1.5, 1.1, 1.0], [0.5, 1.0, 1.0]])
    mask_BT = torch.tensor([[1.0, 1, 1], [1, 0, 0]])
    return ratio_BT.log(), torch.zeros(2, 3), torch.tensor([1.0, -1.0]), mask_BT


def test_the_clip_fraction_of_each_peer_by_hand():
    _, metrics = get_objective("grpo")(*scene())
    assert peer_metrics(metrics, "trl", "grpo")["clip_ratio/region_mean"] == pytest.approx(2 / 4)
    assert peer_metrics(metrics, "verl", "grpo")["actor/pg_clipfrac"] == pytest.approx(2 / 4)
    _, metrics = get_objective("gspo")(*scene())
    # both responses leave the range on their advantage's side: all sequences, all tokens
    assert peer_metrics(metrics, "trl", "gspo")["clip_ratio/region_mean"] == 1.0
    _, metrics = get_objective("gspo", clip_high=1.0)(*scene())  # now the first one stays inside
    assert peer_metrics(metrics, "trl", "gspo")["clip_ratio/region_mean"] == 1 / 2
    assert peer_metrics(metrics, "verl", "gspo")["actor/pg_clipfrac"] == 1 / 4


def test_verls_ppo_kl_is_k1():
    logp_BT, old_BT, advantages, mask_BT = scene()
    _, metrics = get_objective("grpo")(logp_BT, old_BT, advantages, mask_BT)
    expected = (old_BT - logp_BT)[mask_BT > 0].mean().item()
    assert peer_metrics(metrics, "verl", "grpo") == {
        "actor/ppo_kl": pytest.approx(expected),
        "actor/pg_clipfrac": 0.5,
    }


def test_every_alias_is_in_the_documentation():
    table = DOCS[DOCS.index("## Metrics") :]
    spelt = set()
    for cell in re.findall(r"`([^`]+)`", table):
        stem, _, choices = cell.partition("{")
        spelt |= {stem + choice for choice in choices.rstrip("}").split(",")}
    for peer in _ALIASES:
        theirs = {"actor/pg_clipfrac_lower"} | {
            *_ALIASES[peer].values(),
            *(name for _, name in _CLIP_FRACTIONS[peer].values()),
        }
        assert theirs <= spelt, theirs - spelt
        assert _CLIP_FRACTIONS[peer].keys() <= OBJECTIVES.keys()


def test_another_peer_is_refused():
    with pytest.raises(ValueError, match="unknown peer 'slime'; known: trl, verl"):
        peer_metrics({}, "slime", "grpo")


def test_dual_clip_hits_are_counted_apart():
    ratio_BT = torch.tensor([[1.5, 1.1, 1.0], [4.0, 5.0, 0.5]])
    batch = (ratio_BT.log(), torch.zeros(2, 3), torch.tensor([1.0, -1.0]), torch.ones(2, 3))
    _, metrics = get_objective("grpo", dual_clip=3.0)(*batch)
    assert metrics["clip_frac/token"] == pytest.approx(4 / 6)
    assert metrics["clip_frac/token_dual"] == pytest.approx(2 / 6)
    theirs = peer_metrics(metrics, "verl", "grpo")
    assert theirs["actor/pg_clipfrac"] == pytest.approx(2 / 6)  # 1.5 under A > 0 and 0.5 under A < 0
    assert theirs["actor/pg_clipfrac_lower"] == pytest.approx(2 / 6)  # 4 and 5 under A < 0
    # TRL has no dual clip, and does not count a great ratio under A < 0 as clipped.
    assert peer_metrics(metrics, "trl", "grpo")["clip_ratio/region_mean"] == pytest.approx(2 / 6)


@pytest.mark.parametrize(
    ("aggregation", "kl", "entropy"),
    [
        # k1 is 0.1, 0.2, 0.3 and 1; the entropies 1, 2, 3 and 4; rows of 3 tokens and 1.
        ("token-mean", 1.6 / 4, 10 / 4),
        ("seq-mean-token-mean", (0.6 / 3 + 1) / 2, (2 + 4) / 2),
        ("seq-mean-token-sum", 1.6 / 2, 10 / 2),
    ],
)
def test_verls_regularisers_are_aggregated_as_the_loss_is(aggregation, kl, entropy):
    logp_BT, old_BT, advantages, mask_BT = scene()
    ref_BT = logp_BT - torch.tensor([[0.1, 0.2, 0.3], [1.0, 9.0, 9.0]])
    entropy_BT = torch.tensor([[1.0, 2, 3], [4, 9, 9]])
    objective = get_objective("grpo", aggregation=aggregation, kl_estimator="k1")
    _, metrics = objective(logp_BT, old_BT, advantages, mask_BT, ref_logp_BT=ref_BT, entropy_BT=entropy_BT)
    theirs = peer_metrics(metrics, "verl", "grpo")
    assert theirs["actor/kl_loss"] == pytest.approx(kl)
    assert theirs["actor/entropy"] == pytest.approx(entropy)
    assert peer_metrics(metrics, "trl", "grpo")["entropy"] == pytest.approx(10 / 4)  # whatever the loss


def test_verls_value_loss_is_aggregated_as_the_loss_is():
    values_BT = torch.tensor([[1.0, 2, 3], [4, 9, 9]])
    tensors = {"values_BT": values_BT, "old_values_BT": values_BT, "returns_BT": torch.zeros(2, 3)}
    _, metrics = get_objective("ppo", aggregation="seq-mean-token-mean")(*scene(), **tensors)
    assert metrics["value/loss"] == pytest.approx((1 + 4 + 9 + 16) / 2 / 4)
    assert peer_metrics(metrics, "verl", "ppo")["critic/vf_loss"] == pytest.approx((14 / 3 + 16) / 2 / 2)


def test_importance_weights_are_averaged_over_what_carries_one():
    # Token weights 2, 0.5 and 1.5 in the first response, 4 in the second; their products are 1.5 and 4.
    old_BT = torch.tensor([[2.0, 0.5, 1.5], [4.0, 1, 1]]).log()
    mask_BT = torch.tensor([[1, 1, 1], [1, 0, 0]])

    def theirs(name, peer):
        metrics = get_mismatch_correction(name, high=3.0)(old_BT, torch.zeros(2, 3), mask_BT).metrics
        return peer_metrics(metrics, peer, "grpo")

    trl, verl = "sampling/importance_sampling_ratio/mean", "rollout_corr/rollout_is_mean"
    assert theirs("token_tis", "trl")[trl] == pytest.approx((2 + 0.5 + 1.5 + 3) / 4)
    assert theirs("token_tis", "verl")[verl] == pytest.approx((2 + 0.5 + 1.5 + 3) / 4)
    assert theirs("sequence_tis", "trl")[trl] == pytest.approx((1.5 + 3) / 2)
    assert theirs("sequence_tis", "verl")[verl] == pytest.approx((3 * 1.5 + 3) / 4)
    assert theirs("sequence_rejection", "trl") == theirs("sequence_rejection", "verl") == {}
