"""The complete configuration of a training run."""

import dataclasses
import math
import types
import typing
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any, Literal

from kvcat.choices import Bos
from kvcat.errors import InputError
from kvcat.options import parse_spec

_POLICY_FILES = (Path(__file__).parents[1] / "policies").glob("[!_]*.py")
POLICY_NAMES = (*sorted(file.stem for file in _POLICY_FILES), "control")
"""What ``policy`` may name. A policy is a file, so its name is known without an import of torch."""


@dataclass(frozen=True)
class TrainConfig:
    """A complete training run. The defaults are the paper's hyperparameters, cut to one device, or say otherwise."""

    model: str  # Folder or Hub name of the checkpoint that training continues
    output: str  # Folder of the run; by default runs/, the recipe's name and the policy's
    data: str = "installed"  # installed, a file, a folder, a folder that kvcat prepare wrote, or hub:NAME
    # Which KV slots the masked pass hides: router, random or attention, or NAME,option=value,... for a
    # policy with options. control trains with the next-token loss alone.
    policy: str = "router"
    # First layer of each group of layers that share a mask, such as 0 6 12 18; None spaces num_groups evenly.
    group_starts: tuple[int, ...] | None = None
    num_groups: int = 4  # Number of groups where group_starts is None
    target_keep: float = 0.5  # Kept fraction rho that the policy aims at, in (0, 1)
    target_warmup_steps: int = 0  # Steps over which the routers' target falls from 1 to target_keep. Not in the paper.
    # Two fractions between which each step draws a split: the masked pass runs only the tokens after it. Not in the
    # paper, which hides slots everywhere (None).
    prefix_range: tuple[float, float] | None = None
    # With prefix_range: the masked pass trains how the suffix reads, not what the prefix writes. Not in the paper.
    detach_prefix: bool = False
    tau: float = 0.5  # Threshold on the keep probability, in (0, 1)
    feature_dim: int = 64  # Width of the router's linear attention
    # self: the model's own dense pass. frozen: the model as it was at the start teaches both passes.
    teacher: Literal["self", "frozen"] = "self"
    mask_weight: float = 1.0  # Weight of the distillation KL
    # Weight of the next-token loss on the dense pass, or of its distillation from a frozen teacher.
    anchor_weight: float = 1.0
    budget_weight: float = 0.1  # Weight of the budget loss. Policies that keep an exact count have none.
    # What each document begins with: what the tokenizer puts there, always BOS, or nothing
    bos: Bos = "auto"
    seq_len: int = 1024  # Tokens per sequence
    batch_size: int = 8  # Sequences per optimizer step, over all processes
    # Sequences per forward pass of one process; None takes all that the process has in a step.
    micro_batch_size: int | None = None
    max_steps: int = 300  # Optimizer steps
    warmup_steps: int = 20  # Steps of linear warm-up
    peak_lr: float = 1e-4  # Highest learning rate
    min_lr: float = 5e-6  # Learning rate at the end of the cosine decay
    betas: tuple[float, float] = (0.9, 0.95)  # AdamW's two betas. The paper does not say.
    weight_decay: float = 0.01  # AdamW's weight decay, on matrices only
    max_grad_norm: float = 1.0  # Clipping norm, of the model's gradient and of the routers' separately
    router_lr_multiplier: float = 10.0  # Learning rate of the routers over the model's. Not in the paper.
    # Standard deviation of the seeded noise on W_P at the start. The paper has 0, a critical point.
    router_noise: float = 0.05
    seed: int = 0  # Seed of data order, masks and noise
    # Type of the matrix products; weights, routers and optimizer stay float32.
    dtype: Literal["float32", "bfloat16"] = "float32"
    export_dtype: Literal["float32", "bfloat16"] = "float32"  # Type of the exported weights
    device: str = "cpu"  # Torch device; with cuda, each process that torchrun starts takes its own GPU
    activation_checkpointing: bool = False  # Recompute activations in the backward pass instead of keeping them
    compile: bool = False  # Compile each decoder layer with torch.compile
    monitor: Literal["none", "tensorboard"] = "none"  # Where records are copied to besides metrics.jsonl
    log_every: int = 1  # Steps between training records
    validation_every: int = 50  # Steps between validations, which also run before the first step and after the last
    validation_sequences: int = 16  # Sequences of held-out documents that validation reads
    checkpoint_every: int = 50  # Steps between checkpoints
    keep_checkpoints: int = 2  # Number of newest checkpoints to keep

    def __post_init__(self) -> None:
        for name, value in _typed_fields(vars(self)).items():
            object.__setattr__(self, name, value)
        _check_values(self)

    def target_at(self, step: int) -> float:
        """The routers' target in a step, counted from 0: linear from 1 to ``target_keep``, then constant."""
        progress = min(1.0, (step + 1) / (self.target_warmup_steps + 1))
        return 1 - (1 - self.target_keep) * progress

    def prefix_len_at(self, step: int | None) -> int | None:
        """Tokens before the split of a step, counted from 0, or of validation (None: the middle of the range).

        One of at most 17 lengths, so that compiled layers see few shapes; None where the masked pass takes all tokens.
        """
        if self.prefix_range is None:
            return None
        share = sum(self.prefix_range) / 2
        if step is not None:
            share = Random(f"{self.seed}:{step}").uniform(*self.prefix_range)
        return min(max(1, round(16 * share) * self.seq_len // 16), self.seq_len - 2)

    @property
    def masked_share(self) -> float:
        """Tokens that go through the masked pass over all tokens; 0 for the control."""
        if self.policy == "control":
            return 0.0
        return 1.0 - (sum(self.prefix_range) / 2 if self.prefix_range else 0.0)

    @property
    def tokens_per_step(self) -> int:
        """Tokens per optimizer step."""
        return self.batch_size * self.seq_len

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "TrainConfig":
        """A configuration from its fields; refuses an unknown, a missing and a wrong one."""
        known = {field.name for field in dataclasses.fields(cls)}
        if unknown := sorted(set(values) - known):
            raise InputError(f"unknown training option {unknown[0]!r}; options: {', '.join(sorted(known))}")
        if missing := sorted({"model", "output"} - set(values)):
            raise InputError(f"training option {missing[0]!r} is missing")
        return cls(**_typed_fields(values))


_RANGES: tuple[tuple[tuple[str, ...], Callable[[Any], bool], str], ...] = (
    (("target_keep", "tau"), lambda value: 0 < value < 1, "lie in (0, 1)"),
    (
        ("num_groups", "feature_dim", "batch_size", "micro_batch_size", "max_steps", "log_every", "validation_every",
         "validation_sequences", "checkpoint_every", "keep_checkpoints"),
        lambda value: value >= 1,
        "be at least 1",
    ),
    (("seq_len",), lambda value: value >= 2, "be at least 2"),
    (("peak_lr", "max_grad_norm", "router_lr_multiplier"), lambda value: 0 < value < math.inf, "be positive"),
    (
        ("mask_weight", "anchor_weight", "budget_weight", "weight_decay", "warmup_steps", "router_noise",
         "target_warmup_steps"),
        lambda value: 0 <= value < math.inf,
        "not be negative",
    ),
    (("seed",), lambda value: 0 <= value < 2**63, "lie in 0..2^63 - 1"),
)  # fmt: skip


def check_batch(config: TrainConfig, num_processes: int) -> None:
    """Refuse a batch that does not divide into the processes' forward passes."""
    if config.batch_size % num_processes:
        raise InputError(f"batch_size {config.batch_size} does not divide into {num_processes} processes")
    own = config.batch_size // num_processes
    if own % (config.micro_batch_size or own):
        raise InputError(f"micro_batch_size {config.micro_batch_size} does not divide a process' {own} sequences")


def _check_values(config: TrainConfig) -> None:
    """Reject the first value out of its range with one line."""
    for names, holds, requirement in _RANGES:
        for name in names:
            value = getattr(config, name)
            if value is not None and not holds(value):
                raise InputError(f"{name} is {value!r}; it must {requirement}")
    check_batch(config, 1)
    _check_policy(config)
    _check_split(config)
    if not 0 <= config.min_lr <= config.peak_lr:
        raise InputError(f"min_lr {config.min_lr} must lie between 0 and peak_lr {config.peak_lr}")
    if not all(0 <= beta < 1 for beta in config.betas):
        betas = ", ".join(map(str, config.betas))
        raise InputError(f"betas are {betas}; AdamW takes two, each in [0, 1)")


def _check_policy(config: TrainConfig) -> None:
    """Reject an unknown policy, and groups of layers or a teacher that do not fit it."""
    name, _ = parse_spec(config.policy, "policy")
    if name not in POLICY_NAMES:
        choices = ", ".join(POLICY_NAMES)
        raise InputError(f"policy is {config.policy!r}; it must name one of {choices}")
    starts = config.group_starts
    if starts is not None and config.num_groups not in (TrainConfig.num_groups, len(starts)):
        raise InputError(f"num_groups is {config.num_groups}, but group_starts names {len(starts)} layers")
    if config.teacher == "frozen" and config.policy == "control":
        raise InputError("teacher is 'frozen', but the control has no masked pass to teach")


def _check_split(config: TrainConfig) -> None:
    """Reject a range of splits that leaves no prefix or no suffix."""
    if config.prefix_range is None:
        if config.detach_prefix:
            raise InputError("detach_prefix needs prefix_range: whole masked sequences have no prefix")
        return
    smallest, largest = config.prefix_range
    if not 0 < smallest <= largest <= 1:
        raise InputError(f"prefix_range is {config.prefix_range}; it takes two fractions in (0, 1], smaller first")
    if config.seq_len < 3:
        raise InputError(f"prefix_range splits every sequence: seq_len is {config.seq_len}; it must be at least 3")


def _typed_fields(values: dict[str, Any]) -> dict[str, Any]:
    """The values in the types of their fields; refuses the first that does not fit with one line."""
    typed = {}
    for name, hint in typing.get_type_hints(TrainConfig).items():
        if name in values:
            try:
                typed[name] = _typed(values[name], hint)
            except TypeError:
                raise InputError(f"{name} is {values[name]!r}; it must be {_describe(hint)}") from None
    return typed


def _typed(value: Any, hint: Any) -> Any:
    """A value from JSON, TOML or Python in the type of a field: whole numbers serve as numbers, lists as tuples.

    Raises:
        TypeError: it does not fit.
    """
    args, origin = typing.get_args(hint), typing.get_origin(hint)
    if isinstance(hint, types.UnionType):
        return None if value is None else _typed(value, args[0])
    if origin is tuple and isinstance(value, tuple | list):
        parts = args[:1] * len(value) if args[1:] == (...,) else args
        if len(value) == len(parts):
            return tuple(map(_typed, value, parts))
    elif origin is Literal:
        if isinstance(value, str) and value in args:
            return value
    elif hint is float and isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    elif origin is None and isinstance(value, hint) and (hint is bool or not isinstance(value, bool)):
        return value
    raise TypeError


def _describe(hint: Any) -> str:
    if typing.get_origin(hint) is Literal:
        return f"one of {', '.join(typing.get_args(hint))}"
    return {int: "a whole number", float: "a number", bool: "true or false", str: "text"}.get(hint) or str(hint)
