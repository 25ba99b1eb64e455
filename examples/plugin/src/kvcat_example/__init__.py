"""Additions to kvcat, one file each; pyproject.toml declares them."""
