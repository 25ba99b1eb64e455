"""Compact caches in engines: vLLM (``kvcat.serving.vllm``), llama.cpp, plain transformers."""

from kvcat.serving.documents import Document, open_documents
from kvcat.serving.fingerprints import CheckpointFingerprints
from kvcat.serving.llama_cpp import LlamaCpp
from kvcat.serving.prefix import Prefix, export_prefix, plain_prefix, read_prefix
from kvcat.serving.requests import chat_ids, prompt_ids, request_fields
from kvcat.serving.widen import widen, write_gguf

__all__ = [
    "CheckpointFingerprints",
    "Document",
    "LlamaCpp",
    "Prefix",
    "chat_ids",
    "export_prefix",
    "open_documents",
    "plain_prefix",
    "prompt_ids",
    "read_prefix",
    "request_fields",
    "widen",
    "write_gguf",
]
