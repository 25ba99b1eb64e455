"""Made-up results and runs, as an evaluation and a training could give them."""

import json
import math
from itertools import product

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
        "context_gain": gain, "retention": 1.0 - delta / gain, "num_tokens": 64.0, "num_predicted": 63.0,
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


BASELINES = {"dense": 1.0, "no-context": 0.0}
DOMAINS = {"Academic": 24, "Legal": 12, "Table QA": 8}
QA_TASKS = (
    "hellaswag", "winogrande", "piqa", "social_i_qa", "openbookqa", "arc_easy", "arc_challenge", "commonsense_qa",
)  # fmt: skip


def _question(model, method, keep, step, dataset, stratum, name, values):
    return Record(model, f"f-{model}", "float32", method, "{}", keep, step, None, dataset, stratum, name, "0", values)


def _draw(probability, *key):
    """1 with this probability, the same for the same key; models share the key, so their answers go together."""
    return float(np.random.default_rng(key).random() < probability)


def made_up_needle(
    models=("base", "control", "kvcat"), per_depth=20, keeps=(0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.35, 0.4, 0.5)
):
    """Passkeys at five depths: found more often with more slots, and near the middle."""
    records = []
    for instance, (rank, depth), model in product(range(per_depth), enumerate((0.0, 0.25, 0.5, 0.75, 1.0)), models):
        dense, stratum = _draw(0.95, rank, instance, 1), f"{depth:g}"
        work = [(method, seen, None, seen) for method, seen in BASELINES.items()]
        for keep, step in product(keeps, (0, 20, 100)):
            chance = (keep / 0.6) ** EASE[model] * (0.1 + step / 110.0) * (1.3 - abs(0.9 - 2.0 * depth) / 3)
            work.append(("gradient", keep, step, min(chance, 1.0)))
        for method, keep, step, chance in work:
            right = _draw(chance, rank, instance, 2, int(100 * keep)) * dense
            values = {
                "exact_match": right, "dense_exact_match": dense, "correct_prefix": max(right, 0.5 * dense),
                "dense_correct_prefix": dense, "nll": 1.5 - right, "nll_dense": 0.4 + COSTS[model], "nll_none": 2.3,
            }  # fmt: skip
            name = f"{stratum}-{instance}"
            records.append(_question(model, method, keep, step, "passkey", stratum, name, values))
    return records


def made_up_ruler(models=("base", "kvcat"), per_task=6, tasks=("niah_single", "vt", "cwe")):
    """Three tasks, one much easier than the others."""
    records = []
    for instance, (rank, task), model in product(range(per_task), enumerate(tasks), models):
        for method, keep in [*BASELINES.items(), ("snapkv", 0.1), ("snapkv", 0.4)]:
            share = keep ** (0.3 * (rank + 1) * EASE[model])
            values = {
                "string_match": share, "exact_match": float(share == 1.0), "dense_string_match": 1.0,
                "dense_exact_match": 1.0, "nll": 3.0 - share, "nll_dense": 2.0, "nll_none": 3.0,
            }  # fmt: skip
            records.append(_question(model, method, keep, None, "ruler-4096", task, f"{task}-{instance}", values))
    return records


def made_up_longbench(models=("base", "kvcat"), skill=0.55):
    """Long questions; at a skill of .25 nobody is better than guessing."""
    work = [("dense", 1.0, None), ("no-context", 0.0, None), ("truncated", 0.1, None), ("truncated", 0.5, None)]
    work += [("gradient", keep, step) for keep in (0.1, 0.5) for step in (0, 20, 50, 100)]
    records = []
    for (domain, (stratum, count)), model in product(enumerate(DOMAINS.items()), models):
        for row, (method, keep, step) in product(range(count), work):
            dense = _draw(skill, domain, row)
            chance = 0.25 + (skill - 0.25) * keep / EASE[model]
            right = dense if method == "dense" else _draw(chance, domain, row, 2, int(100 * keep), step or 0)
            values = {
                "accuracy": right, "nll_choice": 1.6 - right, "margin": right - 0.5, "choice": 0.0,
                "dense_accuracy": dense, "dense_nll_choice": 1.4,
            }  # fmt: skip
            name = f"{stratum}-{row}"
            records.append(_question(model, method, keep, step, "longbench-v2", stratum, name, values))
    return records


def made_up_qa(models=("base", "control", "router", "rand", "attn"), num_questions=60, tasks=QA_TASKS):
    """Eight tasks of different difficulty; every model errs on questions of its own as well."""
    records = []
    for (rank, task), row, (column, model) in product(enumerate(tasks), range(num_questions), enumerate(models)):
        right = _draw(0.3 + 0.06 * rank, rank, row) if row % 5 else _draw(0.5, rank, row, column)
        values = {"acc": right, "acc_per_char": right, "acc_per_token": right, "nll_per_char": 1.0 - 0.5 * right}
        values["truncated"] = 0.0
        records.append(_question(model, "dense", 1.0, None, "cloze", task, f"{task}-{row}", values))
    return records


SUFFIX_CONFIG = {"prefix_len": 192, "suffix_len": 64}


def write_results(path, records, evaluation="suffix", **settings):
    """A results folder with costs; settings go into its configuration."""
    settings = settings or (SUFFIX_CONFIG if evaluation == "suffix" else {})
    keeps = {}
    for record in records:
        if record.method not in (*BASELINES, "truncated") and record.keep_ratio not in keeps.setdefault(
            record.method, []
        ):
            keeps[record.method].append(record.keep_ratio)
    count = len({(record.document, record.example) for record in records})
    config = {
        "evaluation": evaluation, "dataset": records[0].dataset, "num_examples": count, **settings,
        "manifest": "0" * 64, "batch_size": 8, "seeds": [0],
        "methods": [
            {"name": name, "options": {}, "num_examples": count, "keep_ratios": own} for name, own in keeps.items()
        ],
    }  # fmt: skip
    with ResultsFolder(path, config) as folder:
        folder.append(records)
        for cost in made_up_costs(records, keeps):
            folder.append_cost(cost)
    events = [
        {"event": "start", "command": f"kvcat eval {evaluation} base control kvcat --keep 0.05", "kvcat": "0.1.0"},
        {"event": "end", "seconds": 12.5},
    ]
    (path / "provenance.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    return path


def made_up_costs(records, methods):
    """Two batches, of eight and of two examples, per model, method, keep ratio and step."""
    cells = dict.fromkeys((r.model, r.method, r.keep_ratio, r.step) for r in records if r.method in methods)
    for model, method, keep, step in cells:
        for examples in (8, 2):
            seconds = 0.05 * DIFFICULTY.get(method, 0.5) ** -2 * (1.0 if step is None else 0.02 + step / 20.0)
            cost = {
                "model": model, "method": method, "options": {}, "keep_ratio": keep, "seed": None, "dataset": "made-up",
                "examples": examples, "tokens": 192, "dense_bytes": 4096 * examples, "step": step,
                "seconds": seconds * examples, "peak_mib": 3.5 * examples, "bytes": int(4096 * keep) * examples,
            }  # fmt: skip
            speed = {"ttft": 0.1, "ttft_dense": 0.2, "tokens_per_s": 30.0, "tokens_per_s_dense": 20.0}
            yield cost | (speed if examples == 8 and step in (None, 100) else {})


def write_run(path, policy):
    path.mkdir(parents=True)
    lines = made_up_metrics(policy)
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path
