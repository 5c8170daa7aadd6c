"""Models of the transformers library, built without values, get those of a plain build."""

from __future__ import annotations

import pytest
import torch
import transformers

SIZES = {"vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 24}
TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
PICTURES = {"image_size": 16, "patch_size": 8}

MODELS = {
    "gpt2": lambda: transformers.GPT2LMHeadModel(
        transformers.GPT2Config(vocab_size=64, n_positions=32, n_embd=16, n_layer=2, n_head=2, **TOKENS)
    ),
    "llama": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, num_key_value_heads=2, **TOKENS)),
    "llama in bfloat16": lambda: transformers.AutoModelForCausalLM.from_config(
        transformers.LlamaConfig(**SIZES, **TOKENS), dtype=torch.bfloat16
    ),
    "mixtral": lambda: transformers.MixtralForCausalLM(
        transformers.MixtralConfig(**SIZES, num_key_value_heads=2, num_local_experts=3, **TOKENS)
    ),
    "bert": lambda: transformers.BertForMaskedLM(
        transformers.BertConfig(**SIZES, max_position_embeddings=32, **TOKENS)
    ),
    "t5": lambda: transformers.T5ForConditionalGeneration(
        transformers.T5Config(
            vocab_size=64, d_model=16, d_kv=4, d_ff=24, num_layers=2, num_heads=4, decoder_start_token_id=0, **TOKENS
        )
    ),
    "vit": lambda: transformers.ViTModel(
        transformers.ViTConfig(
            hidden_size=16, num_hidden_layers=2, num_attention_heads=4, intermediate_size=24, **PICTURES
        )
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_values_are_those_of_a_plain_build(built, name):
    builds = built(MODELS[name])
    builds.check()
    module = MODELS[name]()
    persistent = set(module.state_dict())
    assert set(builds.plain) >= {n for n, _ in module.named_buffers()}
    if name.startswith("llama"):
        assert any("rotary" in n for n in set(builds.plain) - persistent)


def test_tied_embeddings_are_one_tensor_and_delivered_under_both_names(built):
    builds = built(MODELS["gpt2"])
    assert {"transformer.wte.weight", "lm_head.weight"} <= set(builds.deliveries)
    assert torch.equal(builds.delivered["transformer.wte.weight"], builds.delivered["lm_head.weight"])
