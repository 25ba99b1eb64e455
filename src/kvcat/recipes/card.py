"""What the base model can do, measured on held-out files, and the card that tells it."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from kvcat.data import split_documents
from kvcat.evals import provenance, windows_from_documents
from kvcat.models import load
from kvcat.training import TrainConfig
from kvcat.types import Float, Int, Tensor

EDGES = (1, 16, 64, 128, 256, 512, 768, 1024)
WINDOWS = 64


@torch.no_grad()
def token_losses(model: PreTrainedModel, tokens: Int[Tensor, "batch tokens"]) -> Float[Tensor, "batch positions"]:
    """Next-token loss of positions 2.., nats, a few rows at a time."""
    parts = []
    for rows in tokens.split(4):
        logits = model(input_ids=rows, use_cache=False).logits[:, :-1].float()
        parts.append(nn.functional.cross_entropy(logits.transpose(1, 2), rows[:, 1:], reduction="none"))
    return torch.cat(parts)


def measure(folder: Path | str, *, split: str = "test") -> dict[str, Any]:
    """Loss by position and context gain of a model on windows of held-out installed files.

    The context gain is the NLL of the last 256 tokens without the 768 before them minus the NLL with them, over
    the suffix tokens 2.., nats per token.

    Args:
        folder: the model.
        split: of the installed Python sources.
    """
    model, tokenizer = load(folder)
    documents = [(d.id, d.text) for d in split_documents("installed", split)]  # type: ignore[arg-type]
    windows = windows_from_documents(
        documents, tokenizer, prefix_len=768, suffix_len=256, limit=WINDOWS, per_document=1, seed=0
    )
    tokens = torch.tensor([w.tokens for w in windows])
    dense, alone = token_losses(model, tokens), token_losses(model, tokens[:, 768:])
    means = {(low, high - 1): dense[:, low - 1 : high - 1].mean().item() for low, high in pairwise(EDGES)}
    bins = {f"{low}-{high}": loss for (low, high), loss in means.items()}
    return {
        "windows": len(windows),
        "parameters": sum(p.numel() for p in model.parameters()),
        "loss": dense.mean().item(),
        "loss_by_position": bins,
        "context_gain": (alone - dense[:, 768:]).mean().item(),
    }


def base_card(config: TrainConfig, measured: dict[str, Any], hours: float) -> str:
    """The base model's README.md: what it is, how it was made, what it can do.

    Args:
        config: of the pretraining.
        measured: by ``measure``.
        hours: wall-clock time of the training steps.
    """
    facts = provenance()
    tokens = config.max_steps * config.tokens_per_step
    rows = "\n".join(f"| {span} | {loss:.3f} |" for span, loss in measured["loss_by_position"].items())
    return f"""---
library_name: transformers
license: apache-2.0
pipeline_tag: text-generation
---

# kvcat-base

A Qwen2-architecture model of {measured["parameters"]:,} parameters (6 layers, width 96, 4 query heads, 2 key-value
heads, byte-level BPE of 1,024 tokens, context 1,024) for trying KV cache compression on any machine. It
writes Python badly.

- data: the Python files of the standard library and of kvcat's dependencies as installed, split by a hash of the path;
  validation and test files were not trained on
- command: `kvcat demo --from-scratch` (recipe `kvcat.recipes.base.pretraining`, seed {config.seed})
- {config.max_steps} steps of {config.tokens_per_step} tokens, {tokens / 1e6:.0f} million in all,
  {tokens / measured["parameters"]:.0f} per parameter; AdamW, peak learning rate {config.peak_lr}, compute in
  {config.dtype}
- cost: {hours:.1f} hours on {facts["cpu"]} ({facts["platform"]}), shared with other work; torch {facts["torch"]},
  transformers {facts["transformers"]}, Python {facts["python"]}

Held out (test files that share at most 30 % of their lines with training files, {measured["windows"]} windows of 1,024
tokens, one a file): {measured["loss"]:.3f} nats per token, by position:

| position | nats per token |
|---|---|
{rows}

Context gain of 768 tokens before a 256-token suffix: {measured["context_gain"]:.3f} nats per token.
"""
