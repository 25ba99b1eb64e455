"""The demo: KV-CAT and its control are trained from the small base, and compared in a report."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kvcat.errors import InputError
from kvcat.evals import Method, evaluate
from kvcat.evals.suffix import make_task
from kvcat.files import claim_folder, one_writer
from kvcat.hub import BASE_NAME
from kvcat.models import load
from kvcat.recipes.pretrain import pretrain
from kvcat.report import headline_text, read_results, write_report
from kvcat.training.config import TrainConfig
from kvcat.training.loop import train

KEEP_RATIOS = (0.05, 0.1, 0.2, 0.4)


@dataclass(frozen=True)
class DemoPlan:
    """The size of each part of the demo.

    Args:
        name: name of the plan.
        max_steps: training steps of KV-CAT and of the control.
        batch_size, seq_len: batch size and sequence length of both.
        num_windows: number of held-out windows, 768 + 256 tokens each.
        evictions: eviction methods to compare.
        gradient_windows: number of windows for the gradient method.
        gradient_steps: number of steps of the gradient method.
        keep_ratios: keep ratios of all other methods.
        gradient_keep_ratios: keep ratios of the gradient method.
    """

    name: str
    max_steps: int
    batch_size: int
    seq_len: int
    num_windows: int
    evictions: tuple[str, ...]
    gradient_windows: int
    gradient_steps: int
    keep_ratios: tuple[float, ...] = KEEP_RATIOS
    gradient_keep_ratios: tuple[float, ...] = (0.05, 0.2)

    @property
    def methods(self) -> list[Method]:
        """The methods that the demo evaluates."""
        evictions = [Method(name) for name in self.evictions]
        gradient = Method(
            "gradient",
            {"num_steps": self.gradient_steps},
            keep_ratios=self.gradient_keep_ratios,
            num_examples=self.gradient_windows,
        )
        return [Method("attention-matching"), *evictions, gradient]


QUICK = DemoPlan(
    name="quick",
    max_steps=40,
    batch_size=4,
    seq_len=512,
    num_windows=8,
    evictions=("snapkv",),
    gradient_windows=4,
    gradient_steps=10,
    keep_ratios=(0.05, 0.2),
    gradient_keep_ratios=(0.2,),
)
STANDARD = DemoPlan(
    name="standard",
    max_steps=320,
    batch_size=4,
    seq_len=1024,
    num_windows=48,
    evictions=("snapkv", "keynorm"),
    gradient_windows=6,
    gradient_steps=50,
)
FULL = DemoPlan(
    name="full",
    max_steps=1000,
    batch_size=8,
    seq_len=1024,
    num_windows=128,
    evictions=("first", "random", "keynorm", "snapkv", "h2o"),
    gradient_windows=16,
    gradient_steps=100,
)


def training_config(
    plan: DemoPlan, policy: str, model: str, out: Path, *, seed: int, device: str
) -> TrainConfig:
    """The demo's training configuration.

    The configurations of ``control`` and ``router`` differ only in the policy, so they see the same
    tokens. The learning rate and the weight of the distillation are lower than in the other
    recipes, because the base is small and at the end of its schedule. The masked pass runs only
    suffixes, on a quarter of the slots of their prefixes. The routers' target falls to this quarter
    during the first quarter of the run (see docs/log.md). The data seed differs from that of the
    base, which has already seen the first documents in its order.
    """
    return TrainConfig.from_dict(
        {
            "model": model,
            "output": str(out / ("control" if policy == "control" else "kv-cat")),
            "policy": policy,
            "seq_len": plan.seq_len,
            "batch_size": plan.batch_size,
            "max_steps": plan.max_steps,
            "warmup_steps": max(1, plan.max_steps // 15),
            "peak_lr": 3e-4,
            "min_lr": 3e-5,
            "mask_weight": 0.2,
            "prefix_range": [0.5, 0.9],
            "target_keep": 0.25,
            "target_warmup_steps": plan.max_steps // 4,
            "router_noise": 0.0,  # the documented figures were made without noise
            "seed": seed + 1,
            "device": device,
            "validation_every": max(1, plan.max_steps // 6),
            "validation_sequences": 8,
            "checkpoint_every": max(1, plan.max_steps // 6),
        }
    )


def run_demo(
    plan: DemoPlan, out: Path, *, seed: int = 0, device: str = "cpu", from_scratch: bool = False
) -> Path:
    """The path of ``report.html``, after training, compression and evaluation.

    Every part continues from where it was stopped: the runs from their checkpoints, the evaluation
    from its records.

    Args:
        plan: the size of each part.
        out: folder of the demo.
        seed: seed of training and compression; the windows stay the same.
        device: device of all parts.
        from_scratch: pretrain the base first.

    Raises:
        InputError: the folder contains other files, or a demo with another plan or seed.
    """
    _claim(out, {"plan": asdict(plan), "seed": seed, "from_scratch": from_scratch})
    base = BASE_NAME
    if from_scratch:
        print("Pretraining the base from scratch.", flush=True)
        base = str(pretrain(out / "base", device=device))
    folders = {"base": base}
    for policy, label in (("control", "control"), ("router", "KV-CAT")):
        tokens = f"{plan.batch_size * plan.seq_len} tokens"
        print(f"\nTraining {label}: {plan.max_steps} steps of {tokens}.", flush=True)
        config = training_config(plan, policy, base, out, seed=seed, device=device)
        folders[label] = str(train(config).export)
    print("\nCompressing held-out text.", flush=True)
    models = {label: load(folder, device=device) for label, folder in folders.items()}
    _, base_tokenizer = models["base"]
    task = make_task(base_tokenizer, windows=plan.num_windows)
    evaluate(task, models, plan.methods, plan.keep_ratios, out / "suffix", seeds=[seed])
    results = read_results(out / "suffix")
    page = write_report(
        [results],
        out / "report",
        title="KV-CAT on a small model of Python source code",
        runs={"KV-CAT": out / "kv-cat", "control": out / "control"},
        context={"plan": plan.name, "training seed": str(seed), "base": base},
    )
    print("\n" + headline_text(results))
    print(f"Report: {page}")
    real = "kvcat get smollm2-135m"
    print(f"This model has a million parameters and reads Python alone. A real one: {real}")
    return page


def _claim(out: Path, description: dict[str, Any]) -> None:
    """Create the folder of a demo, or check that it has the same plan and seed."""
    in_json = json.loads(json.dumps(description))
    with one_writer(out):
        existing = claim_folder(out, "demo.json", in_json)
    if existing not in (None, in_json):
        problem = f"{out} holds a demo with another plan or seed"
        raise InputError(f"{problem}; choose another folder with --out")
