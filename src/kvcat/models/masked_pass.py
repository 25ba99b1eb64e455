"""The dense and the masked pass of the same weights, as one batch of the unmodified model."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from kvcat.attention import SlotGate, enable
from kvcat.errors import InputError
from kvcat.models.structure import decoder_layers, hidden_states
from kvcat.policies import Randomness, SparsificationPolicy, check_group_starts, gate
from kvcat.types import Float, Int, Tensor


@dataclass(frozen=True, eq=False)
class HiddenOutput:
    """What both passes give before the output head; the masked one of the sequences or of their suffixes.

    By first layer of each group, ``keep`` are the visible slots of the sequences or prefixes, 1 or 0, position 0 always
    1, with gradient; ``scores`` are the policy's own output in [0, 1], also for position 0.
    """

    dense_hidden: Float[Tensor, "batch tokens hidden"]
    masked_hidden: Float[Tensor, "batch masked_tokens hidden"]
    keep: dict[int, Float[Tensor, "batch slots"]]
    scores: dict[int, Float[Tensor, "batch slots"]]


class _Pass:
    """State of one forward, carried by the model's own keyword arguments to the hooks of its layers.

    A plain class, so that FSDP2 hands on the object itself. ``seeds`` holds one seed per group and
    generator: a layer that runs again draws what it drew before.
    """

    def __init__(self, owner: "MaskedPass", batch: int, prefix_len: int | None, generator: Randomness | None):
        self.owner, self.batch, self.prefix_len = owner, batch, prefix_len
        self.per_sequence = isinstance(generator, Sequence)
        generators = generator if isinstance(generator, Sequence) else [generator] if generator is not None else []
        shape = (len(owner.group_starts),)
        drawn = [torch.randint(2**62, shape, generator=g, device=g.device).tolist() for g in generators]
        self.seeds = {start: [seeds[i] for seeds in drawn] for i, start in enumerate(owner.group_starts)}
        self.gates: dict[int, SlotGate] = {}
        self.scores: dict[int, Tensor] = {}

    def open_gate(self, start: int, hidden: Float[Tensor, "rows tokens hidden"]) -> SlotGate:
        """The gate of a group, from the input of its first layer; an "attention" policy decides in that layer."""
        policy, tau = self.owner.policies[str(start)], self.owner.tau
        options = self.prefix_len, self.owner.detach_prefix
        made = [torch.Generator().manual_seed(seed) for seed in self.seeds[start]]
        generator: Randomness | None = made if self.per_sequence else (made or [None])[0]
        if policy.reads == "attention":

            def decide(queries: Tensor, keys: Tensor, scale: float, window: int | None) -> Tensor:
                read = slice(0, self.batch), slice(None), slice(0, self.prefix_len)
                scores = policy(queries[read], keys[read], scale=scale, window=window, generator=generator)
                self.scores[start] = scores
                return gate(scores, tau)

            return self.gates.get(start) or SlotGate(None, *options, decide)
        seen = hidden[self.batch :] if self.prefix_len is None else hidden[:, : self.prefix_len]
        self.scores[start] = policy(seen.detach() if self.owner.detach_prefix else seen, generator=generator)
        return SlotGate(gate(self.scores[start], tau), *options)


class MaskedPass(nn.Module):
    """Rows [0, B) attend densely, rows [B, 2B) over the slots their policies keep; one batch, one model.

    Hooks on the decoder layers call a group's policy at its first layer and hand the gate to every layer of the group
    as a keyword; layers before the first group stay dense. A "hidden" policy reads the masked rows, an "attention"
    policy the dense rows' queries and keys. The state of a pass travels with its keyword arguments, so that interleaved
    passes and activation checkpointing find their own. The module's parameters are the policies', not the model's.

    With a ``prefix_len`` (ours, not the paper's) only the tokens behind it go through the masked pass: each sequence is
    followed by its suffix again, at the same positions, which sees the kept slots of the prefix and all of its own, as
    with a compact cache. The prefix is computed once for both passes.

    Args:
        model: a causal LM; it is switched to kvcat's attention and gets hooks until ``close``.
        policies: by first layer of each group.
        tau: threshold on the scores, in (0, 1).
        detach_prefix: with a ``prefix_len``, neither the masked pass nor a policy has a gradient to what the prefix
            computes.

    Raises:
        InputError: groups at layers that do not exist, a value out of range, an unsupported model.

    References: KV-CAT, section "Training for KV Cache Compressibility", appendix "Masked attention forward pass".
    """

    def __init__(
        self, model: PreTrainedModel, policies: dict[int, SparsificationPolicy], *, tau: float = 0.5,
        detach_prefix: bool = False,
    ):  # fmt: skip
        super().__init__()
        layers = decoder_layers(model)
        self.group_starts = check_group_starts(len(layers), sorted(policies))
        if not 0 < tau < 1:
            raise InputError(f"tau must lie in (0, 1), got {tau}")
        enable(model)
        self.tau, self.detach_prefix = tau, detach_prefix
        self.policies = nn.ModuleDict({str(start): policies[start] for start in self.group_starts})
        self._model = (model,)  # in a tuple, so that the model's parameters do not become this module's
        hooks = [_layer_hook(index, self.group_starts) for index in range(len(layers))]
        self._handles = [x.register_forward_pre_hook(h, with_kwargs=True) for x, h in zip(layers, hooks, strict=True)]

    def hidden(
        self, input_ids: Int[Tensor, "batch tokens"], generator: Randomness | None = None, *,
        prefix_len: int | None = None,
    ) -> HiddenOutput:  # fmt: skip
        """Both passes over the same tokens, up to the final norm.

        ``input_ids`` have no padding. ``generator`` is the source of random masks, one or one per sequence; one number
        per group is drawn from each.

        Raises:
            InputError: closed already, or a prefix_len that leaves no prefix or no suffix.
        """
        (model,) = self._model
        batch, num_tokens = input_ids.shape
        if not self._handles:
            raise InputError("this masked pass is closed")
        if prefix_len is not None and not 0 < prefix_len < num_tokens:
            raise InputError(f"prefix_len {prefix_len} must lie in 1..{num_tokens - 1}")
        state = _Pass(self, batch, prefix_len, generator)
        inputs = {"input_ids": input_ids.repeat(2, 1)} if prefix_len is None else _suffix_again(input_ids, prefix_len)
        hidden = hidden_states(model, **inputs, use_cache=False, kv_gate=state)
        if sorted(state.scores) != self.group_starts:
            raise InputError(f"{type(model).__name__} is not supported: keyword arguments do not reach its layers")
        dense, masked = hidden.split(batch) if prefix_len is None else hidden.tensor_split([num_tokens], dim=1)
        keep: Any = {start: state.gates[start].keep for start in self.group_starts}
        return HiddenOutput(dense, masked, keep, {start: state.scores[start] for start in self.group_starts})

    def close(self) -> None:
        """Remove the hooks from the model; a second call does nothing."""
        while self._handles:
            self._handles.pop().remove()

    def __enter__(self) -> "MaskedPass":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _layer_hook(index: int, group_starts: list[int]) -> Callable[..., Any]:
    """Replaces the pass in a layer's keywords by the gate of the layer's group."""
    start = max((s for s in group_starts if s <= index), default=None)

    def hook(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        state = kwargs.get("kv_gate")
        if not isinstance(state, _Pass):
            return None
        hidden = args[0] if args else kwargs["hidden_states"]
        if start is None and state.prefix_len is None:
            return args, {name: value for name, value in kwargs.items() if name != "kv_gate"}
        if start is None:
            every = hidden.new_ones(len(hidden), state.prefix_len)
            dense = SlotGate(every, prefix_len=state.prefix_len, detach_prefix=state.owner.detach_prefix)
            return args, {**kwargs, "kv_gate": dense}
        if index == start:
            state.gates[start] = state.open_gate(start, hidden)
        return args, {**kwargs, "kv_gate": state.gates[start]}

    return hook


def _suffix_again(tokens: Int[Tensor, "batch tokens"], prefix_len: int) -> dict[str, Tensor]:
    """Inputs of a model that runs every sequence and then its suffix again, at the suffix's positions.

    The one-element mask keeps transformers from making a real one, which kvcat's attention does not need.
    """
    positions = torch.arange(tokens.shape[1], device=tokens.device)
    return {
        "input_ids": torch.cat([tokens, tokens[:, prefix_len:]], dim=1),
        "position_ids": torch.cat([positions, positions[prefix_len:]])[None],
        "attention_mask": torch.ones(1, 1, 1, 1, dtype=torch.bool, device=tokens.device),
    }
