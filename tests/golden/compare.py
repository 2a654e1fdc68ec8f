"""Ours against a peer's recorded case."""

import pytest
import torch

from moe_rl.objectives import get_objective

# verl adds 1e-8 to its divisors, TRL and slime nothing. All three count clipped tokens in float32.
LOSS_TOLERANCE = {"trl": 1e-12, "verl": 1e-7, "slime": 1e-12}
COUNT_TOLERANCE = 2e-7


def check_case(case, tensors):
    """AssertionError unless our loss, gradients and counts are the peer's, known differences applied."""
    scene, key = case["scene"], case["key"]
    logp, old_logp, advantages, mask = (
        tensors[f"{scene}/{name}"].clone()
        for name in ("logp", "old_logp", case.get("advantages", "advantages"), "mask")
    )
    keywords = {ours: tensors[f"{scene}/{theirs}"].clone() for ours, theirs in case["extra"]}
    leaves = {f"{key}/gradient": logp.requires_grad_()}
    if f"{key}/gradient/values" in tensors:
        leaves[f"{key}/gradient/values"] = keywords["values_BT"].requires_grad_()
    objective = get_objective(case["objective"], **case["options"])
    loss, metrics = objective(logp, old_logp, advantages, mask, **keywords)
    loss.backward()
    tolerance = LOSS_TOLERANCE[case["peer"].split()[0]]
    close, scale = {"rtol": tolerance, "atol": tolerance}, case["scale"]
    expected = scale * tensors[f"{key}/loss"].squeeze() + case["offset"]
    torch.testing.assert_close(loss.detach(), expected, **close)
    for name, leaf in leaves.items():
        torch.testing.assert_close(leaf.grad, scale * tensors[name], **close)
    for name, expected in (case["counts"] | case.get("reported", {})).items():
        assert metrics[name] == pytest.approx(expected, abs=COUNT_TOLERANCE), name
