"""Attention over visible slots: the naive reference, the fast path, and transformers models."""
# isort: skip_file

# fmt: off
from kvcat.attention.carried import Carried as Carried, attach as attach
from kvcat.attention.exclusive import exclusive as exclusive
from kvcat.attention.fast import (
    attend as attend, attend_ragged as attend_ragged, attend_twice as attend_twice,
)
from kvcat.attention.interface import (
    NAME as NAME, SlotGate as SlotGate, check_not_wrapped as check_not_wrapped, enable as enable,
    kvcat_attention as kvcat_attention,
)
from kvcat.attention.kernels import attend_biased as attend_biased, extend_keys as extend_keys
from kvcat.attention.mass import attention_mass as attention_mass, log_mass as log_mass
from kvcat.attention.reference import attend_reference as attend_reference, reachable as reachable
# fmt: on
