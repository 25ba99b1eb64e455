"""Answers that depend on a model's weights and end-of-text tokens, not on its other settings."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from transformers import GenerationConfig, PreTrainedModel

# what a folder may set without changing which tokens come out: it is replaced, or describes tokens
# and outputs
_WITHOUT_EFFECT = {
    "assistant_early_exit", "bos_token_id", "cache_config", "cache_implementation",
    "compile_config", "continuous_batching_config", "decoder_start_token_id", "disable_compile",
    "eos_token_id", "is_assistant", "low_memory", "max_cache_len", "max_length", "max_new_tokens",
    "output_attentions", "output_hidden_states", "output_logits", "output_scores", "pad_token_id",
    "prefill_chunk_size", "renormalize_logits", "return_dict_in_generate", "transformers_version",
    "use_cache",
}  # fmt: skip
# which of them decoding without sampling does not use
_SAMPLING = {
    "do_sample", "temperature", "top_k", "top_p", "min_p", "top_h", "typical_p", "epsilon_cutoff",
    "eta_cutoff",
}  # fmt: skip


def end_tokens(model: PreTrainedModel) -> list[int]:
    """The ids of the model's end-of-text tokens, any of which ends an answer."""
    config: Any = model.generation_config
    ends = config.eos_token_id
    if ends is None:
        return []
    return [ends] if isinstance(ends, int) else list(ends)


@contextmanager
def plain_generation(model: PreTrainedModel, **settings: Any) -> Iterator[GenerationConfig]:
    """Generation settings for a block, of the model's own only the end-of-text tokens; decoding is
    greedy.

    The model has these settings in the block, since ``generate`` completes what it is given by the
    model's own. Give them to ``generate`` as well.

    Args:
        model: a causal LM.
        settings: of ``GenerationConfig``, such as ``max_new_tokens``.
    """
    ends = end_tokens(model)
    chosen = GenerationConfig(
        eos_token_id=ends or None,
        pad_token_id=ends[0] if ends else 0,
        use_cache=True,
        do_sample=False,
    )
    chosen.update(**settings)
    before = model.generation_config
    try:
        model.generation_config = chosen
        yield chosen
    finally:
        model.generation_config = before


def left_out(model: PreTrainedModel, *, sampling: bool) -> list[str]:
    """The model's own generation settings that ``plain_generation`` leaves out, each with its
    value.

    Those that could change an answer; of the settings for sampling, only with ``sampling``.
    """
    config: Any = model.generation_config
    defaults = GenerationConfig._get_default_generation_params()
    settings = []
    for name, value in sorted(config.to_diff_dict().items()):
        if name.startswith("_") or name in _WITHOUT_EFFECT or (name in _SAMPLING and not sampling):
            continue
        if name == "do_sample" or value is None or value == defaults.get(name):
            continue
        settings.append(f"{name} {value}")
    return settings
