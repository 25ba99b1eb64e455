"""Gradient-based compression: slots trained to give the dense model's predictions."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

from kvcat.cache import CompactCache
from kvcat.compress.common import compact_cache, slots_for
from kvcat.compress.optimising import SlotOptimisation, StepOptions
from kvcat.compress.resuming import StateFile, cache_identity, identity
from kvcat.compress.starting import check_start, joined, starting_layers
from kvcat.compress.tracing import Trace
from kvcat.errors import InputError

SNAPSHOT_STEPS = (0, 1, 2, 5, 10, 20, 50, 100)
SCHEDULES = ("constant", "cosine")
_COSTS = ("activation_checkpointing", "teacher_bytes")  # what a step costs, not what it does
OnStep = Callable[[int, float], None]


@dataclass(frozen=True)
class GradientCompression:
    """Keys and values of every slot, trained so that the compact cache predicts as the dense one does.

    Minimises the mean over the supervised positions t of KL(softmax(z*_t) || softmax(z_t)), z* the dense logits and z
    those on the compact cache, by AdamW without weight decay; the model's weights stay fixed. The supervised positions
    are the suffix, or the second copy of a reconstruction sequence. Every example is optimised by itself, its gradient
    clipped by its own norm: a batch gives what its examples give one by one. ``shared`` makes one cache for many rows.

    Args:
        num_steps: gradient steps, at least 0.
        lr: learning rate, larger than 0.
        init: "first": the first slots of the prefix; "random": random ones, the same positions in every layer;
            "attention": per head those that the supervising queries attend to most; "attention-matching" or an
            eviction's name: what that method gives, its options behind the name as in
            "attention-matching,budgets=adaptive"; or a compact cache of this prefix with as many slots, or, where heads
            differ, no more on average. A log-bias that the start has is trained as well.
        seed: of the random positions.
        freeze_first_slot: the first slot keeps its key and value.
        max_norm: gradient norm per example above which it is clipped, larger than 0.
        num_sinks: first positions of the prefix that "random" always keeps, at least 0.
        schedule: learning rate after the warm-up: "constant", or "cosine": half a cosine that ends at 0 after
            ``num_steps``.
        warmup_steps: steps over which the learning rate rises linearly to ``lr``, at least 0.
        patience: an example whose KL has not reached a new low for so many steps, at least 1, goes back to the slots
            of its lowest KL and stays there; None trains to the end.
        held_out: fraction of the supervised positions, the last ones, in [0, 1), that only judge ``patience``; with 0
            the KL that is trained on judges.
        activation_checkpointing: activations are made anew in the backward pass: less memory, equal gradients.
        teacher_bytes: dense probabilities are kept between steps if they fit into so many bytes, and made anew from
            hidden states at every step otherwise; 0 keeps none.

    Raises:
        InputError: an option out of its range.

    References: KV-CAT, appendix "Gradient-based KV cache compression"; Eyuboglu et al. 2025, arXiv:2506.06266.
    """

    num_steps: int = 100
    lr: float = 1e-2
    init: str | CompactCache = "first"
    seed: int = 0
    freeze_first_slot: bool = False
    max_norm: float = 1.0
    num_sinks: int = 0
    schedule: str = "constant"
    warmup_steps: int = 0
    patience: int | None = None
    held_out: float = 0.0
    activation_checkpointing: bool = False
    teacher_bytes: int = 2**30

    def __post_init__(self) -> None:
        for name in ("num_steps", "warmup_steps", "teacher_bytes"):
            if getattr(self, name) < 0:
                raise InputError(f"{name} must not be negative, not {getattr(self, name)}")
        check_start(self.init, self.num_sinks)
        for name in ("lr", "max_norm"):
            if not getattr(self, name) > 0:
                raise InputError(f"{name} must be larger than 0, not {getattr(self, name)}")
        if self.schedule not in SCHEDULES:
            raise InputError(f"schedule must be one of {', '.join(map(repr, SCHEDULES))}, not {self.schedule!r}")
        if self.patience is not None and self.patience < 1:
            raise InputError(f"patience must be at least 1, not {self.patience}")
        if not 0 <= self.held_out < 1:
            raise InputError(f"held_out must be in [0, 1), not {self.held_out}")
        if self.held_out and self.patience is None:
            raise InputError(f"held_out={self.held_out} judges patience, which is not set")

    def __call__(
        self,
        trace: Trace,
        *,
        keep_ratio: float | int | None = None,
        num_slots: int | None = None,
        resume: str | Path | None = None,
        save_every: int = 10,
        on_step: OnStep | None = None,
    ) -> CompactCache:
        """The compact cache after ``num_steps`` steps.

        Args:
            trace: of the windows to compress.
            keep_ratio: fraction kept, in (0, 1]; 1 returns the dense cache.
            num_slots: number kept, in [1, prefix_len].
            resume: file for the state of the run: written as it goes and read first where it exists, so that the same
                call after a kill ends with the same bits (where the device's kernels are deterministic). The state of a
                run with other options is refused, except those of memory, the last two.
            save_every: steps between two writes of that file, at least 1.
            on_step: called after every step with its number, from 1, and the KL before it: mean over the examples at
                the positions that judge, nats per token.

        Raises:
            InputError: keep_ratio or num_slots out of range, a trace without supervising positions, a start that does
                not fit, or a state that is damaged or of another run.
        """
        slots = self._slots([trace], keep_ratio, num_slots)
        if slots >= trace.num_slots:
            return trace.dense_cache()
        file = self._state_file([trace], slots, resume, save_every)
        ((_, cache),) = self._optimise([trace], trace, slots, (self.num_steps,), on_step, file)
        return cache

    def snapshots(
        self,
        trace: Trace,
        *,
        keep_ratio: float | int | None = None,
        num_slots: int | None = None,
        on_step: OnStep | None = None,
    ) -> Iterator[tuple[int, CompactCache]]:
        """Steps taken and the compact cache, after 0, 1, 2, 5, 10, 20, 50, 100 steps and the last.

        Args:
            trace: of the windows to compress.
            keep_ratio: fraction kept, in (0, 1]; 1 gives the dense cache every time.
            num_slots: number kept, in [1, prefix_len].
            on_step: called after every step, as in a plain call.

        Raises:
            InputError: keep_ratio or num_slots out of range, a trace without supervising positions, or a start that
                does not fit.
        """
        steps = {step for step in SNAPSHOT_STEPS if step < self.num_steps} | {self.num_steps}
        slots = self._slots([trace], keep_ratio, num_slots)
        if slots >= trace.num_slots:
            return ((step, trace.dense_cache()) for step in sorted(steps))
        return self._optimise([trace], trace, slots, tuple(sorted(steps)), on_step, None)

    def shared(
        self,
        traces: Sequence[Trace],
        *,
        keep_ratio: float | int | None = None,
        num_slots: int | None = None,
        resume: str | Path | None = None,
        save_every: int = 10,
        on_step: OnStep | None = None,
    ) -> CompactCache:
        """One compact cache of one prefix, trained on all suffixes together that follow it in the traces.

        Every row of every trace begins with the same prefix; suffixes differ, and between traces also in length. The
        KL is the mean over all supervised positions of all rows. A step runs over the traces one by one, so that
        memory grows with the largest only.

        Args:
            traces: at least one, of one model and one prefix, such as a document and several conversations about it.
            keep_ratio, num_slots, resume, save_every, on_step: as in a plain call.

        Raises:
            InputError: as a plain call, no trace, or traces of several models or prefixes.

        References: Eyuboglu et al. 2025, arXiv:2506.06266 (Cartridges).
        """
        rows = list(traces)
        slots = self._slots(rows, keep_ratio, num_slots)
        example = joined(rows)
        if slots >= example.num_slots:
            return example.dense_cache()
        file = self._state_file(rows, slots, resume, save_every)
        ((_, cache),) = self._optimise(rows, example, slots, (self.num_steps,), on_step, file)
        return cache

    def _slots(self, traces: list[Trace], keep_ratio: float | int | None, num_slots: int | None) -> int:
        if not traces:
            raise InputError("no trace to train a shared cache on")
        if any(trace.supervision == "self" for trace in traces):
            raise InputError(
                "GradientCompression needs predictions after the prefix, which a trace with supervision='self' lacks: "
                "trace a suffix or a reconstruction sequence, or use AttentionMatching"
            )
        return slots_for(traces[0].prefix_len, keep_ratio, num_slots)

    def _optimise(
        self,
        traces: list[Trace],
        example: Trace,
        slots: int,
        wanted: tuple[int, ...],
        on_step: OnStep | None,
        file: StateFile | None,
    ) -> Iterator[tuple[int, CompactCache]]:
        start = starting_layers(example, slots, self.init, seed=self.seed, num_sinks=self.num_sinks)
        run = SlotOptimisation(traces, start, self.step_options())
        state = None if file is None else file.read()
        if state is not None:
            run.restore(state)
        for step in wanted:
            while run.num_steps < step and not run.stopped.all():
                kl = run.step(with_kl=on_step is not None)
                last = run.num_steps == self.num_steps or bool(run.stopped.all())
                if file is not None and (last or run.num_steps % file.every == 0):
                    file.write(run.state())
                if on_step is not None:
                    on_step(run.num_steps, kl.mean().item())
            yield step, compact_cache(example, run.layers(example.keys[0].dtype), "gradient", self._told(step))

    def step_options(self) -> StepOptions:
        """How each step is made."""
        return StepOptions(
            rate=self.learning_rate,
            max_norm=self.max_norm,
            freeze_first_slot=self.freeze_first_slot,
            patience=self.patience,
            held_out=self.held_out,
            recompute=self.activation_checkpointing,
            teacher_bytes=self.teacher_bytes,
        )

    def learning_rate(self, step: int) -> float:
        """Learning rate of a step.

        Args:
            step: its number, from 0; the first one already moves.
        """
        if step < self.warmup_steps:
            return self.lr * (step + 1) / self.warmup_steps
        if self.schedule == "constant":
            return self.lr
        progress = (step - self.warmup_steps) / max(1, self.num_steps - self.warmup_steps)
        return self.lr * 0.5 * (1 + math.cos(math.pi * progress))

    def _state_file(self, traces: list[Trace], slots: int, path: str | Path | None, every: int) -> StateFile | None:
        if path is None:
            return None
        settings = {f.name: str(getattr(self, f.name)) for f in fields(self) if f.name not in ("init", *_COSTS)}
        settings["init"] = self.init if isinstance(self.init, str) else cache_identity(self.init)
        return StateFile(Path(path), {**settings, "num_slots": str(slots), **identity(traces)}, every)

    def _told(self, step: int) -> dict[str, object]:
        name = self.init if isinstance(self.init, str) else self.init.metadata.get("method", "a compact cache")
        plain = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in ("num_steps", "lr", "init")}
        defaults = {f.name: f.default for f in fields(self)}
        changed = {key: value for key, value in plain.items() if value != defaults[key]}
        return {"steps": step, "lr": self.lr, "init": name, **changed}
