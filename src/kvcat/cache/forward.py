"""A model's forward after a compact cache: the cache's argument, and checks before a forward."""

import inspect
import threading
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary, finalize, ref

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle
from transformers import Cache, GenerationMixin, PreTrainedModel

from kvcat.attention import NAME, exclusive
from kvcat.cache.layers import PrefixLayer
from kvcat.cache.rope import Factors, check_length, held_factors
from kvcat.cache.states import RecurrentState, WindowState
from kvcat.errors import InputError
from kvcat.types import Int, Tensor

_PREPARE: Any = vars(GenerationMixin)["prepare_inputs_for_generation"]
CACHE_NAME = "cache" if "cache" in inspect.signature(_PREPARE).parameters else "past_key_values"
"""The installed transformers' name for the argument and the output that hold a cache."""


def cache_argument(past: Cache | None) -> dict[str, Any]:
    """The keyword argument that passes a cache to a model of the installed transformers."""
    return {CACHE_NAME: past}


class PrefixCache(Cache):
    """A transformers cache whose layers begin with a compact prefix.

    Args:
        layers: one for each layer of the model: ``PrefixLayer``, ``WindowState``,
            ``RecurrentState``.
        num_tokens: prefix length.
        factors: the rotary factors of the keys, if these depend on the length of the text
            (``rope``).
        any_length: use these factors beyond the border as well.
    """

    def __init__(
        self,
        layers: Sequence[Any],
        num_tokens: int,
        factors: Factors | None = None,
        *,
        any_length: bool = False,
    ):
        super().__init__(layers=list(layers))
        self.num_tokens = num_tokens
        self.factors: Factors | None = factors
        self.any_length = any_length
        # token ids after the prefix; None where a forward was given embeddings instead
        self.tokens: Tensor | None = None
        # positions that left padding fills in a static cache
        self.padding: int | None = None
        # the blocks that a running forward is in: exclusive, held_factors
        self.held: ExitStack | None = None
        # keeps the model's hooks (guard); copies of the cache have the same object
        self.use: _Use | None = None

    def __bool__(self) -> bool:
        """Returns False, because Phi-3's ``generate`` drops a cache that is true once a question is
        longer than the border of the rotary factors.
        """
        return False

    def reorder_cache(self, beam_idx: Any) -> None:
        """Put the rows in the order of the surviving beams."""
        super().reorder_cache(beam_idx)
        self._select_tokens(beam_idx)

    def batch_select_indices(self, indices: Int[Tensor, " rows"]) -> None:
        """Keep the given rows."""
        super().batch_select_indices(indices)
        self._select_tokens(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row."""
        super().batch_repeat_interleave(repeats)
        if self.tokens is not None:
            self.tokens = self.tokens.repeat_interleave(repeats, dim=0)

    def _select_tokens(self, rows: Int[Tensor, " rows"]) -> None:
        if self.tokens is not None:
            self.tokens = self.tokens[rows.to(self.tokens.device)]

    def reset(self) -> None:
        """Drop the tokens after the prefix."""
        super().reset()
        self.tokens = None
        self.padding = None


def guard(model: PreTrainedModel, past: PrefixCache) -> None:
    """Hook every forward of the model with a ``PrefixCache``.

    The hooks check the forward before it runs, make it use the cache's rotary factors, and keep
    other threads from changing the model until it ends. They are on the model's ``base_model`` as
    long as one of its caches, or a copy of one, is in use. Forwards with other caches or without a
    cache do not change.
    """
    module = model.base_model
    with _GUARDING:
        if _before not in module._forward_pre_hooks.values():
            before = module.register_forward_pre_hook(_before, with_kwargs=True)
            after = module.register_forward_hook(_after, with_kwargs=True, always_call=True)
            _GUARDED[module] = _Guarded([before, after])
        if module in _GUARDED:
            _GUARDED[module].num_caches += 1
            past.use = _Use()
            # weak references: neither the cache nor the model lives longer because of its hooks
            finalize(past.use, _release, ref(module))


class _Use:
    """The use of a module's hooks by a cache and by its copies, until the last of them is gone."""

    def __deepcopy__(self, memo: dict[int, Any]) -> "_Use":
        """The object itself."""
        return self

    def __reduce__(self) -> str:
        """Rejects pickling: in another process the model would have no hooks.

        Raises:
            InputError: always.
        """
        raise InputError(
            "a cache of transformers with a compact prefix cannot be pickled: save the compact "
            "cache, and take its inputs where it is loaded"
        )


@dataclass
class _Guarded:
    """The hooks of a module, and the number of caches that need them."""

    handles: list[RemovableHandle]
    num_caches: int = 0


_GUARDED: WeakKeyDictionary[nn.Module, _Guarded] = WeakKeyDictionary()
# between threads that make and drop caches; reentrant, because a cache can be dropped at any time
_GUARDING = threading.RLock()


def _release(module: "ref[nn.Module]") -> None:
    """Count one cache less, and remove the hooks with the last one."""
    guarded_module = module()
    if guarded_module is None:
        return
    with _GUARDING:
        guarded = _GUARDED[guarded_module]
        guarded.num_caches -= 1
        if guarded.num_caches == 0:
            for handle in guarded.handles:
                handle.remove()
            del _GUARDED[guarded_module]


def _before(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    past = kwargs.get(CACHE_NAME)
    if not isinstance(past, PrefixCache):
        return None
    if torch.compiler.is_compiling():
        if past.factors is not None:
            raise InputError(
                "rotary factors that depend on the length cannot be held in a compiled model"
            )
        return None
    # left in _after, which also runs if the forward fails (always_call)
    with ExitStack() as stack:
        stack.enter_context(exclusive(module))
        arguments = _prepare(module, past, args, kwargs, stack)
        past.held = stack.pop_all()
    return arguments


def _prepare(
    module: nn.Module,
    past: PrefixCache,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    stack: ExitStack,
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """The arguments of a checked forward; None: they do not change.

    The blocks that the forward runs in are entered on the stack.
    """
    ids = args[0] if args else kwargs.get("input_ids")
    new_inputs = ids if ids is not None else kwargs["inputs_embeds"]
    num_new = new_inputs.shape[1]
    # each of these four would give wrong logits without an error: a dropped cache, slots without
    # their log-bias, tokens at wrong positions, tokens read twice
    _check_checkpointing(module)
    _check_attention(module, past)
    for layer in past.layers:
        if isinstance(layer, RecurrentState):
            layer.fit_batch(len(new_inputs))
    length = int(past.get_seq_length())
    _check_forward(past, length, num_new, kwargs)
    if ids is not None:
        _check_new(past, ids)
    if past.factors is not None:
        if not past.any_length:
            check_length(module.config, past.factors, length + num_new)  # type: ignore[arg-type]
        stack.enter_context(held_factors(module, past.factors))
    positions = _positions_behind_padding(module, num_new, kwargs)
    return None if positions is None else (args, {**kwargs, "position_ids": positions})


def _positions_behind_padding(
    module: nn.Module, num_new: int, kwargs: dict[str, Any]
) -> Int[Tensor, "batch new"] | None:
    """The positions of the new tokens without the padding before them, as ``generate`` counts them.

    A forward alone would count padding, which moves a padded question away from the prefix. None if
    there is no padding, or if the caller gives the positions.
    """
    mask = kwargs.get("attention_mask")
    if kwargs.get("position_ids") is not None or not isinstance(mask, Tensor) or mask.dim() != 2:
        return None
    if bool(mask.all()) or "position_ids" not in inspect.signature(module.forward).parameters:
        return None
    # the position of a token is the number of tokens before it; padding has any position
    return (mask.long().cumsum(-1) - 1).clamp(min=0)[:, -num_new:]


def _after(_module: nn.Module, _args: Any, kwargs: dict[str, Any], _output: Any) -> None:
    past = kwargs.get(CACHE_NAME)
    if isinstance(past, PrefixCache) and past.held is not None:
        held = past.held
        past.held = None
        held.close()


def _check_checkpointing(module: nn.Module) -> None:
    """Raise ``InputError`` for activation checkpointing, under which transformers' layers drop the
    cache.
    """
    for submodule in module.modules():
        if submodule.training and getattr(submodule, "gradient_checkpointing", False):
            raise InputError(
                "activation checkpointing of a model in training mode would drop the compact "
                "cache: call model.eval()"
            )


def _check_attention(module: Any, past: PrefixCache) -> None:
    """Raise ``InputError`` if the model's attention was changed and does not read the slots."""
    name = module.config.get_text_config(decoder=True)._attn_implementation
    if name == NAME:
        return
    for layer in past.layers:
        if isinstance(layer, PrefixLayer) and layer.needs_attention:
            raise InputError(
                f"the model's attention is {name!r} now, which does not read the log-bias and the "
                "unequal heads of a compact cache: call cache.inputs after every change of it"
            )


def _check_forward(past: PrefixCache, length: int, num_new: int, kwargs: dict[str, Any]) -> None:
    """Raise ``InputError`` for tokens that do not follow those that the cache holds.

    The length of the mask shows it, or else the positions.
    """
    mask = kwargs.get("attention_mask")
    positions = kwargs.get("position_ids")
    if isinstance(mask, Tensor) and mask.dim() == 2:
        if mask.shape[1] != length + num_new:
            raise _misfit(length, f"an attention_mask of {mask.shape[1]}", num_new)
        if any(isinstance(layer, RecurrentState | WindowState) for layer in past.layers):
            check_no_padding(mask)
    elif isinstance(positions, Tensor) and positions.dim() == 2:
        next_position = int(positions.max()) + 1
        num_padding = length + num_new - next_position
        # the mask for a static cache has another form, which does not show the left padding
        if mask is not None and past.padding is None and 0 <= num_padding < num_new:
            past.padding = num_padding
        if num_padding != (past.padding or 0):
            raise _misfit(length, f"positions up to {next_position}", num_new)


def check_no_padding(mask: Tensor) -> None:
    """Raise ``InputError`` if a mask has padding, which would change the states of layers."""
    if not bool(mask.all()):
        raise InputError(
            "layers with a sliding window or a recurrent state do not skip padding after a compact "
            "cache: give rows of equal length, without padding"
        )


def _misfit(length: int, what: str, num_new: int) -> InputError:
    return InputError(
        f"the cache holds {length} tokens, and {num_new} more do not fit {what}: to a cache that "
        "has answered already, pass the new tokens alone, with a mask for all; or start again with "
        "a fresh cache.inputs(model, input_ids)"
    )


def _check_new(past: PrefixCache, ids: Int[Tensor, "batch new"]) -> None:
    """Raise ``InputError`` for tokens that begin with all those after the cache's prefix.

    Such tokens are the whole conversation, of which the cache needs only the end. A single token
    may repeat. New tokens are added to ``past.tokens``.
    """
    known = int(past.get_seq_length()) - past.num_tokens
    if known == 0:
        past.tokens = ids
        return
    if past.tokens is None or len(past.tokens) != len(ids):
        past.tokens = None
        return
    # assisted generation drops wrong guesses from the cache: they do not count
    old = past.tokens[:, :known]
    if known > 1 and ids.shape[1] > known and torch.equal(ids[:, :known], old):
        raise InputError(
            f"the {ids.shape[1]} new tokens begin with the {known} that the cache holds after its "
            "document: give it the new tokens alone, or start again with a fresh "
            "cache.inputs(model, input_ids)"
        )
    past.tokens = torch.cat([old, ids], dim=1)
