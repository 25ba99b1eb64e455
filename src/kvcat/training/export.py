"""Exports a run as an ordinary Hugging Face folder with a card that says how the model was made."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save as safetensors_bytes

from kvcat import __version__
from kvcat.files import (
    CHECKSUM,
    NO_SEAL,
    atomic_write,
    check_new_folder,
    check_no_links,
    full_path,
    read_json,
    read_jsonl,
    sealed,
    write_sums,
)
from kvcat.models import load, save
from kvcat.training.checkpoint import load_module, verify
from kvcat.training.config import TrainConfig
from kvcat.training.log import METRICS_FILE
from kvcat.training.objective import Objective
from kvcat.training.run_folder import CONFIG_FILE, check_start

# the numbers of a validation record, with their units
_VALIDATION_UNITS = {
    "dense_loss": "nats per token",
    "dense_suffix_loss": "nats per token after the split, as masked_loss and kl",
    "masked_loss": "nats per token",
    "kl": "nats per token",
    "top1": "of the tokens",
    "budget": "",
}


def export_checkpoint(checkpoint: Path, target: Path) -> Path:
    """Write a checkpoint ``step-N`` of a run, live or ended, as an ordinary Hugging Face folder.

    The routers go into a file next to that folder.

    Args:
        target: folder for model, tokenizer and card: absent, empty, or the ``export`` folder of the
            run, which is replaced.

    Returns:
        The folder.

    Raises:
        InputError: the checkpoint is damaged, the run started from another model, the folder
            contains something else or cannot be written.
    """
    step = verify(checkpoint)["step"]
    run = checkpoint.parent.parent
    check_no_links(run)
    config = TrainConfig.from_dict(read_json(run / CONFIG_FILE))
    is_of_run = full_path(target) == full_path(run / "export")
    if not is_of_run:
        check_new_folder(target)
    model, tokenizer = load(config.model)
    check_start(run, model)
    # a frozen teacher would be a copy of the model
    objective = Objective(model, replace(config, teacher="self"))
    load_module(checkpoint, objective)
    validation = _last_validation(run, step)
    with atomic_write(target) as partial:
        save(model.to(getattr(torch, config.export_dtype)), tokenizer, partial)
        card = model_card(config, step, validation)
        (partial / "README.md").write_text(card, encoding="utf-8")
        write_sums(partial)
    routers = {} if objective.masked_pass is None else objective.masked_pass.state_dict()
    if routers:
        name = "routers.safetensors" if is_of_run else f"{target.name}-routers.safetensors"
        tensors = {key: tensor.contiguous() for key, tensor in routers.items()}
        content = safetensors_bytes(tensors, metadata={CHECKSUM: NO_SEAL})
        with atomic_write(target.with_name(name)) as partial:
            partial.write_bytes(sealed(content))
    return target


def _last_validation(run: Path, step: int) -> dict[str, Any]:
    """The last validation record up to a step; empty if there is none."""
    last: dict[str, Any] = {}
    for record in read_jsonl(run / METRICS_FILE):
        if record["kind"] == "validation" and record["step"] <= step:
            last = record
    return last


def model_card(config: TrainConfig, steps: int, validation: dict[str, Any]) -> str:
    """The README.md of an exported checkpoint: its origin, its training and its losses."""
    kind = "plain next-token training (the control)" if config.policy == "control" else "KV-CAT"
    losses = "\n".join(
        f"- {name}: {validation[name]:z.4f} {unit}".rstrip()
        for name, unit in _VALIDATION_UNITS.items()
        if name in validation
    )
    kept_by_layer = validation.get("kept", {}).items()
    kept = ", ".join(f"layer {layer}: {value:.2f}" for layer, value in kept_by_layer)
    num_tokens = steps * config.tokens_per_step
    masked = f"""
The masked pass hid KV slots with the `{config.policy}` policy (target keep ratio
{config.target_keep}), which is not part of this checkpoint. Kept fraction at the last validation:
{kept}.
"""
    return f"""---
library_name: transformers
pipeline_tag: text-generation
tags: [kv-cache, kv-cat]
---

# {Path(config.output).name}

Continued from `{config.model}` with {kind} by kvcat {__version__}. It loads with plain
transformers and needs no code of ours: `AutoModelForCausalLM.from_pretrained(folder)`.
{"" if config.policy == "control" else masked}
- data: `{config.data}`, sequences of {config.seq_len} tokens, seed {config.seed}
- steps: {steps} of {config.max_steps}, {config.tokens_per_step} tokens each ({num_tokens} in all)
- learning rate: peak {config.peak_lr}, floor {config.min_lr}, warm-up {config.warmup_steps} steps;
  AdamW, betas {config.betas}, weight decay {config.weight_decay}, compute in {config.dtype}

Validation after step {validation.get("step", 0)}, on held-out documents:

{losses}

The whole configuration is in `config.json` of the run's folder.
"""
