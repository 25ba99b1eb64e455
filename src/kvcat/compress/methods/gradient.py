"""Gradient-based compression: slots trained to give the dense model's predictions."""

import hashlib
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from functools import cached_property, partial
from pathlib import Path
from typing import ClassVar

import torch
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from kvcat.cache import CacheRecord, CompactCache, CompactLayer, Layer, cache_argument
from kvcat.cache.files import STATE, read_tensors, write_tensors
from kvcat.cache.fingerprint import hash_tensor
from kvcat.cache.ranges import Range, range_text
from kvcat.compress.base import (
    Compressor,
    best_layers,
    compact_cache,
    example_generators,
    is_between,
)
from kvcat.compress.calibration import budget_digests
from kvcat.compress.eviction import SCORERS, Eviction
from kvcat.compress.methods.attention_matching import AttentionMatching
from kvcat.compress.prefix import Prefix, protecting
from kvcat.compress.trace import Trace
from kvcat.errors import InputError, check_in, check_least, check_one_of
from kvcat.losses import chunked_distillation
from kvcat.models import decoder_layers, frozen, hidden_states, output_head
from kvcat.options import check_options, parse_spec
from kvcat.precision import tf32_facts, tf32_products
from kvcat.types import Float, Tensor, at_least_float32

SNAPSHOT_STEPS = (0, 1, 2, 5, 10, 20, 50, 100)
SAVE_EVERY = 10
_MAX_NORM = 1.0
OnStep = Callable[[int, float], None]


@dataclass(frozen=True)
class GradientCompression(Compressor):
    """Trains the keys and values of every slot so that the compact cache predicts what the dense
    cache predicts.

    Minimises the mean over the supervised positions t of KL(softmax(z*_t) || softmax(z_t)), z* the
    dense logits and z those on the compact cache, by AdamW without weight decay, gradients clipped
    at norm 1; the model's weights stay fixed. The supervised positions are the suffix, or the
    second copy of a reconstruction sequence. Every example is optimised by itself; its gradient is
    clipped by the norm of that gradient alone. On a GPU, products of a float32 model are in
    TF32 (``tf32_products``).

    Args:
        num_steps: gradient steps, at least 0.
        lr: learning rate, larger than 0.
        init: "first": the first slots of the prefix; "random": random ones, the same positions in
            every layer; "attention-matching" or the name of an eviction method: the cache of that
            method. Options follow the name, as in "attention-matching,budgets=adaptive". If this
            cache has a log-bias, it is trained as well.
        seed: seed of the random positions, and of a randomised ``init`` method without a seed.
        freeze_first_slot: the first slot that is not protected keeps its key and value.
        schedule: schedule of the learning rate: "constant", or "cosine", half a cosine that ends at
            0 after ``num_steps``.
        activation_checkpointing: activations are computed again in the backward pass: less memory,
            the same gradients.

    Raises:
        InputError: an option out of its range.

    References: KV-CAT, appendix "Gradient-based KV cache compression"; Eyuboglu et al. 2025,
    arXiv:2506.06266.
    """

    needs_predictions: ClassVar[bool] = True
    resumes: ClassVar[bool] = True

    num_steps: int = 100
    lr: float = 1e-2
    init: str = "first"
    seed: int = 0
    freeze_first_slot: bool = False
    schedule: str = "constant"
    activation_checkpointing: bool = False

    def __post_init__(self) -> None:
        check_options(GradientCompression, vars(self), "gradient")
        check_least(0, num_steps=self.num_steps)
        check_in("(0, inf)", lr=self.lr)
        check_one_of("schedule", self.schedule, ("constant", "cosine"))
        self._start  # noqa: B018 its options are checked

    @cached_property
    def _start(self) -> Compressor | None:
        """The method that makes the start; None: random positions, the same in every layer."""
        name, options = parse_spec(self.init)
        check_one_of("init", name, ("attention-matching", *SCORERS))
        if name == "random":
            if options:
                option = next(iter(options))
                raise InputError(
                    f"init {name!r} has no option {option!r}: give it to the gradient method"
                )
            return None
        make = AttentionMatching if name == "attention-matching" else partial(Eviction, name)
        method = make(**options)
        return method.with_seed(self.seed) if method.draws and "seed" not in options else method

    @property
    def draws(self) -> bool:
        """Whether the seed matters."""
        start = self._start
        return start is None or (start.draws and "seed" not in parse_spec(self.init)[1])

    def __call__(
        self,
        trace: Trace,
        *,
        keep_ratio: float | int | None = None,
        num_slots: int | None = None,
        protect: Sequence[Range] = (),
        resume: str | Path | None = None,
        on_step: OnStep | None = None,
    ) -> CompactCache:
        """The compact cache after ``num_steps`` steps.

        Args:
            trace, keep_ratio, num_slots, protect: as in ``Compressor``.
            resume: file for the state of the run. It is written every ten steps, and read first if
                it exists. After a kill, the same call ends with the same bits (if the device's
                kernels are deterministic). The state of a run with other options is rejected; only
                activation_checkpointing may differ.
            on_step: called after every step with its number, from 1, and the KL before it: mean
                over the examples, nats per token.

        Raises:
            InputError: keep_ratio or num_slots out of range, a trace without supervising positions,
                or a state that is damaged or of another run.
        """
        trace = protecting(trace, protect)
        ((_, cache),) = self._run(trace, keep_ratio, num_slots, [self.num_steps], resume, on_step)
        return cache

    @property
    def needs_all_queries(self) -> bool:  # type: ignore[override]
        """Whether the method that makes the start does."""
        return self._start is not None and self._start.needs_all_queries

    def facts(self, prefix: Prefix) -> dict[str, object]:
        """The options; the steps have the name that snapshots give them."""
        options = super().facts(prefix)
        precision = tf32_facts(prefix.trace.hidden)
        return {"steps": options.pop("num_steps"), **options, **precision}

    def fit(self, prefix: Prefix, sizes: Sequence[int]) -> Iterator[Sequence[Layer]]:
        """The trained layers of several sizes, one training each."""
        for size in sizes:
            training = SlotTraining(self, prefix, self.starting_layers(prefix, size))
            while training.num_steps < self.num_steps:
                training.step()
            yield training.layers()

    @property
    def last_step(self) -> int:
        """The number of steps."""
        return self.num_steps

    def snapshots(
        self, trace: Trace, *, keep_ratio: float | int | None = None, num_slots: int | None = None
    ) -> Iterator[tuple[int, CompactCache]]:
        """Step numbers, each with the compact cache after that step: 0, 1, 2, 5, 10, 20, 50, 100
        and the last.

        Raises:
            InputError: as a plain call.
        """
        steps = sorted(
            {step for step in SNAPSHOT_STEPS if step < self.num_steps} | {self.num_steps}
        )
        return self._run(trace, keep_ratio, num_slots, steps)

    def learning_rate(self, step: int) -> float:
        """Learning rate of a step, from 0."""
        if self.schedule == "constant":
            return self.lr
        return self.lr * 0.5 * (1 + math.cos(math.pi * step / max(1, self.num_steps)))

    def starting_layers(self, prefix: Prefix, num_slots: int) -> Sequence[Layer]:
        """Slots to start from, without the protected ones."""
        if self._start is not None:
            return next(self._start.fit(prefix, [num_slots]))
        return best_layers(prefix, _random_scores(prefix.trace, self.seed), num_slots)

    def _run(
        self,
        trace: Trace,
        keep_ratio: float | int | None,
        num_slots: int | None,
        steps: list[int],
        resume: str | Path | None = None,
        on_step: OnStep | None = None,
    ) -> Iterator[tuple[int, CompactCache]]:
        """The caches after the given numbers of steps; errors are raised before the first step."""
        slots = self.slots_of(trace, keep_ratio, num_slots)
        if not is_between(trace, slots):
            (untrained,) = self.caches(trace, [slots])
            return ((step, untrained) for step in steps)
        prefix = Prefix.of(trace)
        start = self.starting_layers(prefix, slots - prefix.num_protected)
        training = SlotTraining(self, prefix, start)
        return self._train(training, steps, None if resume is None else Path(resume), on_step)

    def _train(
        self, training: "SlotTraining", steps: list[int], state: Path | None, on_step: OnStep | None
    ) -> Iterator[tuple[int, CompactCache]]:
        if state is not None and state.exists():
            training.restore(state)
        prefix = training.prefix
        for step in steps:
            while training.num_steps < step:
                kl = training.step()
                num_taken = training.num_steps
                is_saved_now = num_taken % SAVE_EVERY == 0 or num_taken == self.num_steps
                if state is not None and is_saved_now:
                    training.save(state)
                if on_step is not None:
                    on_step(num_taken, kl)
            layers = prefix.whole_layers(training.layers())
            facts = {**self.facts(prefix), "steps": step}
            cache = compact_cache(prefix.trace, layers, self.name, facts)
            yield step, cache if self.bits is None else cache.quantize(self.bits)


class SlotTraining:
    """AdamW on the slots of compact caches, towards the dense model's predictions.

    Every row of the trace has a cache, in which protected slots come first and are not trained.
    Heads with fewer slots than the fullest of their layer are padded with slots of log-bias -inf,
    whose gradient is exactly 0. The padding is removed from the result. A cache that starts with
    every slot is not trained. A caller's ``inference_mode`` does not hold here, where gradients are
    needed.
    """

    @torch.inference_mode(False)
    def __init__(self, method: GradientCompression, prefix: Prefix, start: Sequence[Layer]):
        self.num_steps = 0
        self.prefix = prefix
        trace = prefix.trace
        _check_suffix(trace)
        self.trace = trace
        start = prefix.whole_layers(start)
        self._method = method
        self._budgets = budget_digests(method.init)
        self._num_fixed = prefix.num_protected + method.freeze_first_slot
        # of each layer: what is trained, and log-biases of 0 and -inf that only hide the padding
        self._trained: list[dict[str, Tensor]] = []
        self._fixed: list[Tensor | None] = []
        for layer in start:
            padded = layer.padded()
            trained = {"keys": padded.keys, "values": padded.values}
            if layer.log_bias is not None and padded.log_bias is not None:
                trained["log_bias"] = padded.log_bias
            self._trained.append(
                {
                    name: at_least_float32(slots).clone().requires_grad_(True)
                    for name, slots in trained.items()
                }
            )
            self._fixed.append(padded.log_bias if layer.log_bias is None else None)
        self._parameters = [slots for trained in self._trained for slots in trained.values()]
        self._optimizer = torch.optim.AdamW(self._parameters, lr=method.lr, weight_decay=0.0)
        mean_slots = torch.cat([layer.counts for layer in start]).double().mean().item()
        self._mean_slots = f"{mean_slots:g}"
        has_every_slot = [
            (layer.counts == of_trace.slots.present_counts()).all(1)
            for layer, of_trace in zip(start, trace.layers, strict=True)
        ]
        self._is_whole = torch.stack(has_every_slot).all(0).to(trace.hidden.device)

    @torch.inference_mode(False)
    def step(self) -> float:
        """Take one step; KL before it, mean over the caches, nats per supervised position."""
        device = self.trace.hidden.device
        with torch.enable_grad(), frozen(self.trace.model), tf32_products(device):
            kl = _mean_kl(self.trace, self._replay())
            # of the sum, as every example would have it alone
            gradients = torch.autograd.grad(kl * self.trace.batch_size, self._parameters)
        # no gradient, and thus no step of Adam, where a slot shall stay as it is
        for gradient in gradients:
            gradient[self._is_whole] = 0
            gradient[:, :, : self._num_fixed] = 0
        squares = torch.stack([gradient.flatten(1).square().sum(1) for gradient in gradients])
        # clipped for each example by itself: its cache does not depend on its batch
        norm = squares.sum(0).sqrt()
        factor = (_MAX_NORM / (norm + 1e-6)).clamp(max=1.0)
        for parameter, gradient in zip(self._parameters, gradients, strict=True):
            other_dims = [1] * (gradient.ndim - 1)
            parameter.grad = gradient * factor.view(-1, *other_dims)
        self._optimizer.param_groups[0]["lr"] = self._method.learning_rate(self.num_steps)
        self._optimizer.step()
        self.num_steps += 1
        return kl.item()

    def layers(self) -> list[Layer]:
        """Copies of the trained slots, keys and values in the model's dtype."""
        num_protected = self.prefix.num_protected
        layers = []
        for trained, fixed in zip(self._trained, self._fixed, strict=True):
            layer = CompactLayer(
                **{name: x[:, :, num_protected:].detach().clone() for name, x in trained.items()}
            )
            exists = None if fixed is None else fixed[:, :, num_protected:] > -torch.inf
            kept = layer.without_absent() if exists is None else layer.taken(exists)
            layers.append(kept.to(dtype=self.trace.keys[0].dtype))
        return layers

    def save(self, path: Path) -> None:
        """Write everything that the next steps depend on; the header identifies the run."""
        tensors = {"num_steps": torch.tensor(self.num_steps)}
        for index, parameter in enumerate(self._parameters):
            tensors[f"slots.{index}"] = parameter.detach()
            for name, tensor in self._optimizer.state[parameter].items():
                tensors[f"{name}.{index}"] = tensor
        write_tensors(path, tensors, self._identity(), STATE)

    def restore(self, path: Path) -> None:
        """Continue from a file of ``save``; the state of another run is rejected."""
        theirs, tensors, _ = read_tensors(path, STATE)
        ours = self._identity()
        for name in sorted(theirs.keys() | ours.keys()):
            if theirs.get(name) != ours.get(name):
                change = f"its {name} is {theirs.get(name)}, here it is {ours.get(name)}"
                raise InputError(f"{path} is the state of another run: {change}")
        self.num_steps = int(tensors["num_steps"])
        for index, parameter in enumerate(self._parameters):
            parameter.data.copy_(tensors[f"slots.{index}"])
            state = self._optimizer.state[parameter]
            state["step"] = tensors[f"step.{index}"].clone()
            for name in ("exp_avg", "exp_avg_sq"):
                state[name] = tensors[f"{name}.{index}"].clone().to(parameter.device)

    def _identity(self) -> dict[str, str]:
        """The settings that distinguish this run from others."""
        identity = {
            option.name: str(getattr(self._method, option.name)) for option in fields(self._method)
        }
        del identity["activation_checkpointing"], identity["bits"]
        trace = self.trace
        digest = hashlib.sha256(f"{trace.prefix_len} {trace.text.supervision_start}\n".encode())
        hash_tensor(digest, "input_ids", trace.input_ids)
        if trace.past is not None:
            for layer in trace.layers:
                for slots in layer.slots.tensors().values():
                    hash_tensor(digest, "past", slots)
        identity["num_slots"] = self._mean_slots  # the name in state files
        if self._budgets:
            identity["budgets"] = self._budgets
        if trace.protected:
            identity["protected"] = range_text(trace.protected)
        if trace.text.rope is not None:
            identity["rope"] = trace.text.rope
        if trace.states:
            identity["layers"] = " ".join(str(number) for number in trace.layer_numbers)
        identity["model"] = trace.fingerprint[:16]
        identity["tokens"] = digest.hexdigest()[:16]
        return identity

    def _replay(self) -> Float[Tensor, "batch suffix hidden"]:
        trace = self.trace
        layers = [
            CompactLayer(trained["keys"], trained["values"], trained.get("log_bias", fixed))
            for trained, fixed in zip(self._trained, self._fixed, strict=True)
        ]
        record = CacheRecord(rope=trace.text.rope, room=trace.text.room)
        cache = CompactCache(layers, trace.prefix_len, trace.fingerprint, record, trace.states)
        with _recomputing(trace.model, self._method.activation_checkpointing):
            past = trace.after_document(cache).to_transformers(
                trace.model, read_only=True, any_length=True
            )
            options = {"use_cache": True, **cache_argument(past)}
            return hidden_states(trace.model, input_ids=trace.suffix_ids, **options)


def _check_suffix(trace: Trace) -> None:
    """Reject one token after a recurrent state: models then write to the state in place, which has
    no gradient.
    """
    is_recurrent = any(not state.is_window for state in trace.states.values())
    if is_recurrent and trace.suffix_ids.shape[1] == 1:
        raise InputError(
            f"{type(trace.model).__name__}: gradient needs at least two tokens after the prefix "
            "where layers have a recurrent state"
        )


def _mean_kl(trace: Trace, hidden: Float[Tensor, "batch suffix hidden"]) -> Float[Tensor, ""]:
    """Mean over the supervised positions of KL(dense || student), with gradient, chunk by chunk."""
    first = trace.text.supervision_start - trace.prefix_len
    # the trace's hidden states start one position earlier, at the last of the prefix
    teacher = trace.hidden[:, first + 1 :]
    return chunked_distillation(output_head(trace.model), teacher, hidden[:, first:])


@contextmanager
def _recomputing(model: PreTrainedModel, enabled: bool) -> Iterator[None]:
    """Inside the block, every decoder layer keeps only its input and runs again in the backward
    pass.

    transformers' activation checkpointing drops the cache. This one passes the cache on. The cache
    must be read-only, so that a layer's second run gets the same cache as the first.
    """
    layers = decoder_layers(model) if enabled else []
    replaced = [layer.__dict__.get("forward") for layer in layers]
    try:
        for layer in layers:
            layer.forward = partial(
                checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False
            )
        yield
    finally:
        for layer, forward in zip(layers, replaced, strict=True):
            if forward is None:
                del layer.forward
            else:
                layer.forward = forward


def _random_scores(trace: Trace, seed: int) -> list[Tensor]:
    """Per layer, scores of slots in a random order of their ranks, the same in every layer and
    head.
    """
    ranks_of_layers = [layer.slots.ranks() for layer in trace.layers]
    slots_of_layers = torch.stack([ranks.amax((1, 2)) + 1 for ranks in ranks_of_layers])
    num_slots = slots_of_layers.amax(0).tolist()  # of each example
    by_rank = torch.zeros(len(num_slots), max(num_slots))  # (examples, ranks)
    for example, generator in enumerate(example_generators(trace, seed)):
        count = num_slots[example]
        order = torch.randperm(count, generator=generator)
        by_rank[example, order] = -torch.arange(count).float()
    by_rank = by_rank.to(trace.input_ids.device).unsqueeze(1)
    scores = []
    for ranks in ranks_of_layers:
        num_heads = ranks.shape[1]
        scores.append(by_rank.expand(-1, num_heads, -1).gather(2, ranks.clamp(min=0)))
    return scores
