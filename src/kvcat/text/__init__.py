"""Texts and token ids: the encoder, the chat template, and the turns of a conversation."""
