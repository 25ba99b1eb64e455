"""The demo: what compression keeps on a small model, then what KV-CAT training adds and costs."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kvcat.errors import InputError
from kvcat.evals import Task, evaluate
from kvcat.evals.evaluations.suffix import Suffix
from kvcat.files import claim_folder, one_writer
from kvcat.hub import BASE_NAME
from kvcat.models import load
from kvcat.report import Results, overview_text, read_results, write_report
from kvcat.report.verdicts import compression_verdicts, training_verdicts
from kvcat.training.config import TrainConfig
from kvcat.training.loop import train

KEEP_RATIOS = (0.05, 0.1, 0.2, 0.4)
BASE = "base"


@dataclass(frozen=True)
class DemoPlan:
    """The size of each part of the demo.

    Args:
        name: name of the plan.
        methods: compression methods to compare on the base, the default first.
        num_windows: number of held-out windows for this, 384 + 128 tokens each.
        keep_ratios: keep ratios of all methods.
        max_steps: training steps of KV-CAT and of the control; 0: nothing is trained.
        batch_size, seq_len: batch size and sequence length of both.
        num_validations: number of validations during training.
        trained_methods: compression methods for the trained models.
        trained_windows: number of held-out windows for these, 768 + 256 tokens each.
        trained_keep_ratios: keep ratios for these.
    """

    name: str
    methods: tuple[str, ...]
    num_windows: int
    max_steps: int = 0
    batch_size: int = 4
    seq_len: int = 512
    num_validations: int = 4
    trained_methods: tuple[str, ...] = ()
    trained_windows: int = 0
    keep_ratios: tuple[float, ...] = KEEP_RATIOS
    trained_keep_ratios: tuple[float, ...] = KEEP_RATIOS


QUICK = DemoPlan(
    name="quick",
    methods=("attention-matching", "snapkv", "streaming"),
    num_windows=8,
)
STANDARD = DemoPlan(
    name="standard",
    methods=("attention-matching", "h2o", "snapkv", "streaming", "keynorm"),
    num_windows=32,
    max_steps=160,
    batch_size=4,
    seq_len=512,
    num_validations=4,
    trained_methods=("attention-matching", "snapkv"),
    trained_windows=12,
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
    between_validations = max(1, plan.max_steps // plan.num_validations)
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
            "validation_every": between_validations,
            "validation_sequences": 8,
            "checkpoint_every": between_validations,
        }
    )


def compression_task(tokenizer: Any, plan: DemoPlan) -> Task:
    """Held-out windows whose caches are made from the prefix alone, as for a document."""
    return Suffix.task(
        tokenizer,
        windows=plan.num_windows,
        prefix=384,
        suffix=128,
        supervision="reconstruction",
    )


def run_demo(plan: DemoPlan, out: Path, *, seed: int = 0, device: str = "cpu") -> Path:
    """The path of ``report.html``, after compression, training and evaluation.

    Every part continues from where it was stopped: the runs from their checkpoints, the evaluations
    from their records.

    Args:
        plan: the size of each part.
        out: folder of the demo.
        seed: seed of training and compression; the windows stay the same.
        device: device of all parts.

    Raises:
        InputError: the folder contains other files, or a demo with another plan or seed.
    """
    _claim(out, {"plan": asdict(plan), "seed": seed})
    print("1. Compression: caches of held-out text, made from the text alone.", flush=True)
    model, tokenizer = load(BASE_NAME, device=device)
    task = compression_task(tokenizer, plan)
    folder = out / "compression"
    evaluate(task, {BASE: (model, tokenizer)}, plan.methods, plan.keep_ratios, folder, seeds=[seed])
    compression = read_results(folder)
    print("\n" + overview_text(compression))
    results = [compression]
    answers = compression_verdicts(compression)
    runs: dict[str, Path] = {}
    title = "KV-cache compression on a small model of Python source code"
    if plan.max_steps:
        training = _evaluate_training(plan, out, seed=seed, device=device)
        print("\n" + overview_text(training))
        results.append(training)
        answers |= training_verdicts(training)
        runs = {"KV-CAT": out / "kv-cat", "control": out / "control"}
        title = "KV-cache compression, and KV-CAT training, on a small model of Python source code"
    page = write_report(
        results,
        out / "report",
        title=title,
        answers=answers,
        runs=runs,
        context={"plan": plan.name, "seed": str(seed), "base": BASE_NAME},
    )
    print("What came out:")
    for question, answer in answers.items():
        print(f"  {question}\n    {answer}")
    print(f"\nReport: {page}")
    real = "kvcat get smollm2-135m"
    print(f"This model has a million parameters and reads Python alone. A real one: {real}")
    return page


def _evaluate_training(plan: DemoPlan, out: Path, *, seed: int, device: str) -> Results:
    """Results of the base, the control and KV-CAT, after training the latter two."""
    print("2. Training: the paper's method, and a control on the same tokens.", flush=True)
    folders = {BASE: BASE_NAME, **_train_both(plan, out, seed=seed, device=device)}
    models = {label: load(folder, device=device) for label, folder in folders.items()}
    tokenizer = models[BASE][1]
    task = Suffix.task(tokenizer, windows=plan.trained_windows)
    folder = out / "training"
    # caches are fitted to the suffix, as in the paper
    evaluate(task, models, plan.trained_methods, plan.trained_keep_ratios, folder, seeds=[seed])
    return read_results(folder)


def _train_both(plan: DemoPlan, out: Path, *, seed: int, device: str) -> dict[str, str]:
    """The exported folders of the control and of KV-CAT, by label, after training."""
    folders = {}
    for policy, label in (("control", "control"), ("router", "KV-CAT")):
        tokens = f"{plan.batch_size * plan.seq_len} tokens"
        print(f"\nTraining {label}: {plan.max_steps} steps of {tokens}.", flush=True)
        config = training_config(plan, policy, BASE_NAME, out, seed=seed, device=device)
        folders[label] = str(train(config).export)
    return folders


def _claim(out: Path, description: dict[str, Any]) -> None:
    """Create the folder of a demo, or check that it has the same plan and seed."""
    in_json = json.loads(json.dumps(description))
    with one_writer(out):
        existing = claim_folder(out, "demo.json", in_json)
    if existing not in (None, in_json):
        problem = f"{out} holds a demo with another plan or seed"
        raise InputError(f"{problem}; choose another folder with --out")
