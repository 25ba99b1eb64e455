"""The recipes are the table of the paper; the demo's two runs differ in the policy alone."""

from kvcat.recipes import qwen2_5_0_5b, qwen2_5_1_5b
from kvcat.recipes.demo import STANDARD, training_config


def test_the_papers_recipes_hold_every_figure_of_its_table() -> None:
    for config, model, layers in (
        (qwen2_5_0_5b(), "Qwen/Qwen2.5-0.5B", (0, 6, 12, 18)),
        (qwen2_5_1_5b(), "Qwen/Qwen2.5-1.5B", (0, 7, 14, 21)),
    ):
        assert (config.model, config.group_starts) == (model, layers)
        assert config.data == "hub:HuggingFaceFW/fineweb-edu"
        assert (config.seq_len, config.tokens_per_step, config.max_steps) == (1024, 131_072, 40_000)
        assert config.max_steps * config.tokens_per_step == 5_242_880_000
        assert (config.feature_dim, config.tau, config.target_keep) == (64, 0.5, 0.5)
        assert (config.mask_weight, config.anchor_weight, config.budget_weight) == (1.0, 1.0, 0.1)
        assert (config.weight_decay, config.max_grad_norm) == (0.01, 1.0)
        assert (config.peak_lr, config.min_lr, config.warmup_steps) == (1e-4, 5e-6, 600)


def test_the_demos_two_runs_differ_in_the_policy_alone(tmp_path) -> None:
    control, router = (
        vars(training_config(STANDARD, policy, "kvcat-base", tmp_path, seed=0, device="cpu"))
        for policy in ("control", "router")
    )
    assert {name for name in control if control[name] != router[name]} == {"policy", "output"}
