"""Statistics of records: metrics, intervals, tests of differences, tables; without torch."""
# isort: skip_file

# fmt: off
from kvcat.stats.intervals import ClusterBootstrap as ClusterBootstrap, Estimate as Estimate
from kvcat.stats.metrics import (
    METRICS as METRICS, Metric as Metric, share_of_examples as share_of_examples,
)
from kvcat.stats.records import Record as Record
from kvcat.stats.shares import share as share, share_difference as share_difference
from kvcat.stats.significance import (
    holm as holm, sign_flip_p_value as sign_flip_p_value, swap_p_value as swap_p_value,
)
from kvcat.stats.summary import (
    compare_models as compare_models, comparison_pairs as comparison_pairs, summarise as summarise,
)
# fmt: on
