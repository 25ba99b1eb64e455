"""What the routers of a run learned to hide: the kept fraction by kind of token.

    python runs/smollm2/hidden.py RUN --data held-out.parquet [--documents 12]

For each group of layers that share a router, the table shows: the fraction of slots kept, of all
tokens and by kind; the share of the layers' dense attention to all tokens but the first that goes
to kept slots; and the largest share that as many slots could receive. A slot's attention is the
mean over the queries that see it; the last 32 slots are left out.
"""

import argparse
import itertools
from collections import defaultdict
from pathlib import Path

import safetensors.torch
import torch
from tqdm import tqdm

import kvcat
from kvcat.compress.base import received_mass
from kvcat.data import split_documents
from kvcat.errors import InputError, run_script
from kvcat.files import check_seal, read_json
from kvcat.models import MaskedPass
from kvcat.training import TrainConfig
from kvcat.training.objective import make_masked_pass

LAST = 32  # tokens at the end that are left out, because few queries see them


def kinds(pieces: list[str], ids: list[int]) -> list[set[str]]:
    """The kinds that each token belongs to."""
    kinds_of_tokens = []
    seen = set()
    for place, (piece, token) in enumerate(zip(pieces, ids, strict=True)):
        text = piece.strip()
        names = {
            "all",
            "seen before" if token in seen else "first time",
            f"quarter {4 * place // len(ids) + 1}",
        }
        if "\n" in piece:
            names.add("line end")
        elif not any(letter.isalnum() for letter in text):
            names.add("punctuation")
        elif piece[0].isspace():
            names.add(
                "name, capital"
                if text[:1].isupper()
                else "short word"
                if len(text) < 4
                else "long word"
            )
        else:
            names.add("inside a word")
        seen.add(token)
        kinds_of_tokens.append(names)
    return kinds_of_tokens


@torch.no_grad()
def kept_slots(
    masked_pass: MaskedPass, ids: torch.Tensor, config: TrainConfig
) -> dict[int, torch.Tensor]:
    """Whether each slot of a text is kept, by the first layer of each group.

    Where only suffixes were masked in training (``prefix_range``), the routers read the dense pass,
    and so they do here: the suffix is the last token, which has no slot.
    """
    prefix_len = None if config.prefix_range is None else ids.shape[1] - 1
    keep = masked_pass.hidden(ids, prefix_len=prefix_len).keep
    return {start: kept[0] > 0 for start, kept in keep.items()}


@torch.no_grad()
def main() -> None:
    """Print one table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path, help="folder of a run that is exported")
    parser.add_argument("--data", required=True)
    parser.add_argument("--documents", type=int, default=12)
    parser.add_argument("--tokens", type=int, default=1024)
    options = parser.parse_args()
    model, tokenizer = kvcat.load(options.run / "export")
    config = TrainConfig.from_dict(read_json(options.run / "config.json"))
    masked_pass = make_masked_pass(model, config)
    if masked_pass is None:
        parser.error(f"{options.run} has no masked pass")
    routers = options.run / "routers.safetensors"
    if not routers.exists():
        raise InputError(f"{options.run} has no routers: its policy is {config.policy}")
    content = routers.read_bytes()
    check_seal(content, routers)
    masked_pass.load_state_dict(safetensors.torch.load(content))
    starts = [*masked_pass.group_starts, model.config.num_hidden_layers]
    counts: dict[str, list[int]] = defaultdict(lambda: [0] * len(starts))
    shares = {start: [0.0, 0.0] for start in starts[:-1]}
    texts = [(d.id, d.text) for d in split_documents(options.data, "all")][: options.documents]
    for name, text in tqdm(texts):
        middle = text[len(text) // 2 :][: 12 * options.tokens]
        ids = tokenizer(middle, return_tensors="pt", add_special_tokens=False).input_ids[
            :, : options.tokens
        ]
        if ids.shape[1] < options.tokens:
            raise InputError(
                f"the second half of {name} has {ids.shape[1]} tokens, fewer than the "
                f"{options.tokens} asked"
            )
        keep = kept_slots(masked_pass, ids, config)
        mass = received_mass(kvcat.trace(model, ids, supervision="self"), 0)
        inner = slice(1, ids.shape[1] - LAST)
        for start, stop in itertools.pairwise(starts):
            seen_by = torch.arange(ids.shape[1], 0, -1)
            layer_mass = torch.stack([masses[0].mean(0) for masses in mass[start:stop]])
            mean_mass = (layer_mass.mean(0) / seen_by)[inner]
            kept = keep[start][inner]
            largest = mean_mass.sort(descending=True).values[: int(kept.sum())]
            for place, share in enumerate((mean_mass[kept].sum(), largest.sum())):
                shares[start][place] += (share / mean_mass.sum()).item() / len(texts)
        tokens_with_slot = ids[0, : len(keep[starts[0]])].tolist()
        pieces = [tokenizer.decode([token]) for token in tokens_with_slot]
        for place, token_kinds in enumerate(kinds(pieces, tokens_with_slot)):
            for kind in token_kinds:
                counts[kind][-1] += 1
                for group, start in enumerate(starts[:-1]):
                    counts[kind][group] += int(keep[start][place])
    groups = [f"layers {start} to {stop - 1}" for start, stop in itertools.pairwise(starts)]
    print("| kept | tokens | " + " | ".join(groups) + " |\n|" + "---|" * (len(starts) + 1))
    for kind, (*kept, total) in sorted(counts.items(), key=lambda row: (row[0] != "all", row[0])):
        print(
            f"| {kind} | {total} | " + " | ".join(f"{count / total:.2f}" for count in kept) + " |"
        )
    for place, name in enumerate(("attention to kept slots", "largest possible")):
        print(
            f"| {name} | | "
            + " | ".join(f"{shares[start][place]:.2f}" for start in starts[:-1])
            + " |"
        )


if __name__ == "__main__":
    run_script(main)
