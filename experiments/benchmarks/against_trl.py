"""Training steps of moe_rl's loop beside those of TRL's GRPOTrainer, doing the same work in turn.

    pip install -c constraints.txt -e '.[peers]'     # TRL 1.16.0
    python -m experiments.benchmarks.against_trl

Same model (`conf/model/tiny.yaml`, the demo's cold start), prompts, tokenizer, reward and objective (GRPO,
clip 0.2 / 0.27, no KL, advantages by group), 4 optimiser steps a rollout, AdamW, gradient norm clipped at
1, CPU, float32, one thread. A round is one rollout and its updates on each side, in one process, timed by
CPU time: TRL; the loop with routing measurement off; the loop with everything measured (replay of the old
experts with the native choice beside it, drift after every mini-batch). A rate is response tokens over CPU
seconds of the same round.

TRL as fast as its options make it here: no checkpointing of gradients, no bf16, no vLLM, no reference
model, no logging, saving or progress bar, a mini-batch in one forward. The learning rate is 1e-6 on both
sides, so both keep sampling from the cold start and their rewards and lengths can be compared.
"""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from experiments.benchmarks.pairs import Ratio, rounds, seconds
from experiments.benchmarks.results import Bound, Report, Row, Table, arguments, publish
from experiments.benchmarks.scene import NEVER, Scene, Watched, make_scene, run_loop
from experiments.benchmarks.stepper import Stepper

OFF, MEASURED = "moe_rl, measurement off", "moe_rl, everything measured"
PROMPTS = 4096  # of TRL's data set, which it repeats


@dataclass(frozen=True)
class Round:
    """One rollout and its updates."""

    cpu_seconds: float
    seen: list[tuple[float, int]]  # reward and text length of each response
    response_tokens: int

    @property
    def rate(self) -> float:
        """Response tokens per CPU second."""
        return self.response_tokens / self.cpu_seconds


@dataclass(frozen=True)
class Size:
    """Prompts and responses a prompt, and the ratio to TRL's rate that is asked for with measurement off."""

    prompts: int
    responses: int
    rounds: int
    off: Bound
    measured: Bound | None = None

    @property
    def name(self) -> str:
        total = self.prompts * self.responses
        return f"{total} responses a rollout ({self.prompts} prompts x {self.responses})"


SIZES = (
    Size(32, 8, 24, Bound("at least", 1.5), Bound("at least", 1.0)),
    # Four whole groups, for four mini-batches.
    Size(4, 4, 40, Bound("at least", 2.0)),
)


def main() -> None:
    """Print the table."""
    options = arguments(__doc__).parse_args()
    publish(measure(quick=options.quick), options)


def measure(*, quick: bool) -> Report:
    trl = load_trl()
    report = Report(
        "against_trl",
        "Training beside TRL's GRPOTrainer",
        f"TRL {trl.__version__}, `conf/model/tiny.yaml`, 12-digit sorting, GRPO, 4 updates a rollout; "
        "response tokens per CPU second, one thread, rounds in turn.",
    )
    for size in [replace(SIZES[-1], rounds=3)] if quick else SIZES:
        add(report, trl, size, cold=not quick)
    return report


def load_trl() -> Any:
    try:
        from moe_rl.integrations.trl import trl
    except ModuleNotFoundError as error:
        raise SystemExit(str(error)) from error
    return trl


def add(report: Report, trl: Any, size: Size, *, cold: bool) -> None:
    """Rows and tables of one size of rollout."""
    sizes = (f"rollout.prompts={size.prompts}", f"rollout.responses={size.responses}")
    scenes = {
        "TRL": make_scene(*sizes, cold=cold),
        OFF: make_scene(*sizes, "drift_every=0", cold=cold),
        MEASURED: make_scene(*sizes, "arm=grpo_replay", cold=cold),
    }
    watched = {name: Watched(scene.task) for name, scene in scenes.items()}
    with tempfile.TemporaryDirectory() as directory:
        loops = [
            Stepper(partial(loop, replace(scenes[name], task=watched[name]), Path(directory) / name))
            for name, loop in (("TRL", partial(run_trl, trl)), (OFF, run_ours), (MEASURED, run_ours))
        ]
        with loops[0], loops[1], loops[2]:
            sides = [
                partial(one_round, loop, watched[name]) for loop, name in zip(loops, scenes, strict=True)
            ]
            results = dict(zip(scenes, rounds(sides, size.rounds), strict=True))
    rates = {name: [one.rate for one in found] for name, found in results.items()}
    for name, bound in ((OFF, size.off), (MEASURED, size.measured)):
        value = Ratio.of([a / b for a, b in zip(rates[name], rates["TRL"], strict=True)])
        sides = [f"{who}: {Ratio.of(rates[who])} tokens/s" for who in (name, "TRL")]
        report.rows.append(Row(size.name, *sides, value, "x", bound))
    report.tables.append(same_work(size, results, scenes["TRL"]))


def one_round(loop: Stepper[int], watched: Watched) -> Round:
    tokens: list[int] = []
    cpu_seconds = seconds(lambda: tokens.append(loop.advance()))
    return Round(cpu_seconds, watched.take(), tokens[0])


def run_ours(scene: Scene, directory: Path, pause: Callable[[int], None]) -> None:
    responses = scene.config.rollout.prompts * scene.config.rollout.responses
    run_loop(scene, directory, lambda record: pause(round(record["response/length"] * responses)))


def run_trl(trl: Any, scene: Scene, directory: Path, pause: Callable[[int], None]) -> None:
    """`GRPOTrainer.train`, pausing after the last update of every rollout."""
    from datasets import Dataset
    from transformers import TrainerCallback

    config, minibatches = scene.config, scene.config.optim.minibatches
    problems = [scene.task.train(i) for i in range(PROMPTS)]
    response_tokens = 0

    def reward(
        completions: list[str], completion_ids: list[list[int]], item: list[int], **_: Any
    ) -> list[float]:
        nonlocal response_tokens
        response_tokens += sum(map(len, completion_ids))
        return [scene.task.reward(problems[i], text) for i, text in zip(item, completions, strict=True)]

    class Pause(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            nonlocal response_tokens
            if state.global_step % minibatches == 0:
                tokens, response_tokens = response_tokens, 0
                pause(tokens)

    options = trl.GRPOConfig(
        output_dir=str(directory),
        # The work: that of the loop's config.
        per_device_train_batch_size=config.rollout.prompts * config.rollout.responses // minibatches,
        num_generations=config.rollout.responses,
        steps_per_generation=minibatches,
        gradient_accumulation_steps=1,
        num_iterations=1,
        max_completion_length=config.rollout.max_new_tokens,
        temperature=config.rollout.temperature,
        top_p=1.0,
        top_k=0,
        loss_type="grpo",
        scale_rewards="group",
        epsilon=0.2,
        epsilon_high=0.27,
        beta=0.0,
        learning_rate=config.optim.lr,
        lr_scheduler_type="constant",
        adam_beta1=config.optim.beta1,
        adam_beta2=config.optim.beta2,
        weight_decay=config.optim.weight_decay,
        max_grad_norm=config.optim.max_grad_norm,
        max_steps=NEVER,
        shuffle_dataset=False,
        # Its speed: nothing that this comparison does not need.
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        use_vllm=False,
        dataloader_pin_memory=False,
        logging_strategy="no",
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    trainer = trl.GRPOTrainer(
        model=scene.lm.model,
        reward_funcs=reward,
        args=options,
        train_dataset=Dataset.from_dict({"prompt": [p.prompt for p in problems], "item": range(PROMPTS)}),
        processing_class=scene.lm.tokenizer,
        callbacks=[Pause()],
    )
    trainer.train()


def same_work(size: Size, results: dict[str, list[Round]], scene: Scene) -> Table:
    """Reward, lengths and shapes of both sides beside each other."""
    rows: list[list[str | float]] = []
    longest = scene.config.rollout.max_new_tokens
    shown = range(longest - 3, longest + 1)
    for name, found in results.items():
        rewards = [fmean(reward for reward, _ in one.seen) for one in found]
        lengths = Counter(length for one in found for _, length in one.seen)
        shares = [lengths[length] / lengths.total() for length in shown]
        rest = 1 - sum(shares)
        error = stdev(rewards) / len(rewards) ** 0.5
        tokens = fmean(one.response_tokens for one in found)
        spread = f"{fmean(rewards):.3f} ± {1.96 * error:.3f}"
        rows.append(
            [name, lengths.total(), spread, tokens, fmean(one.cpu_seconds for one in found), rest, *shares]
        )
    columns = [
        "side",
        "responses",
        "reward, 95 % interval of the mean",
        "response tokens a round",
        "CPU s a round",
    ]
    columns += [f"share shorter than {shown[0]} digits", *(f"{length} digits" for length in shown)]
    return Table(f"The same work? {size.name}", columns, rows)


if __name__ == "__main__":
    main()
