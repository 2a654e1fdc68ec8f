import math

import pytest
import torch

from moe_rl.objectives import get_objective

F64 = torch.float64


def metrics_of(log_ratio, mask):
    log_ratio = torch.as_tensor(log_ratio, dtype=F64)
    _, metrics = get_objective("grpo")(
        log_ratio, torch.zeros_like(log_ratio), torch.ones(len(log_ratio), dtype=F64), torch.as_tensor(mask)
    )
    return metrics


def test_quantiles_are_torchs(make_batch):
    logp, old, advantages, mask = make_batch(sequences=40, tokens=9, scale=1.0)
    _, metrics = get_objective("gspo")(logp, old, advantages, mask)
    log_ratio = (logp - old).detach()
    by_kind = {
        "token": log_ratio[mask.bool()].exp(),
        "sequence": ((log_ratio * mask).sum(1) / mask.sum(1)).exp(),
    }
    for kind, ratios in by_kind.items():
        for percent in (1, 50, 99):
            expected = torch.quantile(ratios, percent / 100).item()
            assert metrics[f"ratio/{kind}_q{percent:02d}"] == pytest.approx(expected, abs=1e-12)
        ess = (ratios.sum() ** 2 / ratios.square().sum() / len(ratios)).item()
        assert metrics[f"ratio/{kind}_ess"] == pytest.approx(ess, abs=1e-12)


def test_effective_sample_size_by_hand():
    metrics = metrics_of([[math.log(1)], [math.log(3)]], [[1], [1]])
    assert metrics["ratio/token_ess"] == pytest.approx(16 / (2 * 10), abs=1e-12)


def test_products_without_length_normalisation():
    """Two tokens of log 2 against one of log 1: products 4 and 1, length-normalised 2 and 1."""
    metrics = metrics_of([[math.log(2), math.log(2)], [0.0, 0.0]], [[1, 1], [1, 0]])
    assert metrics["ratio/product_log_std"] == pytest.approx(math.log(4) / 2, abs=1e-12)
    assert metrics["ratio/product_ess"] == pytest.approx(25 / (2 * 17), abs=1e-12)
    assert metrics["ratio/sequence_ess"] == pytest.approx(9 / (2 * 5), abs=1e-12)


def test_kl_estimates_are_old_against_new():
    """Over the old policy's own distribution k1 and k3 both average to KL(old || new)."""
    old, new = torch.tensor([0.5, 0.3, 0.2], dtype=F64), torch.tensor([0.2, 0.3, 0.5], dtype=F64)
    draws = torch.tensor([0] * 5 + [1] * 3 + [2] * 2)  # each token as often as the old policy draws it
    log_ratio = (new / old).log()[draws][None, :]
    metrics = metrics_of(log_ratio, torch.ones(1, 10))
    exact = (old * (old / new).log()).sum().item()
    assert metrics["kl/k1"] == pytest.approx(exact, abs=1e-12)
    assert metrics["kl/k3"] == pytest.approx(exact, abs=1e-12)


def test_a_response_without_tokens_has_no_ratio():
    metrics = metrics_of([[math.log(2)], [math.log(4)], [0.0]], [[1], [1], [0]])
    assert metrics["ratio/sequence_mean"] == pytest.approx(3, abs=1e-12)
    assert metrics["ratio/sequence_min"] == pytest.approx(2, abs=1e-12)
    assert metrics["ratio/product_log_std"] == pytest.approx(math.log(2) / 2, abs=1e-12)
