"""The complete configuration of a training run."""

import dataclasses
import typing
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any, Literal, NamedTuple

from kvcat.errors import InputError, unknown_name
from kvcat.option_types import Unset
from kvcat.options import Bos, describe_type, parse_spec, typed_value
from kvcat.plugins import POLICIES, plugin_names

_POLICY_FILES = (Path(__file__).parents[1] / "policies").glob("[!_]*.py")
POLICY_NAMES = (*sorted(file.stem for file in _POLICY_FILES), "control")
"""The names that ``policy`` may have. A policy is a file, so its name is known without importing
torch."""


@dataclass(frozen=True)
class TrainConfig:
    """A complete training run.

    The defaults are the paper's hyperparameters, scaled to one device, unless an option's
    description names other ones.
    """

    model: str  # Folder or Hub name of the checkpoint that training continues.
    output: str  # Folder of the run; by default runs/, the recipe's name and the policy's.
    # installed (the Python sources of this installation), a file, a folder, a folder of kvcat
    # prepare, or hub:NAME.
    data: str = "installed"
    # Policy that chooses which KV slots the masked pass hides: router, random or attention, or
    # NAME,option=value,... for a policy with options. With control there is no masked pass, and
    # the loss is the next-token loss alone.
    policy: str = "router"
    # First layer of each group of layers that share a mask, such as 0 6 12 18; by default
    # num_groups groups of equal size.
    group_starts: Unset[tuple[int, ...]] = None
    num_groups: int = 4  # Number of groups, unless group_starts names them.
    target_keep: float = 0.5  # Kept fraction rho that the policy aims at, in (0, 1).
    # Steps over which the routers' target falls from 1 to target_keep. Not in the paper.
    target_warmup_steps: int = 0
    # Two fractions between which each step draws a split: the masked pass runs only the tokens
    # after it. Not in the paper; without it, slots are hidden everywhere.
    prefix_range: Unset[tuple[float, float]] = None
    # With prefix_range: the masked pass does not train the prefix's keys and values. Not in the
    # paper.
    detach_prefix: bool = False
    tau: float = 0.5  # Threshold on the keep probability, in (0, 1).
    feature_dim: int = 64  # Width of the router's linear attention.
    # self: the model's dense pass teaches the masked pass. frozen: a copy of the starting model
    # teaches both passes.
    teacher: Literal["self", "frozen"] = "self"
    mask_weight: float = 1.0  # Weight of the distillation KL.
    # Weight of the next-token loss on the dense pass, or of its distillation from a frozen teacher.
    anchor_weight: float = 1.0
    # Weight of the budget loss. Policies that keep an exact count have none.
    budget_weight: float = 0.1
    # Tokens at the start of each document: those that the tokenizer adds (auto), at least
    # BOS (always), or none (never).
    bos: Bos = "auto"
    seq_len: int = 1024  # Tokens per sequence.
    batch_size: int = 8  # Sequences per optimizer step, over all processes.
    # Sequences per forward pass of one process; by default all that the process has in a step.
    micro_batch_size: Unset[int] = None
    max_steps: int = 300  # Optimizer steps.
    warmup_steps: int = 20  # Steps of linear warm-up.
    peak_lr: float = 1e-4  # Highest learning rate.
    min_lr: float = 5e-6  # Learning rate at the end of the cosine decay.
    betas: tuple[float, float] = (0.9, 0.95)  # AdamW's two betas; the paper names none.
    weight_decay: float = 0.01  # AdamW's weight decay, on matrices only.
    # Largest norm of the model's gradient and, separately, of the routers' gradient.
    max_grad_norm: float = 1.0
    # Learning rate of the routers as a multiple of the model's. Not in the paper.
    router_lr_multiplier: float = 10.0
    # Standard deviation of the seeded noise on W_P at the start. The paper has 0, a critical point.
    router_noise: float = 0.05
    seed: int = 0  # Seed of data order, masks and noise.
    # Type of the matrix products; weights, routers and optimizer stay float32.
    dtype: Literal["float32", "bfloat16"] = "float32"
    export_dtype: Literal["float32", "bfloat16"] = "float32"  # Type of the exported weights.
    # Torch device; with cuda, each process that torchrun starts uses one GPU.
    device: str = "cpu"
    # Recompute activations in the backward pass instead of keeping them.
    activation_checkpointing: bool = False
    # Compile each decoder layer, and the loss on a GPU, with torch.compile.
    compile: bool = False
    # Place that records are copied to, in addition to metrics.jsonl.
    monitor: Literal["none", "tensorboard"] = "none"
    log_every: int = 1  # Steps between training records.
    # Steps between validations, which also run before the first step and after the last.
    validation_every: int = 50
    validation_sequences: int = 16  # Sequences of held-out documents that validation reads.
    checkpoint_every: int = 50  # Steps between checkpoints.
    keep_checkpoints: int = 2  # Number of newest checkpoints to keep.

    def __post_init__(self) -> None:
        for name, value in _typed_fields(vars(self)).items():
            object.__setattr__(self, name, value)
        _check_values(self)

    def target_at(self, step: int) -> float:
        """The routers' target in a step, counted from 0.

        It falls linearly from 1 to ``target_keep`` and then stays.
        """
        progress = min(1.0, (step + 1) / (self.target_warmup_steps + 1))
        return 1 - (1 - self.target_keep) * progress

    def prefix_len_at(self, step: int | None) -> int | None:
        """Tokens before the split of a step; None if the masked pass runs all tokens.

        It is one of at most 17 lengths, so that compiled layers see few shapes.

        Args:
            step: counted from 0; None, for validation: the middle of the range.
        """
        if self.prefix_range is None:
            return None
        if step is None:
            fraction = sum(self.prefix_range) / 2
        else:
            fraction = Random(f"{self.seed}:{step}").uniform(*self.prefix_range)
        prefix_len = round(16 * fraction) * self.seq_len // 16
        return min(max(1, prefix_len), self.seq_len - 2)

    @property
    def masked_share(self) -> float:
        """Tokens that go through the masked pass over all tokens; 0 for the control."""
        if self.policy == "control":
            return 0.0
        if self.prefix_range is None:
            return 1.0
        return 1.0 - sum(self.prefix_range) / 2

    @property
    def tokens_per_step(self) -> int:
        """Tokens per optimizer step."""
        return self.batch_size * self.seq_len

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "TrainConfig":
        """A configuration from its fields.

        Raises:
            InputError: an unknown, a missing or a wrong one.
        """
        names = {field.name for field in dataclasses.fields(cls)}
        unknown = sorted(set(values) - names)
        if unknown:
            options = ", ".join(sorted(names))
            raise InputError(f"unknown training option {unknown[0]!r}; options: {options}")
        missing = sorted({"model", "output"} - set(values))
        if missing:
            raise InputError(f"training option {missing[0]!r} is missing")
        return cls(**_typed_fields(values))


class _Range(NamedTuple):
    """The conditions that the values of some fields must satisfy."""

    names: str
    holds: Callable[[Any], bool]
    requirement: str


_RANGES = (
    _Range("target_keep tau", lambda value: 0 < value < 1, "lie in (0, 1)"),
    _Range(
        "num_groups feature_dim batch_size micro_batch_size max_steps log_every validation_every "
        "validation_sequences checkpoint_every keep_checkpoints",
        lambda value: value >= 1,
        "be at least 1",
    ),
    _Range("seq_len", lambda value: value >= 2, "be at least 2"),
    _Range("peak_lr max_grad_norm router_lr_multiplier", lambda value: value > 0, "be positive"),
    _Range(
        "mask_weight anchor_weight budget_weight weight_decay warmup_steps router_noise "
        "target_warmup_steps",
        lambda value: value >= 0,
        "not be negative",
    ),
    _Range("seed", lambda value: 0 <= value < 2**63, "lie in 0..2^63 - 1"),
)


def check_batch(config: TrainConfig, num_processes: int) -> None:
    """Reject a batch that does not divide into the processes' forward passes."""
    batch_size = config.batch_size
    if batch_size % num_processes:
        raise InputError(f"batch_size {batch_size} does not divide into {num_processes} processes")
    per_process = batch_size // num_processes
    micro_batch_size = config.micro_batch_size or per_process
    if per_process % micro_batch_size:
        sequences = f"a process' {per_process} sequences"
        raise InputError(f"micro_batch_size {micro_batch_size} does not divide {sequences}")


def _check_values(config: TrainConfig) -> None:
    """Reject the first value out of its range with one line."""
    for names, holds, requirement in _RANGES:
        for name in names.split():
            value = getattr(config, name)
            if value is not None and not holds(value):
                raise InputError(f"{name} is {value!r}; it must {requirement}")
    check_batch(config, 1)
    _check_policy(config)
    _check_split(config)
    if not 0 <= config.min_lr <= config.peak_lr:
        raise InputError(f"min_lr {config.min_lr} must lie between 0 and peak_lr {config.peak_lr}")
    if not all(0 <= beta < 1 for beta in config.betas):
        betas = ", ".join(str(beta) for beta in config.betas)
        raise InputError(f"betas are {betas}; AdamW needs two, each in [0, 1)")


def _check_policy(config: TrainConfig) -> None:
    """Reject an unknown policy, and groups of layers or a teacher that do not fit the policy."""
    name, _ = parse_spec(config.policy, "policy")
    names = [*POLICY_NAMES, *plugin_names(POLICIES)]
    if name not in names:
        raise unknown_name("policy", name, names)
    starts = config.group_starts
    if starts is not None and config.num_groups not in (TrainConfig.num_groups, len(starts)):
        named = f"group_starts names {len(starts)} layers"
        raise InputError(f"num_groups is {config.num_groups}, but {named}")
    if config.teacher == "frozen" and config.policy == "control":
        raise InputError("teacher is 'frozen', but the control has no masked pass to teach")


def _check_split(config: TrainConfig) -> None:
    """Reject a range of splits that leaves no prefix or no suffix."""
    if config.prefix_range is None:
        if config.detach_prefix:
            raise InputError(
                "detach_prefix needs prefix_range: whole masked sequences have no prefix"
            )
        return
    smallest, largest = config.prefix_range
    if not 0 < smallest <= largest <= 1:
        requirement = "it needs two fractions in (0, 1], the smaller first"
        raise InputError(f"prefix_range is {config.prefix_range}; {requirement}")
    if config.seq_len < 3:
        value = f"seq_len is {config.seq_len}; it must be at least 3"
        raise InputError(f"prefix_range splits every sequence: {value}")


def _typed_fields(values: dict[str, Any]) -> dict[str, Any]:
    """The values in the types of their fields.

    Raises:
        InputError: the first that does not fit.
    """
    typed = {}
    for name, hint in typing.get_type_hints(TrainConfig).items():
        if name in values:
            value = values[name]
            try:
                typed[name] = typed_value(value, hint)
            except TypeError:
                wanted = describe_type(hint)
                raise InputError(f"{name} is {value!r}; it must be {wanted}") from None
    return typed
