"""The tensors that every peer's loss is run on, and the record of what a peer gives for them."""

from dataclasses import dataclass, field

import torch

LENGTHS = (9, 3, 7, 1, 9, 5)
EMPTY_ROW = 3
MAX_LENGTH = 12
STORED_SEED = 7
SHARED_SCENES = ("equal", "near", "far", "wild", "empty_row")  # every peer; "signed" is for verl's counts


def make_scene(scale, seed, *, empty=False, zero_advantage=True):
    """Log-probabilities whose log-ratio has the given spread, finite garbage where there is no response."""
    generator = torch.Generator().manual_seed(seed)
    rows, width = len(LENGTHS), max(LENGTHS)

    def normal():
        return torch.randn(rows, width, generator=generator, dtype=torch.float64)

    old = -0.05 - 4 * torch.rand(rows, width, generator=generator, dtype=torch.float64)
    by_token = {
        "old_logp": old,
        "logp": (old + scale * normal()).clamp(max=-0.01),
        "ref_logp": (old + 0.3 * normal()).clamp(max=-0.01),
        "sampler_logp": (old + 0.9 * normal()).clamp(max=-0.01),
        "token_advantages": normal(),
        "old_values": normal(),
        "values": normal(),
        "returns": normal(),
    }
    advantages = torch.tensor([1.3, -0.7, 0.0, 2.1, -1.9, 0.4], dtype=torch.float64)
    if not zero_advantage:
        advantages[2] = -0.3
    lengths = torch.tensor(LENGTHS)
    if empty:
        lengths[EMPTY_ROW] = 0
    mask = (torch.arange(width)[None, :] < lengths[:, None]).double()
    scene = {name: values.where(mask == 1, 3.0) for name, values in by_token.items()}
    scene["weights"] = (scene["old_logp"] - scene["sampler_logp"]).exp()
    return scene | {"advantages": advantages, "mask": mask}


def make_scenes(seed):
    return {
        "equal": make_scene(0.0, seed),
        "near": make_scene(1e-3, seed),
        "far": make_scene(0.5, seed),
        "wild": make_scene(2.0, seed),
        "signed": make_scene(0.5, seed, zero_advantage=False),
        "empty_row": make_scene(0.5, seed, empty=True),
    }


@dataclass
class Recording:
    """What one peer gives on the scenes of one seed.

    tensors: scenes, losses, gradients and single values by name. cases: for each loss of the peer the
    objective of ours that must give the same; value_cases: the same where a value model is trained too.
    """

    peer: str
    seed: int = STORED_SEED
    tensors: dict = field(default_factory=dict)
    cases: list = field(default_factory=list)
    value_cases: list = field(default_factory=list)

    def __post_init__(self):
        self.scenes = make_scenes(self.seed)
        for name, scene in self.scenes.items():
            self.tensors.update({f"{name}/{key}": tensor for key, tensor in scene.items()})

    def leaf(self, scene_name, tensor="logp"):
        return self.scenes[scene_name][tensor].clone().requires_grad_()

    def record(
        self,
        scene,
        function,
        objective,
        options,
        loss,
        logp,
        counts,
        *,
        scale=1.0,
        offset=0.0,
        extra=(),
        advantages="advantages",
        values=None,
        reported=None,
    ):
        """Keep the loss, its gradients and the case.

        counts: what the peer reports of the policy, under our metrics' names; reported: of a reference.
        extra: (our keyword, scene tensor) pairs. values: the leaf of the value model, where there is one.
        """
        cases = self.cases if values is None else self.value_cases
        key = f"{self.peer}-{len(self.cases) + len(self.value_cases):03d}"
        leaves = [logp] if values is None else [logp, values]
        gradient, *others = torch.autograd.grad(loss, leaves)
        self.tensors[f"{key}/loss"], self.tensors[f"{key}/gradient"] = loss.detach().reshape(1), gradient
        if others:
            (self.tensors[f"{key}/gradient/values"],) = others
        case = {"key": key, "scene": scene, "peer": f"{self.peer} {function}", "objective": objective}
        case |= {"options": options, "counts": counts, "scale": scale, "offset": offset}
        case["extra"] = [list(pair) for pair in extra]
        if advantages != "advantages":
            case["advantages"] = advantages
        if reported:
            case["reported"] = reported
        cases.append(case)
