"""Gradient-based compression: slots trained to give the dense model's predictions."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

import torch

from kvcat.cache import CompactCache, Layer
from kvcat.compress.base import Compressor, best_layer, compact_cache, example_generators, slots_for, wide
from kvcat.compress.eviction import SCORERS, Eviction
from kvcat.compress.methods.attention_matching import AttentionMatching
from kvcat.compress.options import check_options
from kvcat.compress.slot_training import SlotTraining, StateFile, cache_identity, joined
from kvcat.compress.trace import Trace
from kvcat.errors import InputError
from kvcat.methods import parse_method

SNAPSHOT_STEPS = (0, 1, 2, 5, 10, 20, 50, 100)
OnStep = Callable[[int, float], None]


@dataclass(frozen=True)
class GradientCompression(Compressor):
    """Keys and values of every slot, trained so that the compact cache predicts as the dense one does.

    Minimises the mean over the supervised positions t of KL(softmax(z*_t) || softmax(z_t)), z* the dense logits and z
    those on the compact cache, by AdamW without weight decay, gradients clipped at norm 1; the model's weights stay
    fixed. The supervised positions are the suffix, or the second copy of a reconstruction sequence. Every example is
    optimised by itself, its gradient clipped by its own norm: a batch gives what its examples give one by one.
    ``shared`` makes one cache for many rows.

    Args:
        num_steps: gradient steps, at least 0.
        lr: learning rate, larger than 0.
        init: "first": the first slots of the prefix; "random": random ones, the same positions in every layer;
            "attention-matching" or an eviction's name: what that method gives, its options behind the name as in
            "attention-matching,budgets=adaptive"; or a compact cache of this prefix with as many slots, or, where heads
            differ, no more on average. A log-bias that the start has is trained as well.
        seed: of the random positions.
        freeze_first_slot: the first slot keeps its key and value.
        schedule: of the learning rate: "constant", or "cosine": half a cosine that ends at 0 after ``num_steps``.
        activation_checkpointing: activations are made anew in the backward pass: less memory, equal gradients.

    Raises:
        InputError: an option out of its range.

    References: KV-CAT, appendix "Gradient-based KV cache compression"; Eyuboglu et al. 2025, arXiv:2506.06266.
    """

    num_steps: int = 100
    lr: float = 1e-2
    init: str | CompactCache = "first"
    seed: int = 0
    freeze_first_slot: bool = False
    schedule: str = "constant"
    activation_checkpointing: bool = False

    def __post_init__(self) -> None:
        if self.num_steps < 0:
            raise InputError(f"num_steps must not be negative, not {self.num_steps}")
        if not self.lr > 0:
            raise InputError(f"lr must be larger than 0, not {self.lr}")
        if self.schedule not in ("constant", "cosine"):
            raise InputError(f"schedule must be 'constant' or 'cosine', not {self.schedule!r}")
        if isinstance(self.init, str):
            _starting_method(self.init)

    @property
    def draws(self) -> bool:
        """Whether the seed matters."""
        return self.init == "random"

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
                run with other options is refused, except activation_checkpointing.
            save_every: steps between two writes of that file, at least 1.
            on_step: called after every step with its number, from 1, and the KL before it: mean over the examples,
                nats per token.

        Raises:
            InputError: keep_ratio or num_slots out of range, a trace without supervising positions, a start that does
                not fit, or a state that is damaged or of another run.
        """
        slots = self._slots([trace], keep_ratio, num_slots)
        if slots >= trace.num_slots:
            return trace.dense_cache()
        file = self._state_file([trace], slots, resume, save_every)
        ((_, cache),) = self._train([trace], trace, slots, [self.num_steps], on_step, file)
        return cache

    def compress(self, trace: Trace, sizes: Sequence[int]) -> Iterator[CompactCache]:
        """The caches of several sizes, one training each."""
        return (self(trace, num_slots=size) for size in sizes)

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
        steps = sorted({step for step in SNAPSHOT_STEPS if step < self.num_steps} | {self.num_steps})
        slots = self._slots([trace], keep_ratio, num_slots)
        if slots >= trace.num_slots:
            return ((step, trace.dense_cache()) for step in steps)
        return self._train([trace], trace, slots, steps, on_step, None)

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
        ((_, cache),) = self._train(rows, example, slots, [self.num_steps], on_step, file)
        return cache

    def learning_rate(self, step: int) -> float:
        """Learning rate of a step."""
        if self.schedule == "constant":
            return self.lr
        return self.lr * 0.5 * (1 + math.cos(math.pi * step / max(1, self.num_steps)))

    def starting_layers(self, trace: Trace, num_slots: int) -> list[Layer]:
        """Slots to start from, float32 (float64 where the model is)."""
        if isinstance(self.init, CompactCache):
            layers = _fitting(trace, num_slots, self.init)
        elif (method := _starting_method(self.init)) is not None:
            layers = method(trace, num_slots=num_slots).layers
        else:
            scores = _random_scores(trace, self.seed)
            layers = [best_layer(trace, index, own, num_slots) for index, own in enumerate(scores)]
        return [layer.to(dtype=wide(layer.keys).dtype) for layer in layers]

    def _slots(self, traces: list[Trace], keep_ratio: float | int | None, num_slots: int | None) -> int:
        if not traces:
            raise InputError("no trace to train a shared cache on")
        if any(trace.supervision == "self" for trace in traces):
            raise InputError(
                "GradientCompression needs predictions after the prefix, which a trace with supervision='self' lacks: "
                "trace a suffix or a reconstruction sequence, or use AttentionMatching"
            )
        return slots_for(traces[0].prefix_len, keep_ratio, num_slots)

    def _train(
        self,
        traces: list[Trace],
        example: Trace,
        slots: int,
        steps: list[int],
        on_step: OnStep | None,
        file: StateFile | None,
    ) -> Iterator[tuple[int, CompactCache]]:
        """The caches after some numbers of steps."""
        training = SlotTraining(
            traces, self.starting_layers(example, slots), learning_rate=self.learning_rate,
            freeze_first_slot=self.freeze_first_slot, recompute=self.activation_checkpointing,
        )  # fmt: skip
        if file is not None and (state := file.read()) is not None:
            training.restore(state)
        for step in steps:
            while training.num_steps < step:
                kl = training.step()
                if file is not None and (training.num_steps == self.num_steps or training.num_steps % file.every == 0):
                    file.write(training.state())
                if on_step is not None:
                    on_step(training.num_steps, kl)
            yield step, compact_cache(example, training.layers(example.keys[0].dtype), "gradient", self._facts(step))

    def _state_file(self, traces: list[Trace], slots: int, path: str | Path | None, every: int) -> StateFile | None:
        if path is None:
            return None
        options = {option.name: str(getattr(self, option.name)) for option in fields(self)}
        del options["activation_checkpointing"]
        init = self.init if isinstance(self.init, str) else cache_identity(self.init)
        return StateFile.of(Path(path), {**options, "init": init, "num_slots": str(slots)}, traces, every)

    def _facts(self, step: int) -> dict[str, object]:
        """What the metadata say: steps, learning rate, start, and options that differ from their defaults."""
        init = self.init if isinstance(self.init, str) else self.init.metadata.get("method", "a compact cache")
        named = {o.name: (getattr(self, o.name), o.default) for o in fields(self) if o.name not in _ALWAYS_NAMED}
        changed = {name: value for name, (value, default) in named.items() if value != default}
        return {"steps": step, "lr": self.lr, "init": init, **changed}


_ALWAYS_NAMED = ("num_steps", "lr", "init")


def _starting_method(init: str) -> Compressor | None:
    """The method that makes a start, from its name and options; None: random positions, the same in every layer."""
    name, options = parse_method(init)
    if name not in ("attention-matching", *SCORERS):
        starts = ", ".join(map(repr, ("attention-matching", *SCORERS)))
        raise InputError(f"init must be a compact cache or one of {starts}, not {name!r}")
    if name == "random":
        if options:
            raise InputError(f"init {name!r} has no option {next(iter(options))!r}: give the gradient method's own")
        return None
    if name == "attention-matching":
        return AttentionMatching(**options)
    check_options(SCORERS[name], options, f"init {name}")
    return Eviction(name, **options)


def _random_scores(trace: Trace, seed: int) -> list[torch.Tensor]:
    """Per layer, scores of slots: those of a random order of their ranks, the same in every layer and head."""
    ranks = [trace.ranks(layer) for layer in range(len(trace.keys))]
    counts = torch.stack([trace.counts(layer).amax(1) for layer in range(len(trace.keys))]).amax(0).tolist()
    scores = torch.zeros(len(counts), max(counts))
    for own, count, generator in zip(scores, counts, example_generators(trace, seed), strict=True):
        own[torch.randperm(count, generator=generator)] = -torch.arange(count).float()
    spread = scores.to(trace.input_ids.device).unsqueeze(1)
    return [spread.expand(-1, own.shape[1], -1).gather(2, own.clamp(min=0)) for own in ranks]


def _fitting(trace: Trace, num_slots: int, init: CompactCache) -> list[Layer]:
    """The layers of a given start, if it is one of this prefix and size."""
    if init.fingerprint != trace.fingerprint or init.num_tokens != trace.prefix_len:
        raise InputError(
            f"init is a cache of {init.num_tokens} tokens and model {init.fingerprint[:12]}, the trace one of "
            f"{trace.prefix_len} tokens and model {trace.fingerprint[:12]}"
        )
    if init.batch_size not in (1, trace.batch_size):
        raise InputError(f"init has {init.batch_size} examples, the trace {trace.batch_size}")
    slots = init.mean_slots
    if slots > num_slots or (init.is_uniform and slots < num_slots):
        raise InputError(f"init has {slots:.6g} slots, {num_slots} are wanted")
    rows = torch.arange(trace.batch_size) % init.batch_size
    return [layer.to(trace.keys[0].device).select(rows) for layer in init.layers]
