"""One process of a training under `accelerate launch`; leaves what it saw in DIRECTORY/rank<R>of<N>.json.

python distributed.py DIRECTORY CASE…: the model lies in DIRECTORY/model, prompts in DIRECTORY/prompts.json.
"""

import json
import os
import sys
from pathlib import Path

import torch
from trainers import build_trainer, fixed_rollout, history
from transformers import AutoModelForCausalLM, AutoTokenizer

from moe_rl.integrations.carried import OLD, sequences, take_trace
from moe_rl.integrations.cpu import fsdp_on_cpu
from moe_rl.integrations.trl import RoutingReplayGRPOTrainer
from moe_rl.objectives import get_objective
from moe_rl.routing import record_routing

torch.set_num_threads(1)


class Rows(RoutingReplayGRPOTrainer):
    """Compares every row's trace with what an unsharded copy of the starting model chooses on its tokens."""

    alone = None
    kept = ()

    def _generate_and_score_completions(self, inputs):
        batch = super()._generate_and_score_completions(inputs)
        self.unshuffled = batch["completion_ids"].tolist()
        self.lengths = batch["completion_mask"].sum(-1).tolist()
        return batch

    def _prepare_inputs(self, batch):
        inputs = super()._prepare_inputs(batch)
        if self._step == 0:
            self.kept = [self.of_rows(part) for part in self._buffered_inputs]
        return inputs

    def of_rows(self, batch):
        ids, mask = sequences(batch)
        trace, right = take_trace(batch, OLD, self._layout), []
        for row in range(len(ids)):
            real = mask[row].bool()
            with torch.no_grad(), record_routing(self.alone) as recorder:
                self.alone(input_ids=ids[row : row + 1, real])
            right.append(torch.equal(trace.experts[row, real].long(), recorder.trace().experts[0].long()))
        places = [self.unshuffled.index(ids) for ids in batch["completion_ids"].tolist()]
        return {"right": right, "places": places}


# the rows of an update are the same in one process and in two
EQUAL = {"replay": "old_policy", "num_iterations": 3, "max_steps": 3, "rollout_func": fixed_rollout}
CASES = {
    "equal": EQUAL,
    # token means over both processes' tokens, advantages of groups of both
    "ours": EQUAL | {"objective": get_objective("dapo", kl_coef=0.05), "advantages": "paper"},
    "split": {"replay": "old_policy", "rows": 2, "steps_per_generation": 2, "max_steps": 2,
              "rollout_func": fixed_rollout},
    # responses that end at different steps in different processes, the sampler's experts replayed
    "sampled": {"replay": "rollout", "num_iterations": 2, "max_steps": 2, "max_completion_length": 40},
}  # fmt: skip


def main(directory, cases):
    world, rank = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0))
    tokenizer = AutoTokenizer.from_pretrained(directory / "model")
    prompts = json.loads((directory / "prompts.json").read_text())
    found = {}
    for case in cases:
        options = {"rows": 8 // world, "beta": 0.05, "seed": 3, "gradient_checkpointing": True} | CASES[case]
        model, alone = (AutoModelForCausalLM.from_pretrained(directory / "model") for _ in range(2))
        trainer = build_trainer(model, tokenizer, prompts, directory / "trl", cls=Rows, **options)
        trainer.alone = alone
        trainer.train()
        full = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in trainer.model.parameters()]
        found[case] = {
            "history": history(trainer),
            "rows": trainer.kept,
            "lengths": trainer.lengths,
            "kinds": sorted({type(p).__name__ for p in trainer.model.parameters()}),
            "norms": [p.double().norm().item() for p in full],
        }
    (directory / f"rank{rank}of{world}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    with fsdp_on_cpu():
        main(Path(sys.argv[1]), sys.argv[2:])
