"""The demo: KV-CAT and its control trained from the small base, compressed on held-out text, reported."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from kvcat.errors import InputError
from kvcat.evals import Method, evaluate
from kvcat.evals.suffix import make_task
from kvcat.files import claim_folder, one_writer
from kvcat.hub import BASE_NAME
from kvcat.models import load
from kvcat.recipes.base import pretrain
from kvcat.report import headline_text, write_report
from kvcat.training.config import TrainConfig
from kvcat.training.loop import train

KEEP_RATIOS = (0.05, 0.1, 0.2, 0.4)


@dataclass(frozen=True)
class DemoPlan:
    """How long each part of the demo takes."""

    name: str
    max_steps: int  # of KV-CAT and of the control
    batch_size: int
    seq_len: int
    num_windows: int  # held-out windows, 768 + 256 tokens each
    evictions: tuple[str, ...]  # eviction methods that are compared
    gradient_windows: int  # windows of the gradient method
    gradient_steps: int
    keep_ratios: tuple[float, ...] = KEEP_RATIOS
    gradient_keep_ratios: tuple[float, ...] = (0.05, 0.2)

    @property
    def methods(self) -> list[Method]:
        """The evaluated methods."""
        limits = {"keep_ratios": self.gradient_keep_ratios, "num_examples": self.gradient_windows}
        gradient = Method("gradient", {"num_steps": self.gradient_steps}, **limits)
        return [Method("attention-matching"), *map(Method, self.evictions), gradient]


QUICK = DemoPlan("quick", 40, 4, 512, 8, ("snapkv",), 4, 10, keep_ratios=(0.05, 0.2), gradient_keep_ratios=(0.2,))
STANDARD = DemoPlan("standard", 320, 4, 1024, 48, ("snapkv", "keynorm"), 6, 50)
FULL = DemoPlan("full", 1000, 8, 1024, 128, ("first", "random", "keynorm", "snapkv", "h2o"), 16, 100)


def training_config(plan: DemoPlan, policy: str, model: str, out: Path, *, seed: int, device: str) -> TrainConfig:
    """The demo's training recipe; ``control`` and ``router`` differ in the policy alone, so they see the same tokens.

    The learning rate and the weight of the distillation are lower than elsewhere, because the base is small and at the
    end of its own schedule. The masked pass runs suffixes alone, on a quarter of the slots of their prefixes, towards
    which the routers' target falls over the first quarter of the run (see docs/log.md). The data seed differs from the
    base's, whose first documents it has seen.
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
            "router_noise": 0.0,  # the documented figures are from before the noise
            "seed": seed + 1,
            "device": device,
            "validation_every": max(1, plan.max_steps // 6),
            "validation_sequences": 8,
            "checkpoint_every": max(1, plan.max_steps // 6),
        }
    )


def run_demo(plan: DemoPlan, out: Path, *, seed: int = 0, device: str = "cpu", from_scratch: bool = False) -> Path:
    """Train, compress, measure and report; returns the path of ``report.html``.

    Every part continues where it was stopped: the runs from their checkpoints, the evaluation from its records. The
    seed is that of training and compression; the windows stay the same. ``from_scratch`` pretrains the base first.

    Raises:
        InputError: the folder holds something else, or a demo with another plan or seed.
    """
    described = json.loads(json.dumps({"plan": asdict(plan), "seed": seed, "from_scratch": from_scratch}))
    with one_writer(out):
        found = claim_folder(out, "demo.json", described)
    if found not in (None, described):
        raise InputError(f"{out} holds a demo with another plan or seed; choose another folder with --out")
    base = BASE_NAME
    if from_scratch:
        print("Pretraining the base from scratch.", flush=True)
        base = str(pretrain(out / "base", device=device))
    labels = {"base": base}
    for policy, label in (("control", "control"), ("router", "KV-CAT")):
        print(f"\nTraining {label}: {plan.max_steps} steps of {plan.batch_size * plan.seq_len} tokens.", flush=True)
        labels[label] = str(train(training_config(plan, policy, base, out, seed=seed, device=device)).export)
    print("\nCompressing held-out text.", flush=True)
    models = {label: load(folder, device=device) for label, folder in labels.items()}
    task, results = make_task(models["base"][1], windows=plan.num_windows), out / "suffix"
    evaluate(task, models, plan.methods, plan.keep_ratios, results, seeds=[seed])
    page = write_report(
        [results],
        out / "report",
        title="KV-CAT on a small model of Python source code",
        runs={"KV-CAT": out / "kv-cat", "control": out / "control"},
        context={"plan": plan.name, "training seed": str(seed), "base": base},
    )
    print("\n" + headline_text(results))
    print(f"Report: {page}")
    print("This model has a million parameters and reads Python alone. A real one: kvcat get smollm2-135m")
    return page
