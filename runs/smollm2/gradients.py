"""Is the price of compressibility first or second order: the angle between two gradients on held-out text.

    python runs/smollm2/gradients.py MODEL... --data held-out.parquet [--documents 12]

For each document and a random mask of half of the slots: the gradient g of the dense next-token loss
and the gradient h of the masked KL. Where the population gradients agree (cosine above 0), lowering the
masked KL costs no dense loss in first order. Cosines of population gradients are estimated from pairs
of different documents, so noise of one document does not enter:

    mean_{i != j} g_i.h_j / sqrt(mean_{i != j} g_i.g_j  mean_{i != j} h_i.h_j)

The interval resamples documents. Gradients are held as sketches of 2^20 numbers, which keep inner products
to about a thousandth of the product of the norms.
"""

import argparse
import json
import sys

import numpy as np
import torch
from torch.nn.functional import pad
from tqdm import tqdm

import kvcat
from kvcat.data import split_documents
from kvcat.training import TrainConfig
from kvcat.training.objective import Objective

SIZE = 2**20


def sketch(model: torch.nn.Module) -> torch.Tensor:
    """The gradient of all parameters with random signs, every parameter's folded to SIZE places and added up."""
    found = torch.zeros(SIZE, dtype=torch.float64)
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        signs = torch.randint(2, (parameter.numel(),), generator=generator, dtype=torch.int8) * 2 - 1
        if parameter.grad is not None:
            signed = pad(parameter.grad.flatten() * signs, (0, -len(signs) % SIZE))
            found += signed.view(-1, SIZE).sum(0, dtype=torch.float64)
    return found


def gradients(model_name: str, texts: list[tuple[str, str]], options: argparse.Namespace) -> torch.Tensor:
    """Sketches (document, loss, size) of the gradients of dense loss and masked KL."""
    model, tokenizer = kvcat.load(model_name)
    rows = []
    for index, (_, text) in enumerate(tqdm(texts, desc=model_name)):
        middle = len(text) // 2
        ids = tokenizer(text[middle : middle + 12 * options.tokens], return_tensors="pt").input_ids[:, : options.tokens]
        pair = []
        for weights in ({"anchor_weight": 1.0, "mask_weight": 0.0}, {"anchor_weight": 0.0, "mask_weight": 1.0}):
            config = TrainConfig(
                model=model_name, output="-", policy="random", seq_len=ids.shape[1], budget_weight=0.0, **weights
            )
            objective = Objective(model, config)
            model.zero_grad(set_to_none=True)
            loss, _ = objective(ids, [torch.Generator().manual_seed(index)], None)
            loss.backward()
            pair.append(sketch(model))
        rows.append(torch.stack(pair))
    return torch.stack(rows)


def cosine(rows: torch.Tensor, chosen: np.ndarray) -> float:
    """Cosine of the population gradients from pairs of different documents among the chosen ones."""
    g, h = rows[:, 0], rows[:, 1]
    apart = torch.tensor(chosen[:, None] != chosen[None, :])
    cross, dense, masked = (float(m[chosen][:, chosen][apart].mean()) for m in (g @ h.T, g @ g.T, h @ h.T))
    return cross / (dense * masked) ** 0.5 if min(dense, masked) > 0 else float("nan")


def main() -> None:
    """Print one JSON line for each model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+")
    parser.add_argument("--data", required=True)
    parser.add_argument("--documents", type=int, default=12)
    parser.add_argument("--tokens", type=int, default=512)
    options = parser.parse_args()
    texts = [(d.id, d.text) for d in split_documents(options.data, "all")][: options.documents]
    draw = np.random.default_rng(0)
    for model in options.models:
        rows = gradients(model, texts, options)
        everyone = np.arange(len(rows))
        samples = [cosine(rows, draw.choice(everyone, len(everyone))) for _ in range(1000)]
        low, high = np.nanquantile(samples, [0.025, 0.975])
        found = {"cosine": cosine(rows, everyone), "low": low, "high": high}
        print(json.dumps({"model": model, **found, "documents": len(rows), "tokens": options.tokens}))
        sys.stdout.flush()


if __name__ == "__main__":
    main()
