"""Compact caches in engines that know no kvcat: plain transformers, llama.cpp."""

from kvcat.serving.llama_cpp import load_llama_cpp, write_llama_cpp
from kvcat.serving.transformers import check_plain, export_prefix, next_position, plain_prefix

__all__ = ["check_plain", "export_prefix", "load_llama_cpp", "next_position", "plain_prefix", "write_llama_cpp"]
