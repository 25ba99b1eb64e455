"""Continued pretraining with and without KV-CAT.

The package itself imports only the configuration, which needs no torch. ``kvcat.train`` is
``training.loop.train``.
"""

from kvcat.training.config import TrainConfig as TrainConfig
