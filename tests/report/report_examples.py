"""Made-up results and runs, as an evaluation and a training could give them."""

import json
import math
from itertools import product

import numpy as np

from kvcat.evals import Record, ResultsFolder
from kvcat.evals.evaluations.qa import TASKS

COSTS = {"base": 0.0, "control": -0.12, "kvcat": -0.09, "rand": 0.0}
EASE = {"base": 1.0, "control": 1.04, "kvcat": 0.72, "rand": 0.9}
DIFFICULTY = {
    "attention-matching": 0.15,
    "snapkv": 0.3,
    "gradient": 0.5,
    "kvpress:ExpectedAttentionPress": 0.4,
    "tova": 0.35,
}
METHODS = ("attention-matching", "snapkv", "gradient")
DOMAINS = {"Academic": 24, "Legal": 12, "Table QA": 8}


def record(model, method, keep, step, dataset, stratum, document, values, example="0"):
    place = dataset, stratum, document, example, values
    return Record(model, f"f-{model}", "float32", method, "{}", keep, step, None, *place)


def draw(probability, *key):
    """1 with this probability, the same for the same key; models share the key, so their answers go
    together."""
    return float(np.random.default_rng(key).random() < probability)


def made_up_records(models=("base", "control", "kvcat"), num_documents=12, methods=METHODS):
    """Hard and easy documents, two windows each."""
    records = []
    for document, window, model in product(range(num_documents), range(2), models):
        shared = np.random.default_rng(document)
        level = 2.2 + 0.4 * shared.normal()
        hardness = math.exp(0.4 * shared.normal())
        noise = np.random.default_rng([document, window, list(COSTS).index(model)])
        dense = level + COSTS[model] + 0.01 * noise.normal()
        for method, keep in product(methods, (0.05, 0.1, 0.2)):
            for step in (0, 10, 100) if method == "gradient" else (None,):
                kl = DIFFICULTY[method] * EASE[model] * hardness * (0.05 / keep) ** 0.9
                kl *= (1.0 if step is None else 4.0 / (1.0 + step / 6.0)) * math.exp(
                    0.05 * noise.normal()
                )
                values = {
                    "nll": dense + 0.8 * kl,
                    "nll_dense": dense,
                    "delta_nll": 0.8 * kl,
                    "kl": kl,
                    "context_gain": 0.6,
                    "delta_ppl": math.exp(dense + 0.8 * kl) - math.exp(dense),
                    "num_tokens": 64.0,
                    "num_predicted": 63.0,
                }
                records.append(
                    record(
                        model,
                        method,
                        keep,
                        step,
                        "made-up",
                        "",
                        f"d{document}",
                        values,
                        str(window),
                    )
                )
    return records


def made_up_needle(models=("base", "kvcat"), per_depth=20):
    """Passkeys at three depths, found more often with more slots."""
    records = []
    for instance, (rank, depth), model in product(
        range(per_depth), enumerate(("0", "0.5", "1")), models
    ):
        dense = draw(0.95, rank, instance, 1)
        work = (
            ("dense", 1.0, None),
            ("no-context", 0.0, None),
            ("gradient", 0.1, 100),
            ("gradient", 0.5, 100),
        )
        for method, keep, step in work:
            right = dense * draw((keep / 0.6) ** EASE[model], rank, instance, 2, int(100 * keep))
            values = {"exact_match": right, "dense_exact_match": dense, "nll": 1.5 - right}
            records.append(
                record(model, method, keep, step, "passkey", depth, f"{depth}-{instance}", values)
            )
    return records


def made_up_longbench(models=("base", "kvcat"), skill=0.55):
    """Long questions; at a skill of .25 nobody is better than guessing."""
    work = [("dense", 1.0, None), ("no-context", 0.0, None)]
    work += [("gradient", keep, step) for keep in (0.1, 0.5) for step in (20, 50, 100)]
    records = []
    for (domain, (stratum, count)), model in product(enumerate(DOMAINS.items()), models):
        for row, (method, keep, step) in product(range(count), work):
            dense = draw(skill, domain, row)
            chance = 0.25 + (skill - 0.25) * keep / EASE[model]
            right = (
                dense
                if method == "dense"
                else draw(chance, domain, row, 2, int(100 * keep), step or 0)
            )
            values = {"accuracy": right, "nll_choice": 1.6 - right, "dense_accuracy": dense}
            records.append(
                record(
                    model, method, keep, step, "longbench-v2", stratum, f"{stratum}-{row}", values
                )
            )
    return records


def made_up_qa(models=("base", "control", "kvcat", "rand"), num_questions=60):
    """Eight tasks of different difficulty; every model also errs on different questions."""
    records = []
    for (rank, task), row, (column, model) in product(
        enumerate(TASKS), range(num_questions), enumerate(models)
    ):
        right = draw(0.3 + 0.06 * rank, rank, row) if row % 5 else draw(0.5, rank, row, column)
        values = {"acc": right, "acc_per_char": right, "nll_per_char": 1.0 - 0.5 * right}
        records.append(record(model, "dense", 1.0, None, "cloze", task, f"{task}-{row}", values))
    return records


def write_results(path, records, evaluation="suffix", **settings):
    """A results folder with costs: two batches, of eight and of two examples, per model, method and
    keep ratio."""
    count = len({(record.document, record.example) for record in records})
    cells = dict.fromkeys(
        (r.model, r.method, r.keep_ratio, r.step) for r in records if r.method in DIFFICULTY
    )
    keeps = {
        name: sorted({keep for _, other, keep, _ in cells if other == name})
        for _, name, *_ in cells
    }
    methods = [
        {"name": n, "options": {}, "num_examples": count, "keep_ratios": keep_ratios}
        for n, keep_ratios in keeps.items()
    ]
    config = {
        "evaluation": evaluation,
        "dataset": records[0].dataset,
        "num_examples": count,
        "methods": methods,
    }
    with ResultsFolder(path, config | settings) as folder:
        folder.append(records)
        for (model, method, keep, step), examples in product(cells, (8, 2)):
            cost = {
                "model": model,
                "method": method,
                "options": {},
                "keep_ratio": keep,
                "step": step,
                "examples": examples,
                "dense_bytes": 4096 * examples,
                "seconds": 2.0 * examples,
                "peak_mib": 3.5 * examples,
                "bytes": int(4096 * keep) * examples,
            }
            speed = {
                "ttft": 0.1,
                "ttft_dense": 0.2,
                "tokens_per_s": 30.0,
                "tokens_per_s_dense": 20.0,
            }
            folder.append_cost(cost | (speed if examples == 8 else {}))
        folder.append_event(
            {"event": "start", "command": f"kvcat eval {evaluation} base kvcat --keep .05"}
        )
    return path


def write_run(path, policy, num_steps=60):
    """Metrics of a run as the trainer writes them."""
    lines = []
    for step in range(1, num_steps + 1):
        line = {
            "kind": "train",
            "step": step,
            "tokens": step * 4096,
            "dense_loss": 2.1 + 0.5 * math.exp(-step / 60),
        }
        if policy != "control":
            kept = {str(layer): 0.5 + 0.5 * math.exp(-step / (20 + 5 * layer)) for layer in (0, 2)}
            line |= {
                "masked_loss": line["dense_loss"] + 0.1,
                "kl": 0.12 * math.exp(-step / 150),
                "kept": kept,
            }
        lines += [line, {**line, "kind": "validation"}] if step % 20 == 0 else [line]
    path.mkdir(parents=True)
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path
