"""The PyTorch stand-ins, against hand-worked values and against MegaBlocks' own Triton kernels."""

import importlib.util
import os
import subprocess
import sys

import pytest
import torch

from moe_rl.models import megablocks_standins as standins
from moe_rl.models.megablocks import INSTALL

ops = standins._extension("megablocks_ops")
gg = standins._extension("grouped_gemm")
CHOICES = torch.tensor([2, 0, 2, 1, 0, 2], dtype=torch.int32)  # experts of 3 tokens x 2 choices, E = 4


def test_ops_of_megablocks_by_hand():
    bin_ids, indices = torch.empty_like(CHOICES), torch.empty_like(CHOICES)
    ops.sort(CHOICES, 2, bin_ids, indices)
    assert bin_ids.tolist() == [0, 0, 1, 2, 2, 2]
    assert indices.tolist() == [1, 4, 3, 0, 2, 5]  # stable: equal experts stay in order of their tokens
    tokens_E = ops.histogram(CHOICES, 4)
    assert tokens_E.tolist() == [2, 1, 3, 0]
    assert tokens_E.dtype == torch.int32
    out = torch.empty(1, 4, dtype=torch.int32)
    ops.inclusive_cumsum(tokens_E[None], 1, out)
    assert out.tolist() == [[2, 3, 6, 6]]
    ops.exclusive_cumsum(tokens_E[None], 1, out)
    assert out.tolist() == [[0, 2, 3, 6]]


@pytest.mark.parametrize("trans_b", [False, True])
def test_grouped_products_and_their_gradients(trans_b):
    torch.manual_seed(0)
    sizes = torch.tensor([2, 0, 3])  # the second expert has no token
    a = torch.randn(5, 4, requires_grad=True)
    b = torch.randn(3, 8, 4) if trans_b else torch.randn(3, 4, 8)
    b.requires_grad_()
    out = gg.ops.gmm(a, b, sizes, trans_b=trans_b)
    expected = torch.cat([x @ (w.T if trans_b else w) for x, w in zip(a.split([2, 0, 3]), b, strict=True)])
    torch.testing.assert_close(out, expected)
    grads = torch.autograd.grad(out.sum(), (a, b))  # sum sends a broadcast gradient
    torch.testing.assert_close(grads, torch.autograd.grad(expected.sum(), (a, b)))
    assert not grads[1][1].any()


def test_grouped_products_into_a_given_tensor():
    a, b, sizes = torch.randn(5, 4), torch.randn(3, 4, 8), torch.tensor([2, 0, 3])
    out = torch.empty(5, 8)
    assert gg.backend.gmm(a, b, sizes, c=out) is out
    torch.testing.assert_close(out[2:], a[2:] @ b[2])
    torch.testing.assert_close(gg.backend.gmm(a, out, sizes, trans_a=True)[0], a[:2].T @ out[:2])


def test_copies_by_hand():
    """3 tokens of width 1, 2 choices each: gathered by expert, scaled back, dropped over a capacity of 2."""
    tokens = torch.tensor([[1.0], [2.0], [3.0]])
    indices, bin_ids = torch.tensor([1, 4, 3, 0, 2, 5]), torch.tensor([0, 0, 1, 2, 2, 2])
    bins, padded = torch.tensor([2, 3, 6, 6]), torch.tensor([4, 8, 12, 12])
    flags = dict(NUM_COLUMNS=1, TOP_K=2)
    gathered = torch.zeros(12, 1)
    standins._padded_copy(
        tokens, gathered, indices, bin_ids, None, bins, padded, A_TO_B=True, SCALE=False, **flags
    )
    assert gathered.flatten().tolist() == [1, 3, 0, 0, 2, 0, 0, 0, 1, 2, 3, 0]
    weights = torch.tensor([0.5, 1.0, 2.0, 3.0, 4.0, 5.0])
    back = torch.zeros(3, 2, 1)
    standins._padded_copy(
        back, gathered, indices, bin_ids, weights, bins, padded, A_TO_B=False, SCALE=True, **flags
    )
    assert back.flatten().tolist() == [0.5, 1, 4, 6, 12, 15]
    binned = torch.zeros(4, 2, 1)
    standins._binned_copy(tokens, binned, 4, 2, indices, None, bins, A_TO_B=True, SCALE=False, **flags)
    assert binned.flatten().tolist() == [1, 3, 2, 0, 1, 2, 0, 0]  # expert 2's third choice is dropped
    wgrad = torch.zeros(6)
    standins._binned_copy_wgrad(binned, 10 * tokens, wgrad, 4, 2, indices, bins, **flags)
    assert wgrad.tolist() == [10, 10, 40, 40, 90, 0]


INTERPRETED = """
import torch, triton

class FirstConfig:  # the autotuner looks for a GPU
    def __init__(self, kernel, config):
        self.kernel, self.config = kernel, config
    def __getitem__(self, grid):
        return lambda *args, **options: self.kernel[grid](*args, **options, **self.config.kwargs)

triton.autotune = lambda configs, key: lambda kernel: FirstConfig(kernel, configs[0])
from moe_rl.models.megablocks import load_megablocks
from moe_rl.models.megablocks_standins import _KERNELS

mb = load_megablocks()
ops, kernels = mb.ops, mb.backend.kernels
torch.manual_seed(0)
E, K, N, D = 4, 2, 5, 72  # wider than one block of 64 columns
for dtype in (torch.float32, torch.float16):  # the interpreter rounds bfloat16 towards zero
    choices = torch.randint(0, E - 1, (N * K,), dtype=torch.int32)  # the last expert gets nothing
    bin_ids, indices = ops.sort(choices, 3)
    sizes = ops.histogram(choices, E)
    bins, padded = ops.inclusive_cumsum(sizes, 0), ops.inclusive_cumsum(ops.round_up(sizes, 4), 0)
    tokens, weights = torch.randn(N, D).to(dtype), torch.rand(N * K)
    grouped, roomy = torch.randn(N * K, D).to(dtype), torch.randn(int(padded[-1]), D).to(dtype)
    binned = torch.randn(E, 3, D).to(dtype)

    def calls():
        for w in (None, weights):
            yield kernels.gather(tokens, indices, bin_ids, w, bins, K)
            yield kernels.scatter(grouped, indices, bin_ids, w, bins, K)
            yield kernels.padded_gather(tokens, indices, bin_ids, w, bins, padded, K)
            yield kernels.padded_scatter(roomy, indices, bin_ids, w, bins, padded, K)
            yield kernels.binned_gather(tokens, indices, w, bins, 3, K)
            yield kernels.binned_scatter(binned, indices, w, bins, K)
        yield kernels.padded_scatter_wgrad(roomy, tokens, indices, bin_ids, bins, padded, K)
        yield kernels.binned_scatter_wgrad(binned, tokens, indices, bins, K)

    in_torch = list(calls())
    covered = {name: getattr(kernels, name) for name in _KERNELS}
    for name in _KERNELS:
        setattr(kernels, name, covered[name]._kernel)
    in_triton = list(calls())
    for name in _KERNELS:
        setattr(kernels, name, covered[name])
    for i, (a, b) in enumerate(zip(in_torch, in_triton, strict=True)):
        # Bitwise, except for the gradients of the weights, which are sums in another order.
        torch.testing.assert_close(a, b, **({"rtol": 0, "atol": 0} if i < 12 else {}))
    print(len(in_torch), "agree in", dtype)
"""


@pytest.mark.slow
@pytest.mark.skipif(not importlib.util.find_spec("megablocks"), reason=f"needs MegaBlocks: {INSTALL}")
def test_copies_equal_the_triton_kernels():
    result = subprocess.run(
        [sys.executable, "-c", INTERPRETED],
        env=os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("14 agree in torch.") == 2
