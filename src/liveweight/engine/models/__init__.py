"""The models that the engine serves: Qwen3 dense and MoE decoders, with an MTP draft layer. `spec` needs no torch, `model` builds."""
