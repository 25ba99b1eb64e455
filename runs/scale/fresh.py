"""A model of kvcat-base's shape with random weights: python runs/scale/fresh.py FOLDER SEED."""

import argparse

import torch
from transformers import AutoModelForCausalLM

import kvcat
from kvcat.errors import run_script
from kvcat.models import save


def main() -> None:
    """Write the model and kvcat-base's tokenizer, whole or not at all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder")
    parser.add_argument("seed", type=int)
    options = parser.parse_args()
    model, tokenizer = kvcat.load("kvcat-base")
    torch.manual_seed(options.seed)
    fresh = AutoModelForCausalLM.from_config(model.config, dtype=torch.float32)
    save(fresh, tokenizer, options.folder)


if __name__ == "__main__":
    run_script(main)
