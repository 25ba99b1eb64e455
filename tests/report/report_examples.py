"""Made-up results and runs, as an evaluation and a training could give them."""

import json
import math

import numpy as np

from kvcat.evals import Record, ResultsFolder

KEEPS = (0.05, 0.1, 0.2, 0.4)
COSTS = {"base": 0.0, "control": -0.12, "kvcat": -0.09}
EASE = {"base": 1.0, "control": 1.04, "kvcat": 0.72}
DIFFICULTY = {"attention-matching": 0.15, "snapkv": 0.3, "random": 0.8, "gradient": 0.5}


def made_up_records(models=("base", "control", "kvcat"), num_documents=24, methods=tuple(DIFFICULTY)):
    """Records as an evaluation could give them: hard and easy documents, two windows each."""
    records = []
    for document in range(num_documents):
        shared = np.random.default_rng(document)
        level, hardness = 2.2 + 0.4 * shared.normal(), math.exp(0.4 * shared.normal())
        for window in range(2):
            for model in models:
                noise = np.random.default_rng([document, window, list(COSTS).index(model)])
                dense = level + COSTS[model] + 0.01 * noise.normal()
                for method in methods:
                    steps = (0, 1, 2, 5, 10, 20, 50, 100) if method == "gradient" else (None,)
                    for keep in KEEPS if method != "gradient" else (0.05, 0.2):
                        for step in steps:
                            speed = 1.0 if step is None else 4.0 / (1.0 + step / (6.0 * EASE[model])) ** 1.1
                            kl = DIFFICULTY[method] * EASE[model] * hardness * (0.05 / keep) ** 0.9 * speed
                            kl *= math.exp(0.05 * noise.normal())
                            records.append(_record(model, method, keep, step, document, window, dense, kl))
    return records


def _record(model, method, keep, step, document, window, dense, kl):
    delta, gain = 0.8 * kl, 0.6
    values = {
        "nll": dense + delta, "nll_dense": dense, "nll_none": dense + gain, "delta_nll": delta,
        "delta_ppl": math.exp(dense + delta) - math.exp(dense), "kl": kl, "top1": math.exp(-1.2 * math.sqrt(kl)),
        "context_gain": gain, "retention": 1.0 - delta / gain, "num_tokens": 64.0,
    }  # fmt: skip
    name = f"d{document}"
    return Record(
        model, f"f-{model}", "float32", method, "{}", keep, step, None, "made-up", "", name, str(window), values
    )


def made_up_metrics(policy, num_steps=200):
    """Metrics of a run as the trainer writes them."""
    noise = np.random.default_rng(0)
    lines = []
    for step in range(1, num_steps + 1):
        dense = 2.1 + 0.5 * math.exp(-step / 60) + 0.03 * noise.normal()
        record = {"kind": "train", "step": step, "tokens": step * 4096, "dense_loss": dense}
        if policy != "control":
            kept = {str(layer): 0.5 + 0.5 * math.exp(-step / (20 + 5 * layer)) for layer in (0, 2, 4)}
            record |= {"masked_loss": dense + 0.1, "kl": 0.12 * math.exp(-step / 150), "kept": kept}
        lines.append(record)
        if step % 50 == 0:
            lines.append({**record, "kind": "validation", "dense_loss": dense + 0.05})
    return lines


def write_results(path, records):
    config = {
        "evaluation": "suffix", "dataset": "made-up", "prefix_len": 192, "suffix_len": 64, "num_examples": 48,
        "manifest": "0" * 64, "batch_size": 8, "seeds": [0],
        "methods": [
            {"name": m, "options": {}, "num_examples": 48, "keep_ratios": list(KEEPS)}
            for m in dict.fromkeys(r.method for r in records)
        ],
    }  # fmt: skip
    with ResultsFolder(path, config) as folder:
        folder.append(records)
    events = [
        {"event": "start", "command": "kvcat eval suffix base control kvcat --keep 0.05", "kvcat": "0.1.0"},
        {"event": "end", "seconds": 12.5},
    ]
    (path / "provenance.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    return path


def write_run(path, policy):
    path.mkdir(parents=True)
    lines = made_up_metrics(policy)
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path
