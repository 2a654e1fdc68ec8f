import math

import pytest

from moe_rl.training.config import (
    ColdStartConfig,
    CollapseConfig,
    OptimConfig,
    ReplayConfig,
    RolloutConfig,
    TrainConfig,
)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (TrainConfig(rollout=RolloutConfig(top_p=0.9)), "top_p=0.9.*truncated sampler"),
        (TrainConfig(rollout=RolloutConfig(top_k=20)), "top_k=20.*truncated sampler"),
        (TrainConfig(rollout=RolloutConfig(temperature=0.0)), "temperature=0.0.*above 0"),
        (TrainConfig(rollout=RolloutConfig(responses=1)), "responses=1.*at least 2"),
        (TrainConfig(rollout=RolloutConfig(prompts=6)), "prompts=6 is not a multiple of optim.minibatches=4"),
        (TrainConfig(rollout=RolloutConfig(temperature=math.inf)), "temperature=inf"),
        (
            TrainConfig(rollout=RolloutConfig(grading_timeout=0)),
            "grading_timeout=0: expected seconds, or null",
        ),
        (TrainConfig(optim=OptimConfig(lr=-1.0)), "optim.lr=-1.0"),
        (TrainConfig(optim=OptimConfig(lr=math.nan)), "optim.lr=nan"),
        (TrainConfig(optim=OptimConfig(weight_decay=math.inf)), "optim.weight_decay=inf"),
        (TrainConfig(optim=OptimConfig(max_grad_norm=0.0)), "optim.max_grad_norm=0.0: must be above 0"),
        (TrainConfig(optim=OptimConfig(nonfinite="ignore")), "nonfinite='ignore': expected stop or skip"),
        (TrainConfig(cold_start=ColdStartConfig(lr=-1e-3)), "cold_start.lr=-0.001"),
        (TrainConfig(seed=-1), "seed=-1: must be at least 0"),
        (TrainConfig(optim=OptimConfig(microbatch=0)), "optim.microbatch=0"),
        (TrainConfig(replay=ReplayConfig(source="rolout")), "replay.source='rolout'.*old_policy"),
        (TrainConfig(replay=ReplayConfig(variant="response")), "variant=response needs a replay.source"),
        (TrainConfig(replay=ReplayConfig("old_policy", "threshold")), "min_ratio goes with"),
        (TrainConfig(replay=ReplayConfig("rollout", "old_weights")), "replay.source=old_policy"),
        (TrainConfig(cold_start=ColdStartConfig(target_accuracy=35)), "target_accuracy=35.*fraction"),
        (TrainConfig(cold_start=ColdStartConfig(microbatch=-1)), "cold_start.microbatch=-1"),
        (TrainConfig(collapse=CollapseConfig(window=0)), "collapse.window=0"),
        (TrainConfig(optim=OptimConfig(beta1=1.0)), "optim.beta1=1.0"),
        (TrainConfig(optim=OptimConfig(warmup_updates=-5)), "warmup_updates"),
        (TrainConfig(steps=0), "steps=0.*at least 1"),
    ],
)
def test_contradictory_options_are_one_clear_line(config, message):
    with pytest.raises(ValueError, match=message) as error:
        config.check()
    assert "\n" not in str(error.value)


def test_the_papers_defaults_pass():
    TrainConfig().check()
    assert TrainConfig().optim.minibatches == 4
