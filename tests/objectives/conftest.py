"""A small batch of random tensors, and the loss, gradient and metrics that an objective gives for one."""

import pytest
import torch

from moe_rl.objectives import get_objective


@pytest.fixture
def make_batch():
    """Function -> random logp (a leaf), old logp, advantages of mixed sign and a mask of mixed lengths."""

    def make(sequences=4, tokens=6, scale=0.3, seed=0, dtype=torch.float64):
        generator = torch.Generator().manual_seed(seed)

        def draw(function, *shape):
            return function(*shape, generator=generator, dtype=dtype)

        old = -3 * draw(torch.rand, sequences, tokens) - 0.1
        logp = old + scale * draw(torch.randn, sequences, tokens)
        advantages = draw(torch.randn, sequences)
        lengths = torch.randint(1, tokens + 1, (sequences,), generator=generator)
        mask = (torch.arange(tokens)[None, :] < lengths[:, None]).to(dtype)
        return logp.requires_grad_(), old, advantages, mask

    return make


@pytest.fixture
def value_and_gradient():
    """Function (name, the four tensors, keyword tensors, options) -> loss, gradient of logp, metrics."""

    def evaluate(name, logp, *args, tensors=None, **options):
        logp = logp.detach().clone().requires_grad_()
        loss, metrics = get_objective(name, **options)(logp, *args, **(tensors or {}))
        loss.backward()
        return loss.detach(), logp.grad, metrics

    return evaluate
