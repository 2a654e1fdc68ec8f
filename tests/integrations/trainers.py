"""Trainers on fixed completions: what they learn from depends on the prompts alone, in any process."""

import hashlib

import torch
from datasets import Dataset

from moe_rl.integrations.trl import GRPOConfig, RoutingReplayGRPOTrainer

GROUP = 4
LONGEST = 7
OWN = ("replay", "objective", "advantages", "drift", "rollout_func", "peft_config", "callbacks")


def ones(completion_ids, **_):
    """The share of even ids: uneven over completions that are drawn at random."""
    return [sum(token % 2 == 0 for token in ids) / len(ids) for ids in completion_ids]


def completion(prompt_ids, index, vocabulary):
    """Completion `index` to a prompt: ids from a hash of both, of 2 to LONGEST tokens."""
    seed = hashlib.blake2b(f"{prompt_ids}/{index}".encode(), digest_size=4).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(seed, "big"))
    length = int(torch.randint(2, LONGEST + 1, (), generator=generator))
    return torch.randint(vocabulary - 1, (length,), generator=generator).tolist()


def fixed_rollout(prompts, trainer):
    """A rollout_func that draws nothing; the rows of a prompt are next to each other."""
    tokenizer, seen = trainer.processing_class, {}
    output = {"prompt_ids": [], "completion_ids": [], "logprobs": []}
    # With two processes a prompt's rows may be split; every process here holds whole groups.
    for prompt in prompts:
        ids = tokenizer(prompt)["input_ids"]
        index = seen[prompt] = seen.get(prompt, -1) + 1
        made = completion(ids, index, len(tokenizer))
        output["prompt_ids"].append(ids)
        output["completion_ids"].append(made)
        output["logprobs"].append([-1.0] * len(made))
    return output


def build_trainer(model, tokenizer, prompts, output, *, cls=RoutingReplayGRPOTrainer, rows=4, **options):
    """A trainer of `rows` rows a micro-batch; options of the trainer and of GRPOConfig together."""
    own = {name: options.pop(name) for name in OWN if name in options}
    settings = {
        "output_dir": str(output),
        "per_device_train_batch_size": rows,
        "num_generations": GROUP,
        "max_completion_length": LONGEST,
        "loss_type": "grpo",
        "epsilon": 0.2,
        "epsilon_high": 0.27,
        "learning_rate": 3e-3,
        "lr_scheduler_type": "constant",
        "max_steps": 2,
        "logging_steps": 1,
        "shuffle_dataset": False,
        "use_cpu": True,
        "bf16": False,
        "dataloader_pin_memory": False,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
    }
    return cls(
        model=model,
        reward_funcs=ones,
        args=GRPOConfig(**settings | options),
        train_dataset=Dataset.from_dict({"prompt": prompts}),
        processing_class=tokenizer,
        **own,
    )


def history(trainer):
    """The logs of every optimiser step."""
    return [entry for entry in trainer.state.log_history if "loss" in entry]
