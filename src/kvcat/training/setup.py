"""What is checked and prepared before the first step."""

import shutil
from pathlib import Path

from torch import nn
from transformers import PreTrainedTokenizerBase

from kvcat.data import TokenTable, hash_order, open_documents, pack, split_of
from kvcat.errors import InputError
from kvcat.training.config import TrainConfig

CONFIG_FILE = "config.json"


def prepare_folder(run: Path, config: TrainConfig) -> None:
    """Make the run's folder and write its configuration, or accept the folder of the same run.

    Raises:
        InputError: the folder is not empty and belongs to something else, or to a run with another configuration.
    """
    existing = run / CONFIG_FILE
    if existing.exists():
        previous = TrainConfig.load(existing)
        for name in previous.__dataclass_fields__:
            if getattr(previous, name) != getattr(config, name) and name != "output":
                raise InputError(
                    f"{run} holds another run: its {name} is {getattr(previous, name)!r}, not {getattr(config, name)!r}"
                )
        return
    if run.exists() and (not run.is_dir() or any(run.iterdir())):
        raise InputError(f"output folder {run} is not empty and holds no run of ours")
    try:
        run.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"cannot make output folder {run}: {error.strerror}") from None
    config.save(existing)


def check_disk(run: Path, model: nn.Module, keep_checkpoints: int) -> None:
    """Refuse to start where checkpoints and export will not fit.

    Raises:
        InputError: less free space than the run will need.
    """
    weights = sum(p.numel() for p in model.parameters()) * 4
    needed = weights * (3 * (keep_checkpoints + 1) + 1)
    free = shutil.disk_usage(run).free
    if free < needed:
        raise InputError(f"{run} has {free / 1e9:.1f} GB free; checkpoints and export need {needed / 1e9:.1f} GB")


def training_tables(
    config: TrainConfig, model: nn.Module, tokenizer: PreTrainedTokenizerBase
) -> tuple[TokenTable, TokenTable]:
    """Packed training and validation sequences, disjoint by document.

    Raises:
        InputError: a sequence longer than the model's positions, or too little text.
    """
    check_disk(Path(config.output), model, config.keep_checkpoints)
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)  # type: ignore[union-attr]
    if positions is not None and config.seq_len > positions:
        raise InputError(f"seq_len {config.seq_len} exceeds the model's {positions} positions")
    documents = list(open_documents(config.data))
    splits = {kind: [d for d in documents if split_of(d.id) == kind] for kind in ("train", "validation")}
    if not splits["validation"]:
        raise InputError(f"{config.data} has too few documents ({len(documents)}) to hold any out for validation")
    train = pack(
        hash_order(splits["train"], config.seed),
        tokenizer,
        config.seq_len,
        max_sequences=config.max_steps * config.batch_size,
    )
    validation = pack(
        hash_order(splits["validation"], 0), tokenizer, config.seq_len, max_sequences=config.validation_sequences
    )
    return train, validation
