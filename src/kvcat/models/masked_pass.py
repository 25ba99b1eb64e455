"""The dense and the masked pass of the same weights, as one batch of the unmodified model."""

import functools
import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from kvcat.attention import SlotGate, enable
from kvcat.attention.interface import Decision
from kvcat.cache import layer_windows, recurrent_layers
from kvcat.errors import InputError, check_in, whole
from kvcat.models.structure import decoder_layers, hidden_states
from kvcat.policies import SparsificationPolicy, check_group_starts, gate
from kvcat.types import Float, Int, Tensor


@dataclass(frozen=True, eq=False)
class HiddenOutput:
    """Hidden states of both passes before the output head.

    Args:
        dense_hidden: hidden states of the sequences in the dense pass.
        masked_hidden: hidden states of the sequences, or of their suffixes, in the masked pass.
        keep: by first layer of each group, the visible slots of the sequences or prefixes, 1 or 0,
            with gradient. Position 0 is always 1.
        scores: by first layer of each group, the policy's output in [0, 1], also for position 0.
    """

    dense_hidden: Float[Tensor, "batch tokens hidden"]
    masked_hidden: Float[Tensor, "batch masked_tokens hidden"]
    keep: dict[int, Float[Tensor, "batch slots"]]
    scores: dict[int, Float[Tensor, "batch slots"]]


class KVPass:
    """State of one forward pass; the keyword ``kv_pass`` carries it to the layers' hooks.

    It is a plain class, because FSDP2 copies dataclasses but no other objects.

    Args:
        masked_pass: the module that runs it.
        prefix_len: as in ``MaskedPass.hidden``.
        generators: one per sequence. One number per group is drawn from each and seeds that
            group's draws, so that a layer that runs again makes the same draws as before.
    """

    def __init__(
        self,
        masked_pass: "MaskedPass",
        batch: int,
        prefix_len: int | None,
        generators: Sequence[torch.Generator] | None,
    ):
        self.policies = masked_pass.policies
        self.tau = masked_pass.tau
        self.detach_prefix = masked_pass.detach_prefix
        self.batch = batch
        self.prefix_len = prefix_len
        self.gates: dict[int, SlotGate] = {}
        self.scores: dict[int, Tensor] = {}
        self._seeds: dict[int, list[int]] = {start: [] for start in masked_pass.group_starts}
        for source in generators or ():
            shape = (len(masked_pass.group_starts),)
            # a seed per group: a layer that runs again draws the same mask
            seeds = torch.randint(2**62, shape, generator=source, device=source.device).tolist()
            for start, seed in zip(masked_pass.group_starts, seeds, strict=True):
                self._seeds[start].append(seed)

    def open_gate(self, start: int, hidden: Float[Tensor, "rows tokens hidden"]) -> None:
        """Make the gate of a group at its first layer, whose input is ``hidden``.

        An "attention" policy decides inside that layer. If the layer runs again, its gate stays.
        """
        policy = self.policies[str(start)]
        if policy.reads == "attention":
            if start not in self.gates:
                decide = functools.partial(self._decide, start)
                self.gates[start] = self._gate(None, decide)
            return
        masked_rows = hidden[self.batch :]
        prefix = hidden[:, : self.prefix_len]
        seen = masked_rows if self.prefix_len is None else prefix
        if self.detach_prefix:
            seen = seen.detach()
        scores = policy(seen, generators=self._generators(start))
        self.scores[start] = scores
        self.gates[start] = self._gate(gate(scores, self.tau))

    def open_all(self, hidden: Float[Tensor, "rows tokens hidden"]) -> SlotGate:
        """The gate of the layers before the first group, where the suffix sees the whole prefix."""
        return self._gate(hidden.new_ones(len(hidden), self.prefix_len))  # type: ignore[arg-type]

    def _gate(self, keep: Tensor | None, decide: Decision | None = None) -> SlotGate:
        return SlotGate(keep, self.prefix_len, self.detach_prefix, decide)

    def _decide(
        self,
        start: int,
        queries: Tensor,
        keys: Tensor,
        scale: float,
        window: int | None,
        sinks: Tensor | None,
    ) -> Float[Tensor, "batch slots"]:
        """The visible slots of an "attention" policy, from the dense rows."""
        policy = self.policies[str(start)]
        options = {} if sinks is None else {"sinks": sinks}
        if options and "sinks" not in inspect.signature(policy.forward).parameters:
            raise InputError(f"{type(policy).__name__} does not support attention sinks")
        scores = policy(
            queries[: self.batch, :, : self.prefix_len],
            keys[: self.batch, :, : self.prefix_len],
            scale=scale,
            window=window,
            generators=self._generators(start),
            **options,
        )
        self.scores[start] = scores
        return gate(scores, self.tau)

    def _generators(self, start: int) -> list[torch.Generator] | None:
        """The sources of a group's draws, one per sequence, newly seeded; None: there are none."""
        sources = [torch.Generator().manual_seed(seed) for seed in self._seeds[start]]
        return sources or None


class LayerHook:
    """Before a decoder layer, replaces the keyword ``kv_pass`` by ``kv_gate``, its group's gate,
    and ``kv_window``.

    Args:
        group_starts: first layers of the groups, ascending.
        window: sliding window of the layer in tokens; None: it sees all earlier tokens.
    """

    def __init__(self, layer: int, group_starts: list[int], window: int | None):
        starts_so_far = [start for start in group_starts if start <= layer]
        self.start = starts_so_far[-1] if starts_so_far else None
        self.is_first = layer == self.start
        self.window = window

    def __call__(self, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The arguments of the layer; None, which changes nothing, outside a masked pass."""
        if "kv_pass" not in kwargs:
            return None
        kwargs = dict(kwargs)
        kv_pass: KVPass = kwargs.pop("kv_pass")
        hidden = args[0] if args else kwargs["hidden_states"]
        if self.is_first and self.start is not None:
            kv_pass.open_gate(self.start, hidden)
        if self.start is not None:
            # by group, never in one place: some versions of transformers run hooks again when they
            # recompute activations, and a layer would find the gate of a later group
            kwargs["kv_gate"] = kv_pass.gates[self.start]
        elif kv_pass.prefix_len is not None:
            kwargs["kv_gate"] = kv_pass.open_all(hidden)
        if "kv_gate" in kwargs:
            kwargs["kv_window"] = self.window
        return args, kwargs


class MaskedPass(nn.Module):
    """The dense and the masked pass of a model as one batch.

    Rows [0, B) attend densely, rows [B, 2B) over the slots that their policies keep. Hooks on the
    decoder layers call a group's policy at its first layer and pass the gate to every layer of the
    group as a keyword. Layers before the first group stay dense. A "hidden" policy reads the masked
    rows, an "attention" policy the queries and keys of the dense rows. The state of a pass
    (``KVPass``) is one of its keyword arguments, so that interleaved passes and activation
    checkpointing find the right one. This module has the parameters of the policies, not of the
    model.

    With a ``prefix_len`` (not in the paper) only the tokens after it go through the masked pass.
    Each sequence is followed by its suffix again, at the same positions. The repeated suffix sees
    the kept slots of the prefix and all earlier slots of itself, as after a compact cache. The
    prefix is computed once for both passes.

    Args:
        model: a causal LM that passed ``self_test``; it is switched to kvcat's attention and gets
            hooks until ``close``.
        policies: by first layer of each group.
        tau: threshold on the scores, in (0, 1).
        detach_prefix: with a ``prefix_len``, neither the masked pass nor a policy passes a gradient
            to the prefix's states.

    Raises:
        InputError: groups at layers that do not exist, a value out of range, an unsupported model,
            a policy with parameters that reads attention.

    References: KV-CAT, section "Training for KV Cache Compressibility", appendix "Masked attention
        forward pass".
    """

    def __init__(
        self,
        model: PreTrainedModel,
        policies: dict[int, SparsificationPolicy],
        *,
        tau: float = 0.5,
        detach_prefix: bool = False,
    ):
        super().__init__()
        layers = decoder_layers(model)
        if recurrent_layers(model.config):
            raise InputError(
                f"{type(model).__name__}: a mask does not hide tokens from layers with a recurrent "
                "state: such models are compressed, not trained"
            )
        self.group_starts = check_group_starts(len(layers), sorted(policies))
        for policy in policies.values():
            if policy.reads == "attention" and next(policy.parameters(), None) is not None:
                raise InputError(
                    f"{type(policy).__name__} reads attention and has parameters, which no budget "
                    'loss would train: a policy with parameters reads "hidden"'
                )
        check_in("(0, 1)", tau=tau)
        enable(model)
        self.tau = tau
        self.detach_prefix = detach_prefix
        by_name = {str(start): policies[start] for start in self.group_starts}
        self.policies = nn.ModuleDict(by_name)
        # in a tuple, so that the model's parameters do not become this module's
        self._model = (model,)
        self._handles = []
        windows = layer_windows(model.config)
        for number, layer in enumerate(layers):
            hook = LayerHook(number, self.group_starts, windows[number])
            self._handles.append(layer.register_forward_pre_hook(hook, with_kwargs=True))

    def hidden(
        self,
        input_ids: Int[Tensor, "batch tokens"],
        generators: Sequence[torch.Generator] | None = None,
        *,
        prefix_len: int | None = None,
    ) -> HiddenOutput:
        """Both passes over the same tokens, up to the final norm.

        Args:
            input_ids: token ids without padding.
            generators: sources of random masks, one per sequence. One number per group is drawn
                from each.
            prefix_len: tokens before the part that the masked pass runs; None: it runs all.

        Raises:
            InputError: closed already, or a prefix_len that leaves no prefix or no suffix.
        """
        (model,) = self._model
        batch, num_tokens = input_ids.shape
        if not self._handles:
            raise InputError("this masked pass is closed")
        if prefix_len is not None:
            check_in(f"[1, {num_tokens - 1}]", prefix_len=whole("prefix_len", prefix_len))
        kv_pass = KVPass(self, batch, prefix_len, generators)
        # rows [0, batch) dense, rows [batch, 2 batch) masked
        inputs = {"input_ids": input_ids.repeat(2, 1)}
        if prefix_len is not None:
            inputs = _suffix_again(input_ids, prefix_len)
        hidden = hidden_states(model, **inputs, use_cache=False, kv_pass=kv_pass)
        # without an error such a model would train on two dense passes
        complaint = None
        if sorted(kv_pass.scores) != self.group_starts:
            complaint = "keyword arguments do not reach its layers"
        elif not all(gate.reached_attention for gate in kv_pass.gates.values()):  # StableLM
            complaint = "not all of its layers attend through transformers' attention interface"
        if complaint is not None:
            raise InputError(f"{type(model).__name__} is not supported: {complaint}")
        if prefix_len is None:
            dense, masked = hidden.split(batch)
        else:
            dense, masked = hidden.tensor_split([num_tokens], dim=1)
        keep: Any = {start: kv_pass.gates[start].keep for start in self.group_starts}
        scores = {start: kv_pass.scores[start] for start in self.group_starts}
        return HiddenOutput(dense, masked, keep, scores)

    def close(self) -> None:
        """Remove the hooks from the model; a second call does nothing."""
        while self._handles:
            self._handles.pop().remove()

    def __enter__(self) -> "MaskedPass":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _suffix_again(tokens: Int[Tensor, "batch tokens"], prefix_len: int) -> dict[str, Tensor]:
    """Inputs that run every sequence and then its suffix again, at the suffix's positions.

    The one-element mask keeps transformers from making a real one. kvcat's attention needs none.
    """
    positions = torch.arange(tokens.shape[1], device=tokens.device)
    return {
        "input_ids": torch.cat([tokens, tokens[:, prefix_len:]], dim=1),
        "position_ids": torch.cat([positions, positions[prefix_len:]])[None],
        "attention_mask": torch.ones(1, 1, 1, 1, dtype=torch.bool, device=tokens.device),
    }
