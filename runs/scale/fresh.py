"""A model of kvcat-base's shape with random weights: python runs/scale/fresh.py FOLDER SEED."""

import argparse

import torch
from transformers import AutoModelForCausalLM

import kvcat
from kvcat.errors import run_script


def main() -> None:
    """Write the model and kvcat-base's tokenizer."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder")
    parser.add_argument("seed", type=int)
    options = parser.parse_args()
    model, tokenizer = kvcat.load("kvcat-base")
    torch.manual_seed(options.seed)
    fresh = AutoModelForCausalLM.from_config(model.config, dtype=torch.float32)
    fresh.save_pretrained(options.folder)
    tokenizer.save_pretrained(options.folder)


if __name__ == "__main__":
    run_script(main)
