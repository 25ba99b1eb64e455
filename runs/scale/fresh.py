"""A model of kvcat-base's shape with random weights: python runs/scale/fresh.py FOLDER SEED."""

import sys

import torch
from transformers import AutoModelForCausalLM

import kvcat


def main(folder: str, seed: str) -> None:
    """Write the model and kvcat-base's tokenizer."""
    model, tokenizer = kvcat.load("kvcat-base")
    torch.manual_seed(int(seed))
    fresh = AutoModelForCausalLM.from_config(model.config, dtype=torch.float32)
    fresh.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    main(*sys.argv[1:])
