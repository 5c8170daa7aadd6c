"""Small Hugging Face models from configurations, with random weights, and batches to train them on."""

from typing import Any

import torch
import transformers
from torch import nn

VOCABULARY, LENGTH = 97, 12


def make(name: str) -> nn.Module:
    """Build a model, unmodified, with weights from torch's current seed."""
    if name == "gpt2":
        return transformers.GPT2LMHeadModel(
            transformers.GPT2Config(
                vocab_size=VOCABULARY,
                n_embd=32,
                n_layer=3,
                n_head=4,
                n_positions=32,
                resid_pdrop=0.0,
                embd_pdrop=0.0,
                attn_pdrop=0.0,
            )
        )
    if name == "llama":
        return transformers.LlamaForCausalLM(
            transformers.LlamaConfig(
                vocab_size=VOCABULARY,
                hidden_size=32,
                num_hidden_layers=3,
                num_attention_heads=4,
                num_key_value_heads=2,
                intermediate_size=48,
            )
        )
    if name == "qwen3":
        return transformers.Qwen3ForCausalLM(
            transformers.Qwen3Config(
                vocab_size=VOCABULARY,
                hidden_size=32,
                num_hidden_layers=3,
                num_attention_heads=4,
                num_key_value_heads=2,
                head_dim=8,
                intermediate_size=48,
                tie_word_embeddings=True,
            )
        )
    if name == "gpt_neox":
        return transformers.GPTNeoXForCausalLM(
            transformers.GPTNeoXConfig(
                vocab_size=VOCABULARY,
                hidden_size=32,
                num_hidden_layers=3,
                num_attention_heads=4,
                intermediate_size=48,
                hidden_dropout=0.0,
                attention_dropout=0.0,
            )
        )
    if name == "mixtral":
        return transformers.MixtralForCausalLM(
            transformers.MixtralConfig(
                vocab_size=VOCABULARY,
                hidden_size=32,
                num_hidden_layers=2,
                num_attention_heads=4,
                num_key_value_heads=2,
                intermediate_size=24,
                num_local_experts=4,
            )
        )
    assert name == "vit"
    return transformers.ViTForImageClassification(
        transformers.ViTConfig(
            hidden_size=32,
            num_hidden_layers=3,
            num_attention_heads=4,
            intermediate_size=48,
            image_size=16,
            patch_size=8,
            num_labels=5,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
    )


NAMES = ("gpt2", "llama", "vit")


def batches(name: str, steps: int, size: int) -> list[dict[str, Any]]:
    """Draw global batches, the same wherever they are drawn."""
    generator = torch.Generator().manual_seed(5)
    made: list[dict[str, Any]] = []
    for _ in range(steps):
        if name == "vit":
            images = torch.randn(size, 3, 16, 16, generator=generator)
            made.append({"pixel_values": images, "labels": torch.randint(5, (size,), generator=generator)})
        else:
            tokens = torch.randint(VOCABULARY, (size, LENGTH), generator=generator)
            made.append({"input_ids": tokens, "labels": tokens})
    return made
