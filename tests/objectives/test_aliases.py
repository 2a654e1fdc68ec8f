import re
from pathlib import Path

import pytest
import torch

from moe_rl.objectives import OBJECTIVES, get_objective, peer_metrics
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
        theirs = {*_ALIASES[peer].values(), *(name for _, name in _CLIP_FRACTIONS[peer].values())}
        assert theirs <= spelt, theirs - spelt
        assert _CLIP_FRACTIONS[peer].keys() <= OBJECTIVES.keys()


def test_another_peer_is_refused():
    with pytest.raises(ValueError, match="unknown peer 'slime'; known: trl, verl"):
        peer_metrics({}, "slime", "grpo")
