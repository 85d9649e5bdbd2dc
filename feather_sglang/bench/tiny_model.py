"""A small Llama with random weights and a word tokenizer: a real model, with nothing to download."""

from __future__ import annotations

import random
from pathlib import Path

_SPECIAL = ("<s>", "</s>", "<unk>")


def make_tiny_model(folder: Path, seed: int = 0) -> Path:
    """Write model and tokenizer into ``folder``, unless they are there already; returns it.

    Two layers, hidden size 128, two heads of 64, a vocabulary of 2,048 words, fp32; about 3 MB. One word is one token,
    so that a benchmark's prompt has exactly the length it asked for. Needs torch, transformers and tokenizers, which
    come with sglang.
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
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=32768,
        bos_token_id=0,
        eos_token_id=1,
        dtype="float32",
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def _words(count: int, seed: int) -> list[str]:
    rng = random.Random(seed)
    syllables = [consonant + vowel for consonant in "bdfgklmnprstvz" for vowel in "aeiou"]
    found: dict[str, None] = {}
    while len(found) < count:
        found["".join(rng.choices(syllables, k=rng.randint(2, 4)))] = None
    return list(found)
