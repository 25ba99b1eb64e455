"""The complete configuration of a training run."""

import dataclasses
import json
import math
import typing
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any, Literal

from kvcat.errors import InputError

PolicyName = Literal["router", "random", "attention", "control"]


@dataclass(frozen=True)
class TrainConfig:
    """Everything that decides a run's result; defaults as in the paper's table "hyperparameters", cut to one device.

    Args:
        model: folder or Hub name of the checkpoint that training continues.
        output: folder of the run.
        data: ``installed``, a file, a folder, or ``hub:NAME``.
        policy: which KV slots the masked pass hides; ``control`` trains with the next-token loss alone.
        group_starts: first layer of each group of layers that share a mask, such as 0,6,12,18; None spaces
            ``num_groups`` evenly.
        num_groups: number of groups when ``group_starts`` is None.
        target_keep: kept fraction rho that the policy aims at, in (0, 1).
        target_warmup_steps: steps over which the routers' target falls from 1 to target_keep; ours, zero is the
            paper's.
        keep_range: two fractions, comma-separated: every step keeps a share of slots drawn between them, those with the
            highest scores (any-budget training); ours, None keeps what exceeds tau.
        masked_fraction: share of a step's sequences that go through the masked pass, in (0, 1]; the others give the
            anchor alone. Ours, 1 is the paper's.
        prefix_range: two fractions, comma-separated: every step splits its sequences at a point drawn between them, and
            the masked pass runs the tokens behind it alone, which see the kept slots before it and all of their own, as
            they will with a compact cache. Ours, and cheaper; None hides slots everywhere, the paper's.
        tau: threshold on the keep probability, in (0, 1).
        feature_dim: width of the router's linear attention.
        coupling: how the loss reaches the mask, see ``kvcat.attention.attend``.
        teacher: ``self``, the model's own dense pass; or ``frozen``, the model it started from, which then teaches both
            passes (the paper's footnote: one more model in memory, a third forward pass).
        mask_weight: weight of the distillation KL.
        anchor_weight: weight of the next-token loss on the dense pass; of its distillation with a frozen teacher.
        budget_weight: weight of the budget loss; policies that keep an exact count ignore it.
        seq_len: tokens a sequence.
        batch_size: sequences an optimizer step.
        micro_batch_size: sequences a forward pass of one process; None takes all that the process has in a step.
        max_steps: optimizer steps.
        warmup_steps: steps of linear warm-up.
        peak_lr: highest learning rate.
        min_lr: floor of the cosine decay.
        betas: AdamW's two, comma-separated on the command line; the paper does not say, these are ours.
        weight_decay: AdamW's, on matrices only.
        lora_rank: rank of the adapters that are trained instead of all parameters, merged at export; 0 trains all.
        max_grad_norm: clipping norm, of the model and of the routers apart.
        router_lr_multiplier: the routers' learning rate over the model's; ours, see the log.
        router_noise: standard deviation of the seeded noise on W_P at the start; zero is the paper's.
        seed: seed of data order, masks and noise.
        dtype: compute type; weights, routers and optimizer stay float32.
        export_dtype: type of the exported weights.
        device: torch device; each process that torchrun starts takes its own GPU.
        activation_checkpointing: make activations again in the backward instead of keeping them.
        compile: compile each decoder layer with torch.compile.
        workers: processes that tokenise streamed data.
        monitor: where records are copied to beside ``metrics.jsonl``.
        log_every: steps between training records.
        validation_every: steps between validations; they also run before the first step and after the last.
        validation_sequences: sequences of held-out documents that validation reads.
        checkpoint_every: steps between checkpoints.
        keep_checkpoints: newest checkpoints that stay.
    """

    model: str
    output: str
    data: str = "installed"
    policy: PolicyName = "router"
    group_starts: tuple[int, ...] | None = None
    num_groups: int = 4
    target_keep: float = 0.5
    target_warmup_steps: int = 0
    keep_range: tuple[float, float] | None = None
    masked_fraction: float = 1.0
    prefix_range: tuple[float, float] | None = None
    tau: float = 0.5
    feature_dim: int = 64
    coupling: Literal["surrogate", "exact"] = "surrogate"
    teacher: Literal["self", "frozen"] = "self"
    mask_weight: float = 1.0
    anchor_weight: float = 1.0
    budget_weight: float = 0.1
    seq_len: int = 1024
    batch_size: int = 8
    micro_batch_size: int | None = None
    max_steps: int = 300
    warmup_steps: int = 20
    peak_lr: float = 1e-4
    min_lr: float = 5e-6
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.01
    lora_rank: int = 0
    max_grad_norm: float = 1.0
    router_lr_multiplier: float = 10.0
    router_noise: float = 0.0
    seed: int = 0
    dtype: Literal["float32", "bfloat16"] = "float32"
    export_dtype: Literal["float32", "bfloat16"] = "float32"
    device: str = "cpu"
    activation_checkpointing: bool = False
    compile: bool = False
    workers: int = 0
    monitor: Literal["none", "tensorboard", "wandb"] = "none"
    log_every: int = 1
    validation_every: int = 50
    validation_sequences: int = 16
    checkpoint_every: int = 50
    keep_checkpoints: int = 2

    def __post_init__(self) -> None:
        validate(self)

    def target_at(self, step: int) -> float:
        """The routers' target in a step, counted from 0: linear from 1 to ``target_keep``, then ``target_keep``."""
        progress = min(1.0, (step + 1) / (self.target_warmup_steps + 1))
        return 1 - (1 - self.target_keep) * progress

    def prefix_len_at(self, step: int | None) -> int | None:
        """Tokens before the split of a step, counted from 0, or of validation (None, the middle of the range).

        One of at most 16 lengths, so that compiled layers see few shapes; None where the masked pass takes all tokens.
        """
        if self.prefix_range is None:
            return None
        share = sum(self.prefix_range) / 2
        if step is not None:
            share = Random(f"{self.seed}:{step}").uniform(*self.prefix_range)
        return min(max(1, round(16 * share) * self.seq_len // 16), self.seq_len - 2)

    @property
    def masked_share(self) -> float:
        """Tokens that go through the masked pass over all tokens, 0 for the control."""
        if self.policy == "control":
            return 0.0
        return self.masked_fraction * (1 - (sum(self.prefix_range) / 2 if self.prefix_range else 0))

    @property
    def tokens_per_step(self) -> int:
        """Tokens an optimizer step."""
        return self.batch_size * self.seq_len

    def save(self, path: Path) -> None:
        """Write the configuration as JSON, whole or not at all."""
        partial = path.with_suffix(".partial")
        partial.write_text(json.dumps(dataclasses.asdict(self), indent=2) + "\n")
        partial.rename(path)

    @classmethod
    def load(cls, path: Path) -> "TrainConfig":
        """Read a configuration that ``save`` wrote.

        Raises:
            InputError: not readable as one.
        """
        try:
            values = json.loads(path.read_text())
        except (OSError, json.JSONDecodeError) as error:
            raise InputError(f"no readable run configuration at {path}: {error}") from None
        if not isinstance(values, dict):
            raise InputError(f"{path} is no run configuration")
        return cls.from_dict(values)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "TrainConfig":
        """A configuration from its fields, lists taken as tuples.

        Raises:
            InputError: a field that does not exist or is missing, or a value out of range.
        """
        known = {field.name for field in dataclasses.fields(cls)}
        if unknown := sorted(set(values) - known):
            raise InputError(f"unknown training option {unknown[0]!r}; options: {', '.join(sorted(known))}")
        if missing := sorted({"model", "output"} - set(values)):
            raise InputError(f"training option {missing[0]!r} is missing")
        _check_choices(values)
        fields: dict[str, Any] = {n: tuple(value) if isinstance(value, list) else value for n, value in values.items()}
        return cls(**fields)


_RANGES: tuple[tuple[tuple[str, ...], Callable[[Any], bool], str], ...] = (
    (("target_keep", "tau"), lambda value: 0 < value < 1, "lie in (0, 1)"),
    (
        ("num_groups", "feature_dim", "batch_size", "micro_batch_size", "max_steps", "log_every", "validation_every",
         "validation_sequences", "checkpoint_every", "keep_checkpoints"),
        lambda value: value >= 1,
        "be at least 1",
    ),
    (("masked_fraction",), lambda value: 0 < value <= 1, "lie in (0, 1]"),
    (("seq_len",), lambda value: value >= 2, "be at least 2"),
    (("peak_lr", "max_grad_norm", "router_lr_multiplier"), lambda value: 0 < value < math.inf, "be positive"),
    (
        ("mask_weight", "anchor_weight", "budget_weight", "weight_decay", "warmup_steps", "router_noise",
         "target_warmup_steps", "workers", "lora_rank"),
        lambda value: 0 <= value < math.inf,
        "not be negative",
    ),
    (("seed",), lambda value: 0 <= value < 2**63, "lie in 0..2^63 - 1"),
)  # fmt: skip


def validate(config: TrainConfig) -> None:
    """Refuse values out of range, each with one line.

    Raises:
        InputError: the first offending value.
    """
    _check_choices(vars(config))
    for names, holds, told in _RANGES:
        for name in names:
            value = getattr(config, name)
            if value is not None and not (isinstance(value, (int, float)) and holds(value)):
                raise InputError(f"{name} is {value!r}; it must {told}")
    check_batch(config, 1)
    for name, low_to_high in (("keep_range", config.keep_range), ("prefix_range", config.prefix_range)):
        if low_to_high is not None and not (len(low_to_high) == 2 and 0 < low_to_high[0] <= low_to_high[1] <= 1):
            told = ", ".join(map(str, low_to_high))
            raise InputError(f"{name} is {told}; it takes two fractions in (0, 1], the smaller first")
    if config.prefix_range is not None and (config.masked_fraction < 1 or config.seq_len < 3):
        raise InputError("prefix_range splits every sequence: it takes masked_fraction 1 and a seq_len of at least 3")
    if config.teacher == "frozen" and config.policy == "control":
        raise InputError("teacher is 'frozen', but the control has no masked pass to teach")
    if not 0 <= config.min_lr <= config.peak_lr:
        raise InputError(f"min_lr {config.min_lr} must lie between 0 and peak_lr {config.peak_lr}")
    if len(config.betas) != 2 or not all(0 <= beta < 1 for beta in config.betas):
        raise InputError(f"betas are {', '.join(map(str, config.betas))}; AdamW takes two, each in [0, 1)")


def check_batch(config: TrainConfig, num_processes: int) -> None:
    """Refuse a batch that does not divide into the processes' forward passes.

    Raises:
        InputError: batch_size is no multiple of processes times micro_batch_size.
    """
    if config.batch_size % num_processes:
        raise InputError(f"batch_size {config.batch_size} does not divide into {num_processes} processes")
    own = config.batch_size // num_processes
    if own % (config.micro_batch_size or own):
        share = f"batch_size {config.batch_size}" if num_processes == 1 else f"the {own} sequences of a process"
        raise InputError(f"micro_batch_size {config.micro_batch_size} does not divide {share}")
    masked = config.masked_fraction * (config.micro_batch_size or own)
    if abs(masked - round(masked)) > 1e-6 or round(masked) < 1:
        raise InputError(
            f"masked_fraction {config.masked_fraction:g} of the {config.micro_batch_size or own} sequences of a "
            "forward pass is no whole number"
        )


def _check_choices(values: dict[str, Any]) -> None:
    for name, hint in typing.get_type_hints(TrainConfig).items():
        allowed = typing.get_args(hint)
        if typing.get_origin(hint) is Literal and name in values and values[name] not in allowed:
            raise InputError(f"{name} is {values[name]!r}; it must be one of {', '.join(allowed)}")
