"""Tokenizers made on the spot: one token per character, or byte-level BPE with single digits."""

from collections.abc import Iterable

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

PAD, EOS = "<pad>", "<eos>"


def char_tokenizer(alphabet: str) -> PreTrainedTokenizerFast:
    """One token per character of `alphabet`, after <pad> (id 0) and <eos> (id 1).

    There is no unknown token: text outside the alphabet raises on encoding, where an unknown token would
    train on, and be rewarded as, something else than the text. Saves and reloads through AutoTokenizer.
    """
    if len(set(alphabet)) != len(alphabet) or not alphabet:
        raise ValueError(f"the alphabet must be distinct characters, at least one, got {alphabet!r}")
    vocabulary = {token: index for index, token in enumerate([PAD, EOS, *alphabet])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    return _wrap(tokenizer)


def bpe_tokenizer(texts: Iterable[str], vocab_size: int = 512) -> PreTrainedTokenizerFast:
    """Byte-level BPE trained on `texts`, every digit a token of its own; any text round-trips exactly.

    `vocab_size` includes <pad> (id 0), <eos> (id 1) and the 256 bytes; a small corpus may fill less of it.
    Raises ValueError below 258.
    """
    if vocab_size < 258:
        raise ValueError(
            f"vocab_size must hold 256 bytes and 2 special tokens, so at least 258, got {vocab_size}"
        )
    tokenizer = Tokenizer(models.BPE())
    digits = pre_tokenizers.Digits(individual_digits=True)
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[PAD, EOS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return _wrap(tokenizer)


def _wrap(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=EOS,
        padding_side="left",  # prompts end where generation starts
        clean_up_tokenization_spaces=False,  # would rewrite " ." as "." and lose the text
    )
