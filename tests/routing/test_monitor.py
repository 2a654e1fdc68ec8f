"""The drift monitor against `expert_change` and hand-worked counts, and the recipe of its page."""

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from moe_rl.routing import DriftMonitor, ExpertChange, RoutingError, RoutingTrace, expert_change

B, T, L, E, K = 3, 7, 4, 16, 4
LAYERS = (0, 2, 5, 7)
GENERATOR = torch.Generator().manual_seed(0)


def draw():
    return torch.rand(B, T, L, E, generator=GENERATOR).argsort(-1)[..., :K]


OLD, MASK = draw(), torch.rand(B, T, generator=GENERATOR) > 0.4
NEW = torch.where(torch.rand(B, T, L, 1, generator=GENERATOR) > 0.5, draw(), OLD)


def monitor():
    return DriftMonitor(E, K, LAYERS)


def reference(mask=MASK):
    return expert_change(RoutingTrace(OLD, mask, LAYERS, E), RoutingTrace(NEW, mask, LAYERS, E))


def expected(change: ExpertChange):
    found = {"drift/experts": change.experts, "drift/sets": change.sets, "drift/tokens": change.tokens}
    by_layer = zip(change.layer_ids, change.by_layer.tolist(), strict=True)
    return found | {f"drift/by_layer/{layer}": value for layer, value in by_layer}


def test_one_update_is_expert_change_exactly():
    ours = monitor()
    ours.update(OLD, NEW, MASK)
    assert ours.metrics() == expected(reference())
    assert 0.2 < reference().experts < 0.6


def test_batches_layers_shapes_and_kinds_of_array_add_up_to_the_whole():
    pieces = monitor()
    pieces.update(OLD[0].to(torch.uint8), NEW[0].to(torch.int32), MASK[0].float())  # [N, L, K], a mask of 0/1
    pieces.update(OLD[1:].numpy().astype(np.uint16), NEW[1:].numpy().astype(np.int16), MASK[1:].numpy())
    assert pieces.metrics() == expected(reference())

    by_layer = monitor()
    for place, layer in enumerate(LAYERS):
        by_layer.update(OLD[:, :, place], NEW[:, :, place], MASK, layer=layer)
    without_tokens = expected(reference())
    del without_tokens["drift/tokens"]  # a token's layers were never seen together
    assert by_layer.metrics() == without_tokens
    flat = monitor()
    flat.update(OLD[..., 1, :].flatten(0, 1), NEW[..., 1, :].flatten(0, 1), MASK.flatten(), layer=2)
    assert flat.metrics()["drift/by_layer/2"] == reference().by_layer[1]
    assert [name for name in flat.metrics() if "by_layer" in name] == ["drift/by_layer/2"]


def test_hand_worked():
    ours = DriftMonitor(num_experts=8, top_k=2, layer_ids=[1, 3])
    old = torch.tensor([[[0, 1], [2, 3]], [[4, 5], [6, 7]], [[0, 0], [9, 9]]])  # the last is masked out
    new = torch.tensor([[[1, 0], [2, 4]], [[4, 6], [0, 1]], [[0, 0], [9, 9]]])
    ours.update(old, new, torch.tensor([1, 1, 0]))
    assert ours.metrics("d") == {  # changed experts: layer 1: 0 and 1, layer 3: 1 and 2, of 2 each
        "d/experts": 4 / 8, "d/sets": 3 / 4, "d/tokens": 1.0, "d/by_layer/1": 1 / 4, "d/by_layer/3": 3 / 4,
    }  # fmt: skip


def test_states_of_ranks_add_up_merge_and_reset():
    ranks = [monitor() for _ in range(B)]
    for b, rank in enumerate(ranks):
        rank.update(OLD[b : b + 1], NEW[b : b + 1], MASK[b : b + 1])
    reduced = monitor()
    reduced.load_state(torch.stack([rank.state() for rank in ranks]).sum(0))  # what all_reduce does
    assert reduced.metrics() == expected(reference())
    ranks[0].merge(ranks[1])
    ranks[0].merge(ranks[2])
    assert torch.equal(ranks[0].state(), reduced.state())
    reduced.state().zero_()  # a copy
    assert reduced.metrics() == expected(reference())
    assert reduced.state().shape == (3 * L + 2,)
    reduced.reset()
    assert reduced.metrics() == {}


def test_an_empty_mask_counts_nothing():
    ours = monitor()
    ours.update(OLD, NEW, torch.zeros(B, T))
    assert ours.metrics() == {} and int(ours.state().sum()) == 0
    ours.update(OLD, NEW)
    assert ours.metrics() == expected(reference(torch.ones(B, T, dtype=torch.bool)))


def outside(value):
    ids = NEW.clone()
    ids[0, 0, 0, 0] = value
    return ids


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((OLD, NEW[:, :, :3]), r"new must be integers .*L = 4 and K = 4, got torch.int64 \[3, 7, 3, 4\]"),
        ((OLD, NEW[..., :2]), "new must be integers"),
        ((OLD[0], NEW), r"must route the same tokens, got \[7, 4, 4\] and \[3, 7, 4, 4\]|same tokens"),
        ((OLD.float(), NEW), "old must be integers .*float32"),
        ((OLD[..., 0, :], NEW[..., 0, :]), "old must be integers"),
        ((OLD, NEW, MASK[:, :3]), r"of shape \[3, 7\].*got torch.bool \[3, 3\]"),
        ((OLD, NEW, MASK * 0.5), "0/1"),
        ((OLD, NEW, None, 0), "for layer is given"),
        ((OLD[..., 0, :], NEW[..., 0, :], None, 1), r"layer = 1 is none of .*\(0, 2, 5, 7\)"),
        ((OLD, outside(E)), r"new: expert ids must lie in \[0, 16\), layer 0 holds"),
        ((OLD, outside(-1)), "new: expert ids"),
        ((outside(int(NEW[0, 0, 0, 1])), NEW), "old: a token chose the same expert twice in layer 0"),
        ((OLD, torch.zeros_like(NEW)), "new: layer 0 holds expert 0 in every slot"),
    ],
)
def test_refused(arguments, message):
    ours = monitor()
    with pytest.raises(RoutingError, match=message):
        ours.update(*arguments)
    assert int(ours.state().sum()) == 0, "a refused update leaves no trace"


def test_models_and_states_that_do_not_fit_are_refused():
    for layers, top_k, message in (((), 2, "at least one"), ((1, 1), 2, "twice"), ((0,), 17, "between 1")):
        with pytest.raises(RoutingError, match=message):
            DriftMonitor(E, top_k, layers)
    with pytest.raises(RoutingError, match="num_experts is 16 in one, 32"):
        monitor().merge(DriftMonitor(32, K, LAYERS))
    for state in (torch.zeros(3), monitor().state().int(), monitor().state() - 1):
        with pytest.raises(RoutingError, match=r"int64 \[14\]"):
            monitor().load_state(state)


class Layer(nn.Module):
    """A router that returns (weights, ids [N, K]), as most do in some order."""

    def __init__(self):
        super().__init__()
        self.router = nn.Module()
        self.router.weight = nn.Parameter(torch.randn(8, 5, generator=GENERATOR))
        self.router.forward = lambda x: torch.topk(x @ self.router.weight.T, 2)

    def forward(self, x):
        weights, ids = self.router(x)
        return x + weights.softmax(-1).sum(-1, keepdim=True) * ids.float().mean(-1, keepdim=True) * 0.1


def test_the_recipe_with_plain_hooks_runs():
    page = (Path(__file__).parents[2] / "docs" / "monitor.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"<!-- run by a test -->\n```python\n(.*?)```", page, re.DOTALL)
    model = nn.Sequential(Layer(), Layer())
    inputs, response_mask = torch.randn(20, 5, generator=GENERATOR), torch.arange(20) >= 4
    routed = []

    def update():
        routed.append(chosen())
        with torch.no_grad():
            for layer in model:
                layer.router.weight.add_(torch.randn(8, 5, generator=GENERATOR) * 0.5)
        routed.append(chosen())

    def chosen():
        return [layer.router(x)[1] for layer, x in zip(model, (inputs, model[0](inputs)), strict=True)]

    names = {"model": model, "inputs": inputs, "response_mask": response_mask, "update": update}
    exec(compile(code, "monitor.md", "exec"), names)
    old, new = routed
    changed = [
        [2 - len({*a.tolist()} & {*b.tolist()}) for a, b in zip(old[i][4:], new[i][4:], strict=True)]
        for i in (0, 1)
    ]
    assert names["found"]["drift/by_layer/1"] == sum(changed[1]) / 32
    assert names["found"]["drift/experts"] == sum(map(sum, changed)) / 64 > 0
    assert not any(layer.router._forward_hooks for layer in model)


def test_the_monitor_works_without_transformers():
    code = (
        "import sys; sys.modules['transformers'] = None\n"
        "import torch; from moe_rl.routing import DriftMonitor, RoutingTrace, expert_change\n"
        "m = DriftMonitor(4, 2, [0]); m.update(torch.tensor([[[0, 1]]]), torch.tensor([[[1, 2]]]))\n"
        "print(m.metrics()['drift/experts'])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "0.5", done.stderr
