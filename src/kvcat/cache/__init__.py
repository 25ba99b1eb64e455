"""Compact caches: the prefix in few slots, on disk and in transformers."""
# isort: skip_file

# fmt: off
from kvcat.cache.adapters import check_no_adapters as check_no_adapters
from kvcat.cache.codes import (
    BITS as BITS, BeyondHalfError as BeyondHalfError, Grid as Grid, PackedHead as PackedHead,
    as_half as as_half, check_dims as check_dims,
    key_groups as key_groups, most_bytes_per_slot as most_bytes_per_slot, parse_bits as parse_bits,
    round_values as round_values,
)
from kvcat.cache.compact import CompactCache as CompactCache, read_cache as read_cache
from kvcat.cache.fingerprint import (
    check_same_model as check_same_model, fingerprint as fingerprint,
)
from kvcat.cache.first_tokens import (
    FirstSlots as FirstSlots, count_before as count_before, document_digests as document_digests,
    first_ids as first_ids, first_slots as first_slots,
)
from kvcat.cache.forward import (
    CACHE_NAME as CACHE_NAME, PrefixCache as PrefixCache, cache_argument as cache_argument,
)
from kvcat.cache.heads import HeadGrid as HeadGrid, HeadSlots as HeadSlots
from kvcat.cache.layers import (
    PrefixLayer as PrefixLayer, layer_windows as layer_windows,
    recurrent_layers as recurrent_layers, state_layers as state_layers,
)
from kvcat.cache.quantized import QuantizedLayer as QuantizedLayer
from kvcat.cache.record import CacheRecord as CacheRecord
from kvcat.cache.recurrence import continue_states as continue_states
from kvcat.cache.rope import (
    Factors as Factors, held_factors as held_factors, rope_border as rope_border,
    rope_factors as rope_factors,
)
from kvcat.cache.slots import (
    CompactLayer as CompactLayer, Layer as Layer, RaggedLayer as RaggedLayer,
)
from kvcat.cache.states import LayerState as LayerState
from kvcat.cache.token_ids import (
    check_batch_of_ids as check_batch_of_ids, check_token_ids as check_token_ids,
)
# fmt: on
