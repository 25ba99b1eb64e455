"""Generation that depends on a model's weights and end-of-text tokens alone.

The model's other generation settings, such as a repetition penalty, have no effect.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from transformers import GenerationConfig, PreTrainedModel

from kvcat.attention import exclusive

# settings of a model's folder that do not change which tokens come out, because plain_generation
# sets them itself, or because they only describe tokens and outputs
_WITHOUT_EFFECT = {
    "assistant_early_exit", "bos_token_id", "cache_config", "cache_implementation",
    "compile_config", "continuous_batching_config", "decoder_start_token_id", "disable_compile",
    "eos_token_id", "is_assistant", "low_memory", "max_cache_len", "max_length", "max_new_tokens",
    "output_attentions", "output_hidden_states", "output_logits", "output_scores", "pad_token_id",
    "prefill_chunk_size", "renormalize_logits", "return_dict_in_generate", "transformers_version",
    "use_cache",
}  # fmt: skip
SAMPLING = {
    "do_sample", "temperature", "top_k", "top_p", "min_p", "top_h", "typical_p", "epsilon_cutoff",
    "eta_cutoff",
}  # fmt: skip
"""Generation settings that have an effect only where tokens are sampled."""


def end_tokens(model: PreTrainedModel) -> list[int]:
    """The ids of the model's end-of-text tokens, any of which ends an answer."""
    config: Any = model.generation_config
    ends = config.eos_token_id
    if ends is None:
        return []
    return [ends] if isinstance(ends, int) else list(ends)


@contextmanager
def plain_generation(model: PreTrainedModel, **settings: Any) -> Iterator[GenerationConfig]:
    """A block in which the model has the settings for greedy generation, which it yields.

    Only the end-of-text tokens come from the model's settings. Pass the settings to ``generate`` as
    well. The model must have them too, because ``generate`` fills in what a call leaves out from
    the model's settings.

    Args:
        settings: fields of ``GenerationConfig``, such as ``max_new_tokens``.
    """
    ends = end_tokens(model)
    plain = GenerationConfig(
        eos_token_id=ends or None,
        pad_token_id=ends[0] if ends else 0,
        use_cache=True,
        do_sample=False,
    )
    plain.update(**settings)
    with exclusive(model):
        before = model.generation_config
        try:
            model.generation_config = plain
            yield plain
        finally:
            model.generation_config = before


def left_out(model: PreTrainedModel, *, sampling: bool) -> list[str]:
    """The model's generation settings that ``plain_generation`` ignores, each with its value.

    Only settings that could change an answer are listed; those for sampling only with ``sampling``.
    """
    config: Any = model.generation_config
    defaults = GenerationConfig._get_default_generation_params()
    ignored = []
    for name, value in sorted(config.to_diff_dict().items()):
        if name.startswith("_") or name in _WITHOUT_EFFECT or name == "do_sample":
            continue
        if name in SAMPLING and not sampling:
            continue
        if value is None or value == defaults.get(name):
            continue
        ignored.append(f"{name} {value}")
    return ignored
