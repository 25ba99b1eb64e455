"""The small base model that comes with the package: how it was made, and the card that says what it can do."""

import dataclasses
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from kvcat.data import Document, hash_order, open_documents, split_of
from kvcat.evals.suffix import make_task
from kvcat.files import read_jsonl
from kvcat.models import load
from kvcat.provenance import provenance
from kvcat.training.config import TrainConfig
from kvcat.training.loop import train
from kvcat.types import Float, Int, Tensor

VOCAB_SIZE = 1024
CONTEXT = 1024
EOS = "<|endoftext|>"
TOKENIZER_DOCUMENTS = 800
POSITIONS = (1, 16, 64, 128, 256, 512, 768, 1024)
WINDOWS = 64


def base_config() -> Qwen2Config:
    """The architecture: Qwen2 with grouped-query attention, 6 layers, width 96, about 0.7 million parameters."""
    return Qwen2Config(
        vocab_size=VOCAB_SIZE, hidden_size=96, num_hidden_layers=6, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=256, max_position_embeddings=CONTEXT, tie_word_embeddings=True, bos_token_id=None,
        eos_token_id=0,
    )  # fmt: skip


def train_tokenizer(documents: list[Document]) -> PreTrainedTokenizerFast:
    """A byte-level BPE of 1,024 tokens, learned from the documents; every byte has a token, so any text encodes."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((document.text for document in documents), trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=EOS, pad_token=EOS, model_max_length=CONTEXT,
        clean_up_tokenization_spaces=False,
    )  # fmt: skip


def write_untrained(folder: Path, seed: int) -> None:
    """An untrained model and its tokenizer as a Hugging Face folder; the seed draws weights and tokenizer documents."""
    training = [d for d in open_documents("installed") if split_of(d.id) == "train"]
    tokenizer = train_tokenizer(hash_order(training, seed)[:TOKENIZER_DOCUMENTS])
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = Qwen2ForCausalLM(base_config())
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def pretraining(output: Path, *, max_steps: int = 5600, seed: int = 0) -> TrainConfig:
    """The recipe of the base: plain next-token training on the installed Python sources.

    23 million tokens for 0.7 million parameters at the default number of steps.
    """
    return TrainConfig(
        model=str(output / "untrained"),
        output=str(output / "run"),
        data="installed",
        policy="control",
        seq_len=CONTEXT,
        batch_size=4,
        max_steps=max_steps,
        warmup_steps=300,
        peak_lr=5e-3,
        min_lr=1e-4,
        weight_decay=0.1,
        seed=seed,
        dtype="bfloat16",
        export_dtype="bfloat16",
        log_every=10,
        validation_every=250,
        validation_sequences=32,
        checkpoint_every=250,
    )


def pretrain(output: Path, *, device: str = "cpu") -> Path:
    """Pretrain the base from random weights, or continue where it stopped; returns its Hugging Face folder."""
    untrained, config = output / "untrained", dataclasses.replace(pretraining(output), device=device)
    if not (untrained / "tokenizer.json").exists():
        write_untrained(untrained, seed=config.seed)
    result = train(config)
    steps = [r for r in read_jsonl(result.folder / "metrics.jsonl") if r["kind"] == "train"]
    hours = sum(config.tokens_per_step / r["tokens_per_s"] for r in steps) * config.log_every / 3600
    (result.export / "README.md").write_text(base_card(config, measure(result.export), hours))
    return result.export


@torch.no_grad()
def token_losses(model: PreTrainedModel, tokens: Int[Tensor, "batch tokens"]) -> Float[Tensor, "batch positions"]:
    """Next-token loss of positions 2.., nats, a few rows at a time."""
    parts = []
    for rows in tokens.split(4):
        logits = model(input_ids=rows, use_cache=False).logits[:, :-1].float()
        parts.append(nn.functional.cross_entropy(logits.transpose(1, 2), rows[:, 1:], reduction="none"))
    return torch.cat(parts)


def measure(folder: Path | str) -> dict[str, Any]:
    """Loss by position and context gain of a model on windows of held-out installed files.

    The context gain is the NLL of the last 256 tokens without the 768 before them minus the NLL with them, over
    the suffix tokens 2.., nats per token.
    """
    model, tokenizer = load(folder)
    windows = make_task(tokenizer, windows=WINDOWS, per_document=1).examples
    tokens = torch.tensor([window.tokens for window in windows])
    dense, alone = token_losses(model, tokens), token_losses(model, tokens[:, 768:])
    means = {(low, high - 1): dense[:, low - 1 : high - 1].mean().item() for low, high in pairwise(POSITIONS)}
    bins = {f"{low}-{high}": loss for (low, high), loss in means.items()}
    return {
        "windows": len(windows),
        "parameters": sum(p.numel() for p in model.parameters()),
        "loss": dense.mean().item(),
        "loss_by_position": bins,
        "context_gain": (alone - dense[:, 768:]).mean().item(),
    }


def base_card(config: TrainConfig, measured: dict[str, Any], hours: float) -> str:
    """The base model's README.md: what it is, how it was made, what ``measure`` gave, hours of training."""
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
