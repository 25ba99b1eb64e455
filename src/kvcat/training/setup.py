"""What is checked and prepared before the first step."""

import shutil
from pathlib import Path

from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kvcat.data import Document, TokenTable, hash_order, open_documents, pack, split_of, split_position
from kvcat.errors import InputError
from kvcat.training.config import TrainConfig

CONFIG_FILE = "config.json"


def check_folder(run: Path, config: TrainConfig) -> None:
    """Accept a folder that is absent, empty, or of the same run; nothing is written.

    Raises:
        InputError: the folder is not empty and belongs to something else, or to a run with another configuration.
    """
    existing = run / CONFIG_FILE
    if existing.exists():
        try:
            previous = TrainConfig.load(existing)
        except InputError:
            raise InputError(f"output folder {run} is not empty and holds no run of ours") from None
        for name in previous.__dataclass_fields__:
            if getattr(previous, name) != getattr(config, name) and name != "output":
                raise InputError(
                    f"{run} holds another run: its {name} is {getattr(previous, name)!r}, not {getattr(config, name)!r}"
                )
        return
    if run.exists() and (not run.is_dir() or any(run.iterdir())):
        raise InputError(f"output folder {run} is not empty and holds no run of ours")


def claim_folder(run: Path, config: TrainConfig) -> None:
    """Make the run's folder with its configuration, whole or not at all, unless it is there.

    Raises:
        InputError: the folder cannot be made.
    """
    if (run / CONFIG_FILE).exists():
        return
    try:
        run.mkdir(parents=True, exist_ok=True)
        config.save(run / CONFIG_FILE)
    except OSError as error:
        raise InputError(f"cannot make output folder {run}: {error.strerror}") from None


def check_length(model: PreTrainedModel, seq_len: int) -> None:
    """Refuse sequences longer than the model's positions.

    Raises:
        InputError: seq_len exceeds them.
    """
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if positions is not None and seq_len > positions:
        raise InputError(f"seq_len {seq_len} exceeds the model's {positions} positions")


def check_disk(run: Path, model: nn.Module, keep_checkpoints: int) -> None:
    """Refuse to start where checkpoints and export will not fit.

    Args:
        run: the run's folder; it need not exist.
        model: what is saved, in float32, with two moments of the optimizer.
        keep_checkpoints: checkpoints that stay; one more is there while it is written.

    Raises:
        InputError: less free space than the run will need.
    """
    weights = sum(p.numel() for p in model.parameters()) * 4
    needed = weights * (3 * (keep_checkpoints + 1) + 1)
    there = next(folder for folder in (run.absolute(), *run.absolute().parents) if folder.is_dir())
    free = shutil.disk_usage(there).free
    if free < needed:
        raise InputError(
            f"no disk space for {run}: {free / 1e6:,.1f} MB free, checkpoints and export need {needed / 1e6:,.1f} MB"
        )


def training_tables(config: TrainConfig, tokenizer: PreTrainedTokenizerBase) -> tuple[TokenTable, TokenTable]:
    """Packed training and validation sequences, disjoint by document.

    A Hub data set is streamed in its own order, as far as the run reads; everything else is read whole, and the
    documents are drawn by the seed.

    Raises:
        InputError: too little text, or none that can be read.
    """
    wanted = {"train": config.max_steps * config.batch_size, "validation": config.validation_sequences}
    tables = {}
    splits = None if config.data.startswith("hub:") else local_splits(config)
    for kind, count in wanted.items():
        documents = (
            (d for d in open_documents(config.data) if split_of(d.id) == kind) if splits is None else splits[kind]
        )
        try:
            tables[kind] = pack(documents, tokenizer, config.seq_len, max_sequences=count)
        except InputError as error:
            raise InputError(f"{kind} documents of {config.data}: {error}") from None
    return tables["train"], tables["validation"]


def local_splits(config: TrainConfig) -> dict[str, list[Document]]:
    """Training and validation documents of a source that is read whole, each in its order.

    Where no document's hash falls into validation, as can be with few documents, the training document next to that
    part of the hash range is held out.

    Raises:
        InputError: fewer than two documents.
    """
    splits: dict[str, list[Document]] = {"train": [], "validation": [], "test": []}
    for document in open_documents(config.data):
        splits[split_of(document.id)].append(document)
    if not splits["validation"] and len(splits["train"]) > 1:
        nearest = min(splits["train"], key=lambda document: split_position(document.id))
        splits["train"].remove(nearest)
        splits["validation"].append(nearest)
    if not splits["train"] or not splits["validation"]:
        count = sum(map(len, splits.values()))
        raise InputError(f"{config.data} has too few documents ({count}) to train on some and validate on others")
    return {"train": hash_order(splits["train"], config.seed), "validation": hash_order(splits["validation"], 0)}
