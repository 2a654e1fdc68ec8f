"""A run does not grow: what a step makes is gone when the next one has been made, by count of objects."""

import gc
import weakref
from collections import Counter
from dataclasses import dataclass, field

import pytest
import torch

from moe_rl.models import ModelConfig, load_model
from moe_rl.objectives import get_objective
from moe_rl.routing import RoutingTrace, record_routing, replay_routing
from moe_rl.store import RunStore
from moe_rl.tasks import get_task
from moe_rl.training.config import EvaluationConfig, OptimConfig, ReplayConfig, RolloutConfig, TrainConfig
from moe_rl.training.loop import train

torch.set_num_threads(1)

MODEL = {
    "num_hidden_layers": 2,
    "hidden_size": 8,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 8,
    "intermediate_size": 8,
    "norm_topk_prob": True,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
}


@pytest.fixture(autouse=True)
def only_new_objects():
    """Leave what the test session holds out of every count."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@dataclass
class Census:
    """What is alive of what the test made.

    constant    tensors, nodes of autograd graphs, hooks, and objects of this project's classes by class: a
                run holds the same number at every step
    of_type     objects of any type
    """

    of_type: Counter
    constant: Counter = field(default_factory=Counter)

    @classmethod
    def take(cls, model: torch.nn.Module) -> "Census":
        gc.collect()
        tensors = [thing for thing in gc.get_objects() if issubclass(type(thing), torch.Tensor)]
        nodes = graph_nodes(tensors)  # first: a node has a Python object from its first visit on
        objects = gc.get_objects()
        census = cls(Counter(type(thing).__qualname__ for thing in objects))
        census.constant["tensors"] = len(tensors)
        census.constant["graph nodes"] = len(nodes)
        census.constant["hooks"] = hooks(model)
        census.constant["instrumented modules"] = instrumented(model)
        for thing in objects:
            if str(type(thing).__module__).startswith("moe_rl."):
                census.constant[type(thing).__qualname__] += 1
        return census

    def require_no_growth(self, later: "Census", steps: int) -> None:
        """The same number of tensors, hooks, nodes and records; of other types less than one in ten steps."""
        assert later.constant == self.constant
        grown = {
            name: count - self.of_type[name]
            for name, count in later.of_type.items()
            if count - self.of_type[name] > 4 + steps / 10  # the census itself is four objects
        }
        assert not grown


def graph_nodes(tensors):
    found, todo = set(), [tensor.grad_fn for tensor in tensors if tensor.grad_fn is not None]
    while todo:
        node = todo.pop()
        if node not in found:
            found.add(node)
            todo += [following for following, _ in node.next_functions if following is not None]
    return found


def hooks(model):
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return sum(len(getattr(module, kind)) for module in model.modules() for kind in kinds)


def instrumented(model):
    return sum(type(module).__name__.startswith("Instrumented") for module in model.modules())


def small_model():
    task = get_task("sort", min_length=2, max_length=3)
    return load_model(ModelConfig(name="smallest", config=MODEL), task.default_tokenizer), task


class CountingStore(RunStore):
    """Takes a census whenever a step of `at` is logged."""

    def watch(self, model, at, each_step):
        self.model, self.at, self.each_step, self.found = model, at, each_step, {}
        return self

    def log(self, stream, record):
        super().log(stream, record)
        if stream == "steps":
            self.each_step(self.model)
            if record["step"] in self.at:
                self.found[record["step"]] = Census.take(self.model)


def censuses(path, source, steps, at, each_step=lambda model: None):
    """A run of recording, replay, drift after every mini-batch, checkpoints and evaluations, counted."""
    lm, task = small_model()
    config = TrainConfig(
        steps=steps,
        checkpoint_every=5,
        rollout=RolloutConfig(prompts=2, responses=2, max_new_tokens=3),
        optim=OptimConfig(lr=1e-3, minibatches=2, warmup_updates=1),
        replay=ReplayConfig(source),
        evaluation=EvaluationConfig(every=5, prompts=2),
    )
    with CountingStore.open(path, {"seed": 0}, {"python": ""}) as store:
        train(lm, task, get_objective("grpo"), config, store.watch(lm.model, at, each_step))
    return [store.found[step] for step in at]


def test_twelve_steps_hold_what_six_do(tmp_path):
    early, late = censuses(tmp_path, "old_policy", steps=12, at=(6, 12))
    assert early.constant["tensors"] > 50 and early.constant["RoutingTrace"] > 0, "the census sees a run"
    early.require_no_growth(late, steps=6)


@pytest.mark.slow
def test_five_hundred_steps_hold_what_twenty_do(tmp_path):
    """With the arm that records most: while sampling, in the old-policy pass and for drift."""
    early, middle, late = censuses(tmp_path, "rollout", steps=500, at=(20, 250, 500))
    early.require_no_growth(middle, steps=230)
    early.require_no_growth(late, steps=480)


KEPT = []
IDS = torch.tensor([[1, 2, 3]])


def keep_a_trace(model):
    KEPT.append(RoutingTrace(torch.zeros(1, 1, 1, 1, dtype=torch.long), torch.ones(1, 1) > 0, (0,), 1))


def keep_a_graph(model):
    KEPT.append(model(input_ids=IDS).logits)


def keep_a_hook(model):
    model.register_forward_hook(lambda *_: None)


def never_leave_a_context(model):
    record_routing(model).__enter__()


def keep_a_record(model):
    KEPT.append({"reward": [0.0]})
    KEPT.append([{}])


def test_a_leak_in_a_run_is_found(tmp_path):
    """What would go unseen if the tests above could not fail."""
    try:
        early, late = censuses(tmp_path, "old_policy", steps=4, at=(3, 4), each_step=keep_a_trace)
        assert late.constant["RoutingTrace"] == early.constant["RoutingTrace"] + 1
        with pytest.raises(AssertionError):
            early.require_no_growth(late, steps=1)
    finally:
        KEPT.clear()


@pytest.mark.parametrize(
    "leak", [keep_a_trace, keep_a_graph, keep_a_hook, never_leave_a_context, keep_a_record]
)
def test_every_kind_of_leak_is_found(leak):
    model = small_model()[0].model
    try:
        leak(model)
        early = Census.take(model)
        early.require_no_growth(Census.take(model), steps=10)
        for _ in range(10):
            leak(model)
        with pytest.raises(AssertionError):
            early.require_no_growth(Census.take(model), steps=10)
    finally:
        KEPT.clear()


def open_and_close(model, trace, times):
    """Four contexts each time, two of them left by an error; the traces of the last."""
    for _ in range(times):
        with torch.no_grad(), record_routing(model) as recorder, replay_routing(model, trace) as replay:
            model(input_ids=IDS)
        traces = recorder.trace(), replay.native
        with pytest.raises(ZeroDivisionError), record_routing(model), replay_routing(model, trace):
            raise ZeroDivisionError
    return traces


def test_a_thousand_contexts_leave_nothing_and_do_not_keep_the_model():
    lm, _ = small_model()
    model, classes = lm.model, [type(module) for module in lm.model.modules()]
    with torch.no_grad(), record_routing(model) as recorder:
        model(input_ids=IDS)
    trace = recorder.trace()
    del recorder
    open_and_close(model, trace, 2)
    before = Census.take(model)
    open_and_close(model, trace, 250)
    before.require_no_growth(Census.take(model), steps=250)
    assert hooks(model) == instrumented(model) == 0
    assert [type(module) for module in model.modules()] == classes

    traces, died = open_and_close(model, trace, 1), weakref.ref(model)
    del lm, model
    gc.collect()
    assert died() is None, "a trace, or something global, holds the model"
    assert all(int(kept.valid.sum()) == 3 for kept in traces)
