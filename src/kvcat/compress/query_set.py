"""The queries of one source, to which compact slots are fitted."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from kvcat.attention.mass import log_mass
from kvcat.cache import CompactCache
from kvcat.models.rotation import KeyRotation
from kvcat.models.rounded import Rounded
from kvcat.types import Float, Int, Tensor, at_least_float32


@dataclass(frozen=True)
class QuerySet:
    """The queries of one source, with the weight of each query's error.

    Sources are the text after the prefix, a part of the prefix that is repeated after it, the
    prefix's own queries, moved after it, and queries that were kept of tokens which a compact cache
    represents.

    A query's error is weighted by w m / (m + e), where w is its weight, m its attention mass on the
    slots that are fitted, and e that elsewhere, so that the quotient is the share of its attention
    that goes to these slots.

    Args:
        states: per layer, after rotation at the positions of their tokens.
        positions: of their tokens.
        weights: w of each query.
        log_elsewhere: per layer, for each query, the log of its attention mass on keys that are not
            fitted: those of its own text that it sees, sinks and protected slots; -inf if all
            queries count equally.
        counts_all: ``log_elsewhere`` is the whole mass of each query, that on the slots which are
            fitted included.
        rows: index of each query in ``states``; None: all in their order.
        starts: position at which the part of each query begins; None: queries are not moved.
        place: position to which the beginning of each part is moved.
        rotation: of the model, for queries that are moved.
        is_causal: the queries are at the positions of their tokens, in the prefix, and do not see
            later slots.
        log_mass: per layer, the log of each query's attention mass on tokens that a compact cache
            represents, as it was when each of these tokens was exact. Protected tokens are not part
            of it. (): the queries attend to the slots.
        outputs: per layer, each query's attention over these tokens.
        repeated: token of the prefix that each query's token repeats; None: it repeats none, or the
            query is the prefix's own.
    """

    states: Sequence[Float[Tensor, "batch heads held _"] | Rounded]  # layers differ in channels
    positions: Int[Tensor, " queries"]
    weights: Float[Tensor, " queries"]
    log_elsewhere: Sequence[Float[Tensor, "batch heads queries"]]
    counts_all: bool = False
    rows: Int[Tensor, " queries"] | None = None
    starts: Int[Tensor, " queries"] | None = None
    place: int = 0
    rotation: KeyRotation | None = None
    is_causal: bool = False
    log_mass: Sequence[Float[Tensor, "batch heads queries"]] = ()
    outputs: Sequence[Rounded] = ()
    repeated: Int[Tensor, " queries"] | None = None

    def __len__(self) -> int:
        """The number of queries of each query head."""
        return len(self.positions)

    @property
    def is_own(self) -> bool:
        """Whether the queries are those of the prefix, moved after it."""
        return self.rotation is not None

    @property
    def is_rounded(self) -> bool:
        """Whether the queries are in 8 bits."""
        return any(isinstance(states, Rounded) for states in self.states)

    @property
    def nbytes(self) -> int:
        """Bytes of the queries, their masses and their outputs."""
        each = [*self.states, *self.log_elsewhere, *self.log_mass, *self.outputs]
        return sum(tensor.nbytes for tensor in each)

    def of_heads(
        self, layer: int, number: int, example: int, heads: list[int]
    ) -> Float[Tensor, "heads queries head_dim"]:
        """The queries of some query heads, where the fit has them.

        They are rotated at every call, instead of being kept in memory twice.

        Args:
            layer: index among those of the set.
            number: of this layer in the model.
            example: row of the batch.
            heads: query heads.
        """
        states = self.states[layer][example]
        head_rows = torch.tensor(heads, device=states.device)
        if isinstance(states, Rounded):
            rounded = states.selected(0, head_rows)
            in_place = (rounded if self.rows is None else rounded.selected(1, self.rows)).numbers()
        elif self.rows is None:
            in_place = states.index_select(0, head_rows)
        else:
            held_rows = self.rows.to(states.device)
            flat_rows = head_rows.unsqueeze(1) * states.shape[1] + held_rows  # (heads, queries)
            in_place = states.flatten(0, 1).index_select(0, flat_rows.flatten())
            in_place = in_place.unflatten(0, flat_rows.shape)
        if self.rotation is None or self.starts is None:
            return in_place
        shifts = self.place - self.starts
        return self.rotation(in_place.unsqueeze(0), number, shifts).squeeze(0)

    def of_layer(self, layer: int, number: int) -> Float[Tensor, "batch heads queries head_dim"]:
        """All queries of a layer, where the fit has them; arguments as in ``of_heads``."""
        num_examples, num_heads = self.states[layer].shape[:2]
        every_head = list(range(num_heads))
        return torch.stack(
            [self.of_heads(layer, number, row, every_head) for row in range(num_examples)]
        )

    def log_masses(
        self,
        numbers: Sequence[int],
        scales: Sequence[float],
        keys: Sequence[Float[Tensor, "batch _ keys _"]],
        last_seen: Int[Tensor, " queries"],
    ) -> list[Float[Tensor, "batch _ queries"]]:
        """Per layer, the log of each query's attention mass on some keys (``log_mass``).

        Args:
            numbers: of the layers in the model.
            scales: per layer, the factor on q.k.
            keys: per layer.
            last_seen: index of the last key that each query sees; -1: it sees none.
        """
        masses = []
        of_layers = zip(numbers, scales, keys, strict=True)
        for layer, (number, scale, layer_keys) in enumerate(of_layers):
            states = self.of_layer(layer, number)
            mass = log_mass(states, layer_keys, scale, last_seen.clamp_min(0))
            mass[..., last_seen < 0] = -torch.inf
            masses.append(mass)
        return masses

    def with_elsewhere(
        self, log_masses: Sequence[Float[Tensor, "batch heads queries"]]
    ) -> "QuerySet":
        """The queries with further attention mass elsewhere, of each query, per layer."""
        pairs = zip(self.log_elsewhere, log_masses, strict=True)
        return replace(self, log_elsewhere=[torch.logaddexp(*both) for both in pairs])

    def with_document(
        self, document: CompactCache, numbers: Sequence[int], scales: Sequence[float]
    ) -> "QuerySet":
        """The queries with further attention mass elsewhere: that on all slots of a document.

        Args:
            document: whose slots every query sees.
            numbers, scales: as in ``log_masses``.
        """
        masses = []
        of_layers = zip(numbers, scales, document.layers, strict=True)
        for layer, (number, scale, slots) in enumerate(of_layers):
            padded = slots.padded()
            states = at_least_float32(self.of_layer(layer, number))
            keys = at_least_float32(padded.keys)
            if padded.log_bias is not None:  # as one more channel of the keys: scale q.k + log-bias
                bias = padded.log_bias.to(keys) / scale
                keys = torch.cat([keys, bias.unsqueeze(-1)], dim=-1)
                states = nn.functional.pad(states, (0, 1), value=1.0)
            last_seen = torch.full([len(self)], keys.shape[2] - 1)
            masses.append(log_mass(states, keys, scale, last_seen))
        return self.with_elsewhere(masses)

    def selected(self, rows: Int[Tensor, " rows"]) -> "QuerySet":
        """Some of the queries, in the order of the rows."""
        held = rows if self.rows is None else self.rows[rows]
        return replace(
            self,
            states=[_selected(states, held) for states in self.states],
            positions=self.positions[rows],
            weights=self.weights[rows],
            log_elsewhere=[_selected(mass, rows) for mass in self.log_elsewhere],
            rows=None,
            starts=None if self.starts is None else self.starts[rows],
            repeated=None if self.repeated is None else self.repeated[rows],
            log_mass=[_selected(mass, rows) for mass in self.log_mass],
            outputs=[_selected(outputs, rows) for outputs in self.outputs],
        )


def _selected(states: Any, rows: Int[Tensor, " rows"]) -> Any:
    """Some queries of a layer, a tensor or ``Rounded``; queries are the third dimension."""
    if isinstance(states, Rounded):
        return states.selected(2, rows)
    return states.index_select(2, rows.to(states.device))
