"""vLLM answers from compact documents next to its pages, with an unmodified checkpoint.

Only this package knows vLLM's names. ``plugin`` is loaded in every process of vLLM. ``connector``
runs in the scheduler, where it decides which documents are in memory, and in the workers, where it
loads them. ``cpu`` and ``cuda`` are the attention backends. ``requests`` is the middleware of the
API server, which makes a request of the field ``kvcat``. ``worker`` is what connector and attention
share in one process.
"""

CONNECTOR = "kvcat"
"""The connector's name in vLLM's options."""
