"""Conversations on a bounded number of KV slots, compressed again and again."""

from kvcat.compress.sessions.session import Session

__all__ = ["Session"]
