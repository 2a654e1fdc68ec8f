import json

import numpy as np
import pytest
import torch

from moe_rl.routing import RoutingError
from moe_rl.routing.formats import from_megatron, from_megatron_inference, from_miles_dump, from_router_tracer


def layers_of(experts):
    return [torch.from_numpy(experts[:, layer].copy()) for layer in range(experts.shape[1])]


def test_packed_sequences_are_split_at_their_lengths(lay):
    experts = lay.draw(9)
    trace = from_megatron(layers_of(experts), lay.model, tokens=[4, 5], layout="thd")
    assert trace.valid.int().tolist() == [[1] * 4 + [0], [1] * 5]
    assert np.array_equal(trace.experts[0, :4].numpy(), experts[:4])
    assert np.array_equal(trace.experts[1].numpy(), experts[4:])


def test_interleaved_sequences_are_not_read_as_packed(lay):
    experts = lay.draw(12)  # 6 positions of 2 sequences: row t * 2 + b
    trace = from_megatron(layers_of(experts), lay.model, tokens=[5, 3], layout="sbh")
    assert trace.valid.int().tolist() == [[1] * 5, [1] * 3 + [0] * 2]
    assert np.array_equal(trace.experts[1, :3].numpy(), experts[[1, 3, 5]])
    with pytest.raises(RoutingError, match=r"'thd'.*'sbh'"):
        from_megatron(layers_of(experts), lay.model, tokens=[6, 6])


def test_the_rows_of_one_sequence_parallel_rank_are_refused(lay):
    with pytest.raises(RoutingError, match="gather the ranks first"):
        from_megatron(layers_of(lay.draw(8)), lay.model, tokens=[8, 8], layout="thd")


def test_unsorted_layers_of_interleaved_stages_are_sorted_by_id(lay):
    experts = lay.draw(6)
    shuffled = layers_of(experts[:, [2, 0, 1]])
    trace = from_megatron(shuffled, lay.model, tokens=6, layer_ids=[4, 1, 2])
    assert trace.layer_ids == (1, 2, 4)
    assert np.array_equal(trace.experts[0].numpy(), experts)


def test_a_pipeline_rank_keeps_its_own_layers(lay):
    experts = lay.draw(6)
    trace = from_megatron(layers_of(experts)[1:], lay.model, tokens=6, layer_ids=[2, 4])
    assert trace.layer_ids == (2, 4)
    with pytest.raises(RoutingError, match="expected 3 MoE layers"):
        from_megatron(layers_of(experts)[1:], lay.model, tokens=6)
    with pytest.raises(RoutingError, match="not distinct MoE layers"):
        from_megatron(layers_of(experts)[1:], lay.model, tokens=6, layer_ids=[2, 3])


def test_orphan_router_instances_are_refused(lay):
    with pytest.raises(RoutingError, match="entry 0 holds nothing"):
        from_megatron([None, *layers_of(lay.draw(6))], lay.model, tokens=6)


def test_layers_of_different_dtypes_or_lengths_are_refused(lay):
    layers = layers_of(lay.draw(6))
    with pytest.raises(RoutingError, match="one shape and dtype"):
        from_megatron([layers[0].int(), *layers[1:]], lay.model, tokens=6)
    with pytest.raises(RoutingError, match="one shape and dtype"):
        from_megatron([layers[0][:5], *layers[1:]], lay.model, tokens=6)


def test_inference_choices_hold_prompt_and_completion(lay):
    experts = lay.draw(7)
    choice = {"moe_topk_indices": experts.tolist(), "prompt_moe_topk_indices": experts[:3].tolist()}
    trace = from_megatron_inference(choice, lay.model, tokens=8)
    assert np.array_equal(trace.experts[0, :7].numpy(), experts)


@pytest.mark.parametrize("numbers", [(1, 2, 4), (2, 3, 5), (0, 1, 2)])
def test_the_three_ways_to_number_layers_give_the_decoder_layers(lay, numbers, tmp_path):
    experts = lay.draw(7)
    file = tmp_path / "router_trace_rank0.jsonl"
    file.write_text("".join(json.dumps(record) + "\n" for record in lay.tracer_records(experts, numbers)))
    trace = from_router_tracer(file, lay.model, tokens=8)
    assert trace.layer_ids == (1, 2, 4)
    assert np.array_equal(trace.experts[0, :7].numpy(), experts)


def test_layers_of_another_model_or_pipeline_rank_are_refused(lay):
    with pytest.raises(RoutingError, match=r"layers \(0, 1, 3\) are not the MoE layers"):
        from_router_tracer(lay.tracer_records(lay.draw(7), (0, 1, 3)), lay.model, tokens=8)


def test_draft_heads_do_not_alias_decoder_layers(lay):
    experts = lay.draw(7)
    records = lay.tracer_records(experts)
    drafts = [{**record, "block": "mtp", "mtp_idx": 0} for record in lay.tracer_records(lay.draw(7, seed=5))]
    trace = from_router_tracer(drafts + records, lay.model, tokens=8)
    assert np.array_equal(trace.experts[0, :7].numpy(), experts)


def test_micro_batches_and_recomputation_in_a_step_are_refused(lay):
    records = lay.tracer_records(lay.draw(7), prefill=7)
    with pytest.raises(RoutingError, match="step 0 holds layer 1 twice"):
        from_router_tracer(records + records, lay.model, tokens=15)


def test_files_of_several_ranks_are_refused(lay):
    records = lay.tracer_records(lay.draw(7))
    records[-1]["rank"] = 1
    with pytest.raises(RoutingError, match="one rank"):
        from_router_tracer(records, lay.model, tokens=8)


def test_one_step_of_a_training_trace(lay):
    steps = [lay.draw(7, seed=seed) for seed in range(2)]
    records = [
        {**record, "step": step}
        for step, experts in enumerate(steps)
        for record in lay.tracer_records(experts, prefill=7)
    ]
    trace = from_router_tracer(records, lay.model, tokens=[3, 4], layout="thd", step=1)
    assert np.array_equal(trace.experts[1].numpy(), steps[1][3:])


def test_miles_dumps_are_read_by_micro_batch(lay, tmp_path):
    batches = [lay.draw(7, seed=seed) for seed in range(2)]
    dump = [[torch.from_numpy(batch[:, layer].copy()) for batch in batches] for layer in range(3)]
    file = tmp_path / "rank0_routing_replay.pt"
    torch.save(dump, file)
    trace = from_miles_dump(file, lay.model, tokens=7, micro_batch=1)
    assert np.array_equal(trace.experts[0].numpy(), batches[1])
    with pytest.raises(RoutingError, match=r"\[2\] micro-batches each"):
        from_miles_dump(file, lay.model, tokens=7, micro_batch=2)


class Payload:
    """Writes a file when unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


def test_a_pickle_with_code_in_it_is_refused_and_not_run(lay, tmp_path):
    file, target = tmp_path / "rank0_routing_replay.pt", tmp_path / "executed"
    torch.save([[Payload(target)]], file)
    with pytest.raises(RoutingError, match="no readable miles dump"):
        from_miles_dump(file, lay.model, tokens=7)
    assert not target.exists()
