"""Small transformers models as GGUF files (a helper of the tests)."""

import gguf


def write_gguf(
    model, path, words=(), *, settings=None, tensors=None, name=None, merges=("a b",), tokens=None
):
    """A Llama, Qwen2 or Qwen3 in float32, as llama.cpp's converter writes it; the last word ends
    texts.

    Args:
        settings: further metadata by key without the architecture's prefix; they replace those of
            the model.
        tensors: further tensors by name.
        name: of the model, in the metadata.
        merges: of the words.
        tokens: further metadata of the tokenizer by key; they replace those of the words.
    """
    config = model.config
    writer = gguf.GGUFWriter(path, config.model_type)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    for field, value in (
        ("context_length", config.max_position_embeddings),
        ("embedding_length", config.hidden_size),
        ("block_count", config.num_hidden_layers),
        ("feed_forward_length", config.intermediate_size),
        ("head_count", config.num_attention_heads),
        ("head_count_kv", config.num_key_value_heads),
        ("key_length", head_dim),
        ("value_length", head_dim),
        ("rope_dimension_count", head_dim),
        ("rope_freq_base", config.rope_parameters["rope_theta"]),
        ("layer_norm_rms_eps", config.rms_norm_eps),
        ("vocab_size", config.vocab_size),
    ):
        getattr(writer, f"add_{field}")(value)
    further = {f"{config.model_type}.{key}": value for key, value in (settings or {}).items()}
    of_tokens = {"model": "gpt2" if words else "no_vocab"} | (tokens or {})
    further |= {f"tokenizer.ggml.{key}": value for key, value in of_tokens.items()}
    for key, value in further.items():
        add = {
            str: writer.add_string,
            bool: writer.add_bool,
            int: writer.add_uint32,
            float: writer.add_float32,
            list: writer.add_array,
        }
        add[type(value)](key, value)
    if name:
        writer.add_name(name)
    for key, values in (tensors or {}).items():
        writer.add_tensor(key, values)
    if words:
        writer.add_token_list(words)
        writer.add_token_types([1] * len(words))
        writer.add_token_merges(list(merges))
        writer.add_eos_token_id(len(words) - 1)
    architecture = getattr(gguf.MODEL_ARCH, config.model_type.upper())
    names = gguf.get_tensor_name_map(architecture, config.num_hidden_layers)
    for name, tensor in model.state_dict().items():
        if config.model_type == "llama" and ("q_proj" in name or "k_proj" in name):
            # llama.cpp's rotation pairs neighbours, transformers' the halves of a head
            tensor = tensor.unflatten(0, (-1, 2, head_dim // 2)).transpose(1, 2).flatten(0, 2)
        stem, _, kind = name.rpartition(".")
        writer.add_tensor(f"{names.get_name(stem)}.{kind}", tensor.float().contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
