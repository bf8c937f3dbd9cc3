"""A real tokenizer of 64 tokens with a chat template, built in code, and a tiny target that uses it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

PAD, START, END, MASK = "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|mask|>"  # ids 0, 1, 2, 3
CHARACTERS = "\n abcdefghijklmnopqrstuvwxyz0123456789.,?!:'-+=()"
MERGES = ["th", "in", "an", "er", "re", "on", "at", " a"]

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
GENERATION_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}"
    "{% else %}{{ message['content'] + '<|im_end|>' }}{% endif %}{{ '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
THINKING_TEMPLATE = (  # as Qwen3: history loses the empty reasoning block, `enable_thinking` opens the prompt with one
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['role'] == 'assistant' and loop.last %}{{ '(think)\n\n' }}{% endif %}"
    "{{ message['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
    "{% if enable_thinking is defined and enable_thinking is false %}{{ '(think)\n\n' }}{% endif %}{% endif %}"
)


def tiny_tokenizer(chat_template: str | None = CHAT_TEMPLATE) -> Any:
    """Returns a lower-casing byte-pair tokenizer of exactly 64 tokens; padding 0, start 1, end 2, mask 3."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers
    from transformers import PreTrainedTokenizerFast

    specials = [PAD, START, END, MASK]
    vocabulary = {token: i for i, token in enumerate([*specials, *CHARACTERS, *MERGES])}
    vocabulary |= {f"<unused{i}>": i for i in range(len(vocabulary), 64)}
    assert len(vocabulary) == 64
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[(m[0], m[1]) for m in MERGES], unk_token=PAD))
    backend.normalizer = normalizers.Lowercase()
    backend.decoder = decoders.Fuse()
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in specials])
    tokenizer_class: Any = PreTrainedTokenizerFast
    tokenizer = tokenizer_class(
        tokenizer_object=backend,
        pad_token=PAD,
        unk_token=PAD,
        bos_token=START,
        eos_token=END,
        additional_special_tokens=[MASK],
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = chat_template
    return tokenizer


def save_tiny_target(
    directory: str | Path, chat_template: str | None = CHAT_TEMPLATE, seed: int = 0, **config: Any
) -> str:
    """Saves a random target of 2 layers with its tokenizer and returns the folder's name."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes: dict[str, Any] = {
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 512,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
        "initializer_range": 0.2,  # larger than usual, so that random logits are not nearly flat
    } | config
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = LlamaForCausalLM(LlamaConfig(**sizes))
    model.save_pretrained(directory)
    tiny_tokenizer(chat_template).save_pretrained(directory)
    return str(directory)
