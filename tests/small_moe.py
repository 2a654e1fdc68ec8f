"""The small MoE of the tests of training and measurement, and a reward that an untrained model earns too."""

SMALL = {
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "intermediate_size": 32,
    "norm_topk_prob": True,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,  # large, so that the routing is not close to uniform
}


class OnesReward:
    """A task whose responses earn their share of 1s, uneven from the start."""

    def __init__(self, task):
        self.task = task

    def __getattr__(self, name):
        return getattr(self.task, name)

    def reward(self, problem, text):
        return text.count("1") / max(1, len(text))
