"""Models between two of the same shape: how gain and price grow on the way from the control to a trained model.

    python runs/smollm2/between.py CONTROL TRAINED OUTPUT [--share 0.5]

Writes the model whose weights are (1 - share) of the control's plus share of the trained one's (Wortsman et al. 2022,
arXiv:2109.01903), an ordinary folder for `kvcat eval`. A price of first order is halved half way, one of second order
quartered.
"""

import argparse

import torch

import kvcat


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("control")
    parser.add_argument("trained")
    parser.add_argument("output", help="folder of the new model")
    parser.add_argument("--share", type=float, default=0.5, help="of the trained model")
    options = parser.parse_args()
    (model, tokenizer), (trained, _) = (
        kvcat.load(name, dtype="float32") for name in (options.control, options.trained)
    )
    with torch.no_grad():
        for ours, theirs in zip(model.parameters(), trained.parameters(), strict=True):
            ours.lerp_(theirs, options.share)
    model.save_pretrained(options.output)
    tokenizer.save_pretrained(options.output)


if __name__ == "__main__":
    main()
