"""Small Llamas with random weights and a word tokenizer: real models, with nothing to download."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path

_SPECIAL = ("<s>", "</s>", "<unk>")


@dataclass(frozen=True)
class Shape:
    """A Llama's sizes; the vocabulary is always 2,048 words."""

    layers: int = 2
    hidden: int = 128
    mlp: int = 256
    heads: int = 2
    kv_heads: int = 2
    head_dim: int = 64


#: About 3 MB in fp32.
TINY = Shape()
#: Decode attention dominates its steps, as it does on a GPU with long prompts: nearly no weights, and 2 KB of fp32 KV a
#: token and layer; see docs/locality.md.
ATTENTION = Shape(layers=2, hidden=128, mlp=128, heads=2, kv_heads=2, head_dim=128)


def make_tiny_model(folder: Path, seed: int = 0, shape: Shape = TINY) -> Path:
    """Write model and tokenizer into ``folder``, unless they are there already; returns it.

    fp32. One word is one token, so that a benchmark's prompt has exactly the length it asked for. Needs torch,
    transformers and tokenizers, which come with sglang.
    """
    if (folder / "model.safetensors").exists() and (folder / "tokenizer.json").exists():
        return folder
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    folder.mkdir(parents=True, exist_ok=True)
    vocabulary = {word: index for index, word in enumerate([*_SPECIAL, *_words(2048 - len(_SPECIAL), seed)])}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words, bos_token="<s>", eos_token="</s>", unk_token="<unk>", clean_up_tokenization_spaces=False
    )
    tokenizer.save_pretrained(folder)
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(vocabulary),
        hidden_size=shape.hidden,
        intermediate_size=shape.mlp,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=32768,
        bos_token_id=0,
        eos_token_id=1,
        dtype="float32",
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def model_in(folder: Path, shape: Shape) -> Path:
    """``TINY`` or ``ATTENTION`` at its place in the working folder of the benchmarks."""
    return make_tiny_model(folder / ("attention-model" if shape == ATTENTION else "model"), shape=shape)


def _words(count: int, seed: int) -> list[str]:
    rng = random.Random(seed)
    syllables = [consonant + vowel for consonant in "bdfgklmnprstvz" for vowel in "aeiou"]
    found: dict[str, None] = {}
    while len(found) < count:
        found["".join(rng.choices(syllables, k=rng.randint(2, 4)))] = None
    return list(found)
