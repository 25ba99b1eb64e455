"""The product of a run: an ordinary Hugging Face folder with a card that tells how it was made."""

import copy
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kvcat import __version__
from kvcat.models import save
from kvcat.training.config import TrainConfig


def export(
    model: PreTrainedModel,
    routers: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    config: TrainConfig,
    validation: dict[str, Any],
) -> Path:
    """Write ``export/`` (model, tokenizer, card) and ``routers.safetensors`` beside it; returns the export folder.

    Args:
        model: the trained model; it is not changed.
        routers: the policies' modules.
        tokenizer: saved with the model.
        config: told in the card.
        validation: the last validation record, told in the card.
    """
    run = Path(config.output)
    target, partial = run / "export", run / ".partial-export"
    for left in run.glob(".*partial-*"):  # by a kill in the middle of an export
        shutil.rmtree(left, ignore_errors=True)
    dtype = getattr(torch, config.export_dtype)
    save(model if dtype == torch.float32 else copy.deepcopy(model).to(dtype), tokenizer, partial)
    (partial / "README.md").write_text(model_card(config, validation))
    shutil.rmtree(target, ignore_errors=True)
    partial.rename(target)
    if state := {k: v.detach().cpu().contiguous() for k, v in routers.state_dict().items()}:
        save_file(state, run / "routers.safetensors")
    return target


def model_card(config: TrainConfig, validation: dict[str, Any]) -> str:
    """The README.md of an exported checkpoint: what it is, how it was made, what it cost in dense loss."""
    kind = "plain next-token training (the control)" if config.policy == "control" else "KV-CAT"
    losses = "\n".join(
        f"- {name}: {value:.4f}"
        for name, value in validation.items()
        if name not in ("step",) and isinstance(value, float)
    )
    kept = ", ".join(f"layer {layer}: {value:.2f}" for layer, value in validation.get("kept", {}).items())
    masked = (
        ""
        if config.policy == "control"
        else f"""
The masked pass hid KV slots with the `{config.policy}` policy (target keep ratio {config.target_keep}); the routers are
not part of this checkpoint. Kept fraction at the last validation: {kept}.
"""
    )
    return f"""---
library_name: transformers
pipeline_tag: text-generation
tags: [kv-cache, kv-cat]
---

# {Path(config.output).name}

Continued from `{config.model}` with {kind} by kvcat {__version__}. It loads with plain transformers and needs no code
of ours: `AutoModelForCausalLM.from_pretrained(folder)`.
{masked}
- data: `{config.data}`, sequences of {config.seq_len} tokens, seed {config.seed}
- steps: {config.max_steps} of {config.tokens_per_step} tokens ({config.max_steps * config.tokens_per_step} in all)
- learning rate: peak {config.peak_lr}, floor {config.min_lr}, warm-up {config.warmup_steps} steps; AdamW, betas
  {config.betas}, weight decay {config.weight_decay}, compute in {config.dtype}

Validation after the last step (nats per token on held-out documents):

{losses}

The whole configuration stands in `config.json` of the run's folder.
"""
