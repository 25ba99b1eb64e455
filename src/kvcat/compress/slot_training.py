"""One gradient step after the other on the slots of compact caches, and the state of such a run on disk."""

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from kvcat.cache import CompactCache, CompactLayer, Layer
from kvcat.cache.fingerprint import hash_tensor
from kvcat.compress.base import wide
from kvcat.compress.trace import Trace
from kvcat.errors import InputError
from kvcat.files import atomic_write
from kvcat.losses import chunked_objective
from kvcat.models import decoder_layers, examined_head, frozen, hidden_states
from kvcat.types import Float, Tensor

_MAX_NORM = 1.0
_FORMAT = "kvcat-gradient-state-2"


class SlotTraining:
    """AdamW on the slots of compact caches, towards the dense model's predictions.

    As many caches as the starting layers have examples: one per row of a trace, each with its own gradient norm, or a
    single one that all rows of all traces share. Heads with fewer slots than the fullest of their layer are filled up
    with slots of log-bias -inf, whose gradient is exactly 0: they never move, weigh nothing in the norm, and are gone
    from the result. A cache that starts with all slots of its prefix stays as it is.

    Args:
        traces: of one model; a single one unless the cache is shared.
        start: slots to start from, in at least float32; a log-bias is trained as well.
        learning_rate: of the step of a number, from 0.
        freeze_first_slot: the first slot stays as it is.
        recompute: activations are made anew in the backward pass.
    """

    def __init__(
        self,
        traces: list[Trace],
        start: Sequence[Layer],
        *,
        learning_rate: Callable[[int], float],
        freeze_first_slot: bool,
        recompute: bool,
    ):
        self.num_steps, self._traces, self._learning_rate = 0, traces, learning_rate
        self._freeze_first_slot, self._recompute = freeze_first_slot, recompute
        padded = [layer.padded() for layer in start]
        names = [("keys", "values") if x.log_bias is None else ("keys", "values", "log_bias") for x in start]
        self._trained = [
            {name: wide(layer.tensors()[name]).clone().requires_grad_(True) for name in own}
            for layer, own in zip(padded, names, strict=True)
        ]
        self._parameters = [x for own in self._trained for x in own.values()]
        # log-biases of 0 and -inf that only hide the slots which heads do not have
        self._fixed = [None if "log_bias" in own else x.log_bias for x, own in zip(padded, names, strict=True)]
        self._optimizer = torch.optim.AdamW(self._parameters, lr=learning_rate(0), weight_decay=0.0)
        full = [(x.counts == traces[0].counts(i)[: x.batch_size]).all(1) for i, x in enumerate(start)]
        self._whole = torch.stack(full).all(0).to(traces[0].hidden.device)

    def step(self) -> float:
        """Take one step; KL before it, mean over the caches, nats per supervised position."""
        gradients, kl = self._gradients()
        for gradient in gradients:
            gradient[self._whole] = 0
            if self._freeze_first_slot:
                gradient[:, :, 0] = 0
        norm = torch.stack([g.flatten(1).square().sum(1) for g in gradients]).sum(0).sqrt()
        factor = (_MAX_NORM / (norm + 1e-6)).clamp(max=1.0)
        for parameter, gradient in zip(self._parameters, gradients, strict=True):
            parameter.grad = gradient * factor.view(-1, *[1] * (gradient.ndim - 1))
        for group in self._optimizer.param_groups:
            group["lr"] = self._learning_rate(self.num_steps)
        self._optimizer.step()
        self.num_steps += 1
        return kl

    def layers(self, dtype: torch.dtype) -> list[Layer]:
        """The slots as they are, copied, keys and values in the given dtype."""
        found = []
        for own, fixed in zip(self._trained, self._fixed, strict=True):
            copied = {name: x.detach().clone() for name, x in own.items()}
            layer = CompactLayer(**copied)
            kept = layer.without_absent() if fixed is None else layer.taken(fixed > -torch.inf)
            found.append(kept.to(dtype=dtype))
        return found

    def state(self) -> dict[str, Tensor]:
        """Everything that the next steps depend on, by name."""
        tensors = {"num_steps": torch.tensor(self.num_steps)}
        for index, parameter in enumerate(self._parameters):
            tensors[f"slots.{index}"] = parameter.detach()
            tensors |= {f"{name}.{index}": x for name, x in self._optimizer.state[parameter].items()}
        return tensors

    def restore(self, tensors: dict[str, Tensor]) -> None:
        """Go on from what ``state`` gave."""
        self.num_steps = int(tensors["num_steps"])
        for index, parameter in enumerate(self._parameters):
            parameter.data.copy_(tensors[f"slots.{index}"])
            for name in ("step", "exp_avg", "exp_avg_sq"):
                moment = tensors[f"{name}.{index}"]
                self._optimizer.state[parameter][name] = moment if name == "step" else moment.to(parameter.device)

    def _gradients(self) -> tuple[list[Tensor], float]:
        """Gradient of the sum over caches of each cache's mean KL, and the mean of these KLs."""
        shared = len(self._parameters[0]) == 1
        counts = [len(t.input_ids) * (t.input_ids.shape[1] - t.supervision_start) for t in self._traces]
        total, mean = [torch.zeros_like(x) for x in self._parameters], 0.0
        for trace, count in zip(self._traces, counts, strict=True):
            hidden, start = self._replay(trace), trace.supervision_start - trace.prefix_len
            with torch.enable_grad(), frozen(trace.model):
                kl = _mean_kl(trace, hidden, start)
                share = count / sum(counts)
                found = torch.autograd.grad(kl * (share if shared else trace.batch_size), self._parameters)
            total = [a + b for a, b in zip(total, found, strict=True)]
            mean += share * kl.item()
        return total, mean

    @torch.enable_grad()
    def _replay(self, trace: Trace) -> Float[Tensor, "batch suffix hidden"]:
        layers = [
            CompactLayer(own["keys"], own["values"], own.get("log_bias", fixed))
            for own, fixed in zip(self._trained, self._fixed, strict=True)
        ]
        cache = CompactCache(layers, trace.prefix_len, trace.fingerprint)
        with frozen(trace.model), _recomputing(trace.model, self._recompute):
            past = cache.to_transformers(trace.model, read_only=True)
            return hidden_states(trace.model, input_ids=trace.suffix_ids, past_key_values=past, use_cache=True)


def joined(traces: list[Trace]) -> Trace:
    """One example whose queries are those of every row of every trace, for compressors that read the queries.

    Args:
        traces: of one prefix.

    Raises:
        InputError: other models, or other prefixes.
    """
    first = traces[0]
    prefix = first.input_ids[:1, : first.prefix_len]
    for trace in traces:
        found = trace.input_ids[:, : trace.prefix_len]
        same = (trace.fingerprint, trace.past_len) == (first.fingerprint, first.past_len)
        if not same or found.shape[1] != prefix.shape[1] or (found != prefix).any():
            raise InputError(
                f"one cache is shared by one prefix only: these {len(traces)} traces have several models or prefixes"
            )
    queries = [
        torch.cat([part.transpose(1, 2).flatten(0, 1) for part in parts]).unsqueeze(0).transpose(1, 2)
        for parts in zip(*(trace.queries for trace in traces), strict=True)
    ]
    row = slice(0, 1)
    return replace(
        first,
        input_ids=first.input_ids[row],
        keys=[x[row] for x in first.keys],
        values=[x[row] for x in first.values],
        queries=queries,
        suffix_keys=[x[row] for x in first.suffix_keys],
        prefix_queries=[x[row] for x in first.prefix_queries],
        hidden=first.hidden[row],
        log_bias=None if first.log_bias is None else [x[row] for x in first.log_bias],
    )


@dataclass(frozen=True)
class StateFile:
    """Where a run keeps its state: a safetensors file, written whole or not at all, with a checksum.

    Args:
        path: of the file; its folder must exist.
        settings: what identifies the run, as texts.
        every: steps between two writes, at least 1.

    Raises:
        InputError: every below 1, or a path that cannot be a file.
    """

    path: Path
    settings: dict[str, str]
    every: int

    def __post_init__(self) -> None:
        if self.every < 1:
            raise InputError(f"save_every must be at least 1, not {self.every}")
        if self.path.is_dir() or not self.path.parent.is_dir():
            reason = "it is a folder" if self.path.is_dir() else "no such folder"
            raise InputError(f"cannot keep the state of a run in {self.path}: {reason}")

    @classmethod
    def of(cls, path: Path, settings: dict[str, str], traces: list[Trace], every: int) -> "StateFile":
        """The file of a run with some settings on some traces, whose model and tokens identify it as well."""
        digest = hashlib.sha256()
        for trace in traces:
            digest.update(f"{trace.prefix_len} {trace.supervision_start}\n".encode())
            hash_tensor(digest, "input_ids", trace.input_ids)
        model = traces[0].fingerprint[:16]
        return cls(path, {**settings, "model": model, "tokens": digest.hexdigest()[:16]}, every)

    def write(self, tensors: dict[str, Tensor]) -> None:
        """Replace the file."""
        tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
        settings = json.dumps(self.settings, sort_keys=True)
        header = {"format": _FORMAT, "settings": settings, "sha256": _checksum(tensors, settings)}
        try:
            with atomic_write(self.path) as partial_path:
                save_file(tensors, partial_path, header)
        except (OSError, SafetensorError) as error:
            raise InputError(f"cannot write {self.path}: {error}") from error

    def read(self) -> dict[str, Tensor] | None:
        """The tensors last written; None where there is no file yet."""
        if not self.path.exists():
            return None
        try:
            with safe_open(self.path, framework="pt") as file:
                header = dict(file.metadata() or {})
                tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
        except (SafetensorError, OSError) as error:
            raise InputError(f"{self.path} is truncated or not a state of a gradient-based run: {error}") from error
        if header.get("format") != _FORMAT:
            raise InputError(f"{self.path} is not a state of a gradient-based run, to be resumed by this version")
        if header.get("sha256") != _checksum(tensors, header.get("settings", "")):
            raise InputError(f"{self.path} is corrupt: its contents do not match its checksum")
        found = json.loads(header["settings"])
        for name in sorted(found.keys() | self.settings.keys()):
            theirs, ours = found.get(name), self.settings.get(name)
            if theirs != ours:
                raise InputError(f"{self.path} is the state of another run: its {name} is {theirs}, here it is {ours}")
        return tensors


def cache_identity(cache: CompactCache) -> str:
    """What tells a compact cache from others, as a short text."""
    digest = hashlib.sha256(cache.fingerprint.encode())
    for index, layer in enumerate(cache.layers):
        for name, tensor in sorted(layer.tensors().items()):
            hash_tensor(digest, f"{index}.{name}", tensor)
    return f"cache {digest.hexdigest()[:16]}"


def _mean_kl(trace: Trace, hidden: Float[Tensor, "batch suffix hidden"], start: int) -> Float[Tensor, ""]:
    """Mean over suffix positions from ``start`` on of KL(dense || student), with gradient, chunk by chunk."""
    # the objective leaves out the last position, which predicts no token of its sequence: one more is appended
    pair = [torch.cat([x, x[:, -1:]], 1) for x in (trace.hidden[:, start + 1 :], hidden[:, start:])]
    tokens = trace.input_ids.new_zeros(pair[0].shape[:2])
    return chunked_objective(examined_head(trace.model), pair[0], pair[1], tokens, anchor_weight=0.0).total


@contextmanager
def _recomputing(model: PreTrainedModel, enabled: bool) -> Iterator[None]:
    """Inside, every decoder layer keeps only its input for the backward pass and runs again there.

    transformers' own activation checkpointing drops the cache. This one hands it on, so it must be a read-only one:
    a layer's second run meets it as the first did.
    """
    layers = decoder_layers(model) if enabled else []
    before = [(layer, layer.__dict__.get("forward")) for layer in layers]
    try:
        for layer, _ in before:
            layer.forward = partial(checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False)
        yield
    finally:
        for layer, own in before:
            if own is None:
                del layer.forward
            else:
                layer.forward = own


def _checksum(tensors: dict[str, Tensor], settings: str) -> str:
    digest = hashlib.sha256(settings.encode())
    for name in sorted(tensors):
        hash_tensor(digest, name, tensors[name])
    return digest.hexdigest()
