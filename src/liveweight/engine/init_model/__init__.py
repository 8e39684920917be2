"""Checkpoint directories with random weights and a working tokenizer, for where no real ones are at hand. `checkpoint` writes one."""
