"""Is the price of compressibility of first or second order? The cosine of two gradients.

    python runs/smollm2/gradients.py MODEL... --data held-out.parquet [--windows 8]

For each document, over evenly spaced windows of it and random masks of half of the slots: the
gradient g of the dense next-token loss and the gradient h of the masked KL, computed in bfloat16 as
in training. If the population gradients agree (cosine above 0), lowering the masked KL costs no
dense loss in first order. Cosines of population gradients are estimated from pairs of different
documents, so that the noise of one document does not enter:

    mean_{i != j} g_i.h_j / sqrt(mean_{i != j} g_i.g_j  mean_{i != j} h_i.h_j)

The interval is that of the jackknife over documents. Gradients are held as sketches of 2^20
numbers, which keep inner products to about a thousandth of the product of the norms.
"""

import argparse
import json
import sys

import numpy as np
import torch
from scipy.stats import t
from torch.nn.functional import pad
from tqdm import tqdm

import kvcat
from kvcat.data import split_documents
from kvcat.errors import InputError, run_script
from kvcat.training import TrainConfig
from kvcat.training.objective import Objective

SIZE = 2**20


def sketch(model: torch.nn.Module) -> torch.Tensor:
    """The gradient of all parameters with random signs, every parameter's folded to SIZE places and
    added up.
    """
    sums = torch.zeros(SIZE, dtype=torch.float64)
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        signs = (
            torch.randint(2, (parameter.numel(),), generator=generator, dtype=torch.int8) * 2 - 1
        )
        if parameter.grad is not None:
            signed = pad(parameter.grad.flatten() * signs, (0, -len(signs) % SIZE))
            sums += signed.view(-1, SIZE).sum(0, dtype=torch.float64)
    return sums


def window_starts(name: str, num_tokens: int, options: argparse.Namespace) -> np.ndarray:
    """The first tokens of the evenly spaced windows of a document.

    Raises:
        InputError: the document is shorter than a window.
    """
    if num_tokens < options.tokens:
        raise InputError(
            f"{name} has {num_tokens} tokens, fewer than one window of {options.tokens}"
        )
    return np.linspace(0, num_tokens - options.tokens, options.windows + 2).astype(int)[1:-1]


def gradients(
    model_name: str, texts: list[tuple[str, str]], options: argparse.Namespace
) -> torch.Tensor:
    """Sketches (document, loss, size) of the gradients of dense loss and masked KL."""
    model, tokenizer = kvcat.load(model_name)
    common = {"model": model_name, "output": "-", "seq_len": options.tokens, "budget_weight": 0.0}
    dense = Objective(model, TrainConfig(**common, policy="control"))
    masked = Objective(model, TrainConfig(**common, policy="random", anchor_weight=0.0))
    rows = []
    for index, (name, text) in enumerate(tqdm(texts, desc=model_name)):
        ids = tokenizer(text, return_tensors="pt").input_ids[0]
        starts = window_starts(name, len(ids), options)
        pair = []
        for objective in (dense, masked):
            model.zero_grad(set_to_none=True)
            for number, start in enumerate(starts):
                generator = torch.Generator().manual_seed(index * options.windows + number)
                with torch.autocast("cpu", torch.bfloat16):
                    loss, _ = objective(
                        ids[None, start : start + options.tokens], [generator], None
                    )
                loss.backward()
            pair.append(sketch(model))
        rows.append(torch.stack(pair))
    return torch.stack(rows)


def cosine(rows: torch.Tensor, chosen: np.ndarray) -> float:
    """Cosine of the population gradients from pairs of different documents among the chosen
    ones.
    """
    g = rows[:, 0]
    h = rows[:, 1]
    apart = torch.tensor(chosen[:, None] != chosen[None, :])
    cross, dense, masked = (
        float(m[chosen][:, chosen][apart].mean()) for m in (g @ h.T, g @ g.T, h @ h.T)
    )
    return cross / (dense * masked) ** 0.5 if min(dense, masked) > 0 else float("nan")


def half_width(without_one: list[float]) -> float:
    """Half of the 95 % interval of a figure, from its values without one document each.

    The jackknife's standard error times Student's t with as many degrees of freedom as there are
    documents less one.
    """
    count = len(without_one)
    error = (count - 1) ** 0.5 * float(np.std(without_one))
    return float(t.ppf(0.975, count - 1)) * error


def main() -> None:
    """Print one JSON line for each model."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", nargs="+")
    parser.add_argument("--data", required=True)
    parser.add_argument("--documents", type=int, default=12)
    parser.add_argument("--windows", type=int, default=8, help="of each document")
    parser.add_argument("--tokens", type=int, default=512, help="of each window")
    options = parser.parse_args()
    texts = [(d.id, d.text) for d in split_documents(options.data, "all")][: options.documents]
    for model in options.models:
        rows = gradients(model, texts, options)
        everyone = np.arange(len(rows))
        value = cosine(rows, everyone)
        half = half_width([cosine(rows, np.delete(everyone, one)) for one in everyone])
        figures = {"cosine": value, "low": value - half, "high": value + half}
        counts = {"documents": len(rows), "windows": options.windows, "tokens": options.tokens}
        print(json.dumps({"model": model, **figures, **counts}))
        sys.stdout.flush()


if __name__ == "__main__":
    run_script(main)
