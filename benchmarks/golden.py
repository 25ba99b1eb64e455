"""Golden figures of the whole product: record them at one commit, check them at another.

    python benchmarks/golden.py record golden.json      # at the old commit
    python benchmarks/golden.py check golden.json       # at the new one; exit 1 if a figure differs

Figures come from public names and from the files that commands write. Each has a relative
tolerance that holds on processors with other vector widths: 1e-3 for rounding, more if a solver
magnifies it. Routers without noise are left out: they start at a critical point, where rounding
decides. A tensor is represented by its sum, its norm and its product with a fixed random tensor.
``make golden`` checks tests/golden/golden.json.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from random import Random

import torch
from transformers import GemmaConfig, GemmaForCausalLM

import kvcat

ROOT = Path(__file__).parent.parent
ROUNDING = 1e-3
SOLVER = 0.02
Figures = dict[str, list[float]]


def digest(*tensors: torch.Tensor | None) -> list[float]:
    """Sum, norm and a random projection of tensors."""
    figures = []
    for tensor in tensors:
        if tensor is not None:
            flat = tensor.detach().double().flatten()
            noise = torch.randn(
                len(flat), generator=torch.Generator().manual_seed(0), dtype=torch.float64
            )
            figures += [float(flat.sum()), float(flat.norm()), float(flat @ noise)]
    return figures


def texts(folder: Path) -> Path:
    """Forty texts of made-up sentences."""
    folder.mkdir(parents=True)
    draw = Random(0)
    words = "the a cat dog river stone light keeps reads under over small old green and but where"
    for index in range(40):
        lines = [" ".join(draw.choices(words.split(), k=12)).capitalize() + "." for _ in range(120)]
        (folder / f"text-{index:02}.txt").write_text("\n".join(lines))
    return folder


def training(folder: Path) -> Iterator[tuple[str, list[float], float]]:
    """Losses and gradient norms of three steps of every policy and form of the masked pass."""
    cases = {
        "router": {"router_noise": 0.05},
        "random": {"policy": "random"},
        "attention": {"policy": "attention"},
        "control": {"policy": "control"},
        "prefix": {"prefix_range": (0.5, 0.9), "target_keep": 0.25, "policy": "random"},
        "frozen": {"teacher": "frozen", "policy": "random"},
    }
    data = str(texts(folder / "texts"))
    for name, options in cases.items():
        config = kvcat.recipes.small(
            model="kvcat-base",
            data=data,
            output=str(folder / name),
            max_steps=3,
            seq_len=128,
            batch_size=4,
            warmup_steps=1,
            validation_sequences=4,
            **options,
        )
        kvcat.train(config, progress=False)
        records = [
            json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()
        ]
        keys = ("dense_loss", "masked_kl", "kl", "budget_loss", "grad_norm", "router_grad_norm")
        losses = [
            float(r[key]) for r in records for key in keys if isinstance(r.get(key), (int, float))
        ]
        yield f"training/{name}", losses, 1e-3


def models() -> Iterator[tuple[str, torch.nn.Module, int]]:
    """Two models, with the number of tokens of a window."""
    yield "kvcat-base", kvcat.load("kvcat-base")[0], 512
    torch.manual_seed(0)
    config = GemmaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=512,
        initializer_range=0.15,  # uneven attention, so that compression costs something
    )
    yield "gemma", GemmaForCausalLM(config).eval(), 256


# not keynorm: repeated tokens have keys of equal norm, among which rounding decides
EVICTIONS = ("first", "streaming", "snapkv", "h2o", "tova")
METHODS: dict[str, tuple[str, dict[str, object], float]] = {
    "stable": ("attention-matching", {"budgets": "equal"}, SOLVER),
    "paper": ("attention-matching", {"preset": "paper"}, 1e-3),
    "no-log-bias": ("attention-matching", {"log_bias": False, "budgets": "equal"}, 1e-3),
    "adaptive": ("attention-matching", {"budgets": "adaptive"}, SOLVER),
    "gradient": ("gradient", {"num_steps": 5}, 1e-3),
    **{name: (name, {}, ROUNDING) for name in EVICTIONS},
}


def caches() -> Iterator[tuple[str, list[float], float]]:
    """KL, NLL and tensors of every method's caches on two models; trace, masks and dense logits
    of each."""
    for label, model, length in models():
        vocab = model.config.get_text_config().vocab_size
        ids = torch.randint(
            3, min(vocab, 250), (2, length), generator=torch.Generator().manual_seed(1)
        )
        prefix = length * 3 // 4
        traced = kvcat.trace(model, ids, prefix_len=prefix)
        yield (
            f"trace/{label}",
            digest(traced.logits, *traced.keys, *traced.values, *traced.queries),
            ROUNDING,
        )
        for name, (method, options, tolerance) in METHODS.items():
            for keep in (0.1, 0.4):
                cache = kvcat.compress.make_compressor(method, **options)(traced, keep_ratio=keep)
                scores = kvcat.compare(traced, cache)
                yield f"nll/{label}/{name}/{keep:g}", scores.nll.tolist(), tolerance
                yield f"kl/{label}/{name}/{keep:g}", scores.kl.tolist(), tolerance
                if name in EVICTIONS:
                    layers = [
                        tensor for layer in cache.layers for tensor in (layer.keys, layer.values)
                    ]
                    yield f"slots/{label}/{name}/{keep:g}", digest(*layers), ROUNDING


def command(*arguments: str) -> None:
    """Run a kvcat command; if it fails, raise its error message."""
    subprocess.run(
        [sys.executable, "-m", "kvcat", *arguments], check=True, stdout=subprocess.DEVNULL
    )


def records(folder: Path) -> Iterator[tuple[str, list[float]]]:
    """Metric values of every record in a results folder, by model, method and keep ratio."""
    figures: dict[str, list[float]] = {}
    for line in (folder / "records.jsonl").read_text().splitlines():
        record = json.loads(line)
        key = f"{record['model']}/{record['method']}/{record['keep_ratio']:g}/{record['step']}"
        figures.setdefault(key, []).extend(
            float(record["values"][name]) for name in sorted(record["values"])
        )
    yield from sorted(figures.items())


def evaluations(folder: Path) -> Iterator[tuple[str, list[float], float]]:
    """Records of the suffix and needle evaluations, and the needle's examples by their hash."""
    data = str(texts(folder / "texts"))
    command(
        "eval",
        "suffix",
        "kvcat-base",
        "--data",
        data,
        "--split",
        "all",
        "--windows",
        "4",
        "--prefix",
        "192",
        "--suffix",
        "64",
        "--method",
        "snapkv",
        "attention-matching,preset=paper",
        "--keep",
        "0.1",
        "0.4",
        "--out",
        str(folder / "suffix"),
    )
    command(
        "eval",
        "needle",
        "kvcat-base",
        "--length",
        "300",
        "--per-depth",
        "1",
        "--method",
        "snapkv",
        "--keep",
        "0.1",
        "--out",
        str(folder / "needle"),
    )
    manifest = json.loads((folder / "needle" / "config.json").read_text())["manifest"]
    yield "needle/manifest", [float(int(manifest[:12], 16))], 0.0
    for name in ("suffix", "needle"):
        for key, figures in records(folder / name):
            yield f"{name}/{key}", figures, 1e-3


def demo(folder: Path) -> Iterator[tuple[str, list[float], float]]:
    """The quick demo's records; training and solver may differ by rounding.

    The demo reads the installed Python sources, so its figures belong to one installation.
    """
    command("demo", "--quick", "--out", str(folder / "demo"))
    for key, figures in records(folder / "demo" / "suffix"):
        yield f"demo/{key}", figures, 0.05


def figures_of_today(with_demo: bool) -> tuple[Figures, dict[str, float]]:
    """All figures and their tolerances; those of the demo only on request."""
    all_figures: Figures = {}
    tolerances: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        groups = {
            "caches": caches(),
            "training": training(Path(folder, "training")),
            "evaluations": evaluations(Path(folder, "evals")),
        }
        if with_demo:
            groups["demo"] = demo(Path(folder, "demo"))
        for name, group in groups.items():
            print(f"{name} ...", file=sys.stderr)
            for key, figures, tolerance in group:
                all_figures[key] = figures
                tolerances[key] = tolerance
    return all_figures, tolerances


def differences(old: Figures, new: Figures, tolerances: dict[str, float]) -> list[str]:
    """One line for every figure that is missing or differs by more than its tolerance."""
    lines = []
    for key in sorted({*old, *new}):
        if key not in old or key not in new:
            lines.append(f"{key}: only {'now' if key in new else 'before'}")
            continue
        if len(old[key]) != len(new[key]):
            lines.append(f"{key}: {len(old[key])} figures before, {len(new[key])} now")
            continue
        scale = max((abs(value) for value in old[key]), default=0.0)
        worst = max(
            (
                abs(a - b) / (abs(a) + 1e-3 * scale + 1e-12)
                for a, b in zip(old[key], new[key], strict=True)
            ),
            default=0.0,
        )
        if worst > tolerances[key]:
            lines.append(f"{key}: differs by {worst:.2g}, tolerance {tolerances[key]:g}")
    return lines


def main() -> int:
    """Record or check."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("action", choices=("record", "check"))
    parser.add_argument("file", type=Path)
    parser.add_argument("--demo", action="store_true", help="with the quick demo (minutes)")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    figures, tolerances = figures_of_today(arguments.demo)
    if arguments.action == "record":
        arguments.file.write_text(json.dumps(figures, indent=0) + "\n")
        return 0
    lines = differences(json.loads(arguments.file.read_text()), figures, tolerances)
    print("\n".join(lines) or f"all {len(figures)} figures agree")
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main())
