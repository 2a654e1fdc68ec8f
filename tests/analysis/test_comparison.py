from collections.abc import Callable

from moe_rl.analysis.comparison import collapse_rule, compare, differing_settings
from moe_rl.store import Run


def test_experiments_models_and_tasks_are_kept_apart(make_run: Callable[..., Run]) -> None:
    runs = [
        make_run("a"),
        make_run("b", task={"name": "reverse"}),
        make_run("c", model={"name": "dense"}),
        make_run("d", experiment=None),
    ]
    found = [(c.experiment, c.model, c.task, [m.run for m in c.members]) for c in compare(runs)]
    assert found == [
        ("demo", "dense", "sort", [runs[2]]),
        ("demo", "tiny_moe", "reverse", [runs[1]]),
        ("demo", "tiny_moe", "sort", [runs[0]]),
        ("no experiment", "tiny_moe", "sort", [runs[3]]),
    ]


def test_arms_come_in_the_papers_order_then_by_name_and_seed(make_run: Callable[..., Run]) -> None:
    runs = [
        make_run(f"{arm}{seed}", arm=arm, seed=seed) for arm in ("gspo", "dapo", "grpo") for seed in (1, 0)
    ]
    (comparison,) = compare(runs)
    assert comparison.arms == ["grpo", "gspo", "dapo"]
    assert [member.run.seed for member in comparison.of("grpo")] == [0, 1]


def test_runs_of_one_arm_with_other_settings_are_not_averaged(make_run: Callable[..., Run]) -> None:
    runs = [make_run(f"{lr}-{seed}", seed=seed, optim={"lr": lr}) for lr in (1e-4, 1e-3) for seed in (0, 1)]
    (comparison,) = compare([*runs, make_run("gspo", arm="gspo", optim={"lr": 1e-4})])
    assert comparison.arms == ["grpo (optim.lr=0.0001)", "grpo (optim.lr=0.001)", "gspo"]
    assert [member.run for member in comparison.of("grpo (optim.lr=0.001)")] == runs[2:]


def test_settings_in_which_arms_differ_besides_objective_and_replay_are_named(
    make_run: Callable[..., Run],
) -> None:
    runs = [
        make_run("a", seed=0, checkpoint_every=5),
        make_run(
            "b", arm="gspo", seed=1, objective={"name": "gspo"}, task={"name": "sort", "max_length": 20}
        ),
    ]
    (comparison,) = compare(runs)
    assert differing_settings(comparison) == ["task.max_length"]


def test_a_repeated_seed_counts_once_and_the_longer_run_stays(make_run: Callable[..., Run]) -> None:
    short = make_run("short", rewards=(0.5,) * 3, finish=False)
    long, other = make_run("long"), make_run("other", seed=1)
    for order in ([short, long, other], [long, short, other]):
        (comparison,) = compare(order)
        assert [member.run for member in comparison.members] == [long, other]
        assert comparison.left_out == ((short, long),)


def test_collapse_rule_is_the_runs_own_with_defaults(make_run: Callable[..., Run]) -> None:
    assert collapse_rule(make_run("a")) == {"window": 2, "fraction": 0.5, "patience": 2}
    assert collapse_rule(make_run("b", collapse={"window": 7})) == {
        "window": 7,
        "fraction": 0.5,
        "patience": 5,
    }
    (comparison,) = compare([make_run("c", rewards=(1.0, 1.0, 0.0, 0.0, 0.0))])
    assert comparison.members[0].collapse.step == 5  # trailing means 1, .5, 0, 0: bad at steps 4 and 5
