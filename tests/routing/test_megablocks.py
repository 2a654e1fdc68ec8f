"""Routers of MegaBlocks layers, in a model that is not of transformers."""

import dataclasses
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from moe_rl.routing import find_routers, record_routing, replay_routing, router_gets_gradient

router = pytest.importorskip("megablocks.layers.router", exc_type=ImportError, reason="needs megablocks")


class Block(nn.Module):
    def __init__(self, top_k: int, norm: int | None) -> None:
        super().__init__()
        self.router = router.LearnedRouter(
            SimpleNamespace(
                hidden_size=8,
                moe_num_experts=4,
                moe_top_k=top_k,
                moe_normalize_expert_weights=norm,
                moe_jitter_eps=None,
                moe_zloss_weight=0,
                uniform_expert_assignment=False,
                init_method=nn.init.normal_,
                device="cpu",
                fp16=False,
                bf16=False,
            )
        )
        self.weight = nn.Parameter(torch.randn(4, 8, 8))

    def forward(self, hidden_BTD: Tensor) -> Tensor:
        _, weights_NK, ids_NK = self.router(hidden_BTD)
        out_NKD = torch.einsum("nd,nkde->nke", hidden_BTD.flatten(0, 1), self.weight[ids_NK])
        return hidden_BTD + (out_NKD * weights_NK[..., None]).sum(1).view(hidden_BTD.shape)


class Model(nn.Module):
    def __init__(self, top_k: int, norm: int | None) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 8)
        self.layers = nn.ModuleList([Block(top_k, norm) for _ in range(2)])

    def forward(self, input_ids: Tensor) -> Tensor:
        hidden_BTD = self.embed(input_ids)
        for layer in self.layers:
            hidden_BTD = layer(hidden_BTD)
        return hidden_BTD


@pytest.mark.parametrize("norm", [None, 1])
@pytest.mark.parametrize("top_k", [1, 2])
def test_record_and_replay(top_k, norm):
    torch.manual_seed(0)
    model, ids = Model(top_k, norm), torch.randint(0, 16, (2, 5))
    plain = model(ids)
    with record_routing(model) as recorder:
        assert torch.equal(model(ids), plain)
    trace = recorder.trace()
    with replay_routing(model, trace) as replay:
        assert torch.equal(model(ids), plain)
    assert torch.equal(replay.native.experts, trace.experts)
    foreign = dataclasses.replace(trace, experts=(trace.experts + 1) % 4)
    with record_routing(model) as recorder, replay_routing(model, foreign):
        assert not torch.equal(model(ids), plain)
    assert torch.equal(recorder.trace().experts, foreign.experts)
    assert [found.layer_id for found in find_routers(model)] == [0, 1]
    assert router_gets_gradient(find_routers(model)[0]) is not (top_k == 1 and norm == 1)
