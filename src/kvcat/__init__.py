"""Transformers with compressible KV caches: training (KV-CAT), compression, measurement of both.

Names are imported on first use, so that ``import kvcat`` and ``kvcat --help`` stay fast.
"""
# isort: skip_file

from typing import TYPE_CHECKING

from kvcat.extras import on_first_use

__version__ = "0.1.0"

if TYPE_CHECKING:
    # fmt: off
    from kvcat import (
        attention as attention, cache as cache, compress as compress, corpus as corpus,
        data as data, evals as evals, losses as losses, models as models, policies as policies,
        recipes as recipes, report as report, serving as serving, theory as theory,
        training as training,
    )
    from kvcat.cache import CompactCache as CompactCache
    from kvcat.compress import (
        AttentionMatching as AttentionMatching, Eviction as Eviction,
        GradientCompression as GradientCompression, Session as Session, Trace as Trace,
        append as append, compare as compare, compose as compose,
        compress_document as compress_document, document_trace as document_trace,
        question_ids as question_ids, reconstruction as reconstruction, replay as replay,
        trace as trace,
    )
    from kvcat.corpus import Store as Store
    from kvcat.errors import InputError as InputError
    from kvcat.models import load as load
    from kvcat.settings import DocumentSettings as DocumentSettings
    from kvcat.training import TrainConfig as TrainConfig
    from kvcat.training.loop import train as train
    # fmt: on

__getattr__, __dir__, __all__ = on_first_use(__name__, __file__)  # pyright: ignore
