"""Between a problem's texts and token ids, for any tokenizer."""

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from moe_rl.tasks.base import Problem


def eos_id(tokenizer: PreTrainedTokenizerBase) -> int:
    """The id that ends a response. Raises ValueError where the tokenizer has none."""
    if tokenizer.eos_token_id is None:
        raise ValueError(
            "this tokenizer has no end-of-sequence token, so responses could not end: "
            "set one first, e.g. tokenizer.eos_token = '<|endoftext|>'"
        )
    return int(tokenizer.eos_token_id)


def pad_id(tokenizer: PreTrainedTokenizerBase) -> int:
    """The id that fills a batch: the tokenizer's pad token, or its end-of-sequence token without one."""
    return eos_id(tokenizer) if tokenizer.pad_token_id is None else int(tokenizer.pad_token_id)


def prompt_ids(tokenizer: PreTrainedTokenizerBase, problem: Problem) -> list[int]:
    """Ids [T] of the prompt, ready for generation; not padded.

    With a chat template the prompt is one user turn followed by the opening of the assistant's; without, it
    is the plain text with whatever the tokenizer puts in front of it (BOS).
    """
    if tokenizer.chat_template:
        turn = [{"role": "user", "content": problem.prompt}]
        return list(tokenizer.apply_chat_template(turn, add_generation_prompt=True, return_dict=False))
    ids = list(tokenizer(problem.prompt)["input_ids"])
    # Some tokenizers close every text; a closed prompt leaves the model nothing to say.
    return ids[:-1] if ids and ids[-1] == tokenizer.eos_token_id else ids


def answer_ids(tokenizer: PreTrainedTokenizerBase, problem: Problem) -> list[int]:
    """Ids [T] of the right response, ending in end-of-sequence: what a cold start trains on."""
    return [*tokenizer(problem.answer, add_special_tokens=False)["input_ids"], eos_id(tokenizer)]


def said_ids(tokenizer: PreTrainedTokenizerBase, problem: Problem) -> list[int]:
    """Ids [T] of what the environment says when it poses a later turn.

    Raises ValueError for a tokenizer with a chat template, whose turns cannot be encoded one by one.
    """
    if tokenizer.chat_template:
        raise ValueError(
            "tasks of several turns need a tokenizer without a chat template, as models built from a config "
            "have: a template writes a turn in the light of the ones before it"
        )
    return list(tokenizer(problem.prompt, add_special_tokens=False)["input_ids"])


def worked_examples(
    tokenizer: PreTrainedTokenizerBase, problem: Problem
) -> list[tuple[list[int], list[int]]]:
    """What a cold start trains on: for every turn all ids before the answer, and those of the answer."""
    before = prompt_ids(tokenizer, problem)
    examples: list[tuple[list[int], list[int]]] = []
    for turn in problem.turns:
        if examples:
            before = [*before, *said_ids(tokenizer, turn)]
        examples.append((before, answer_ids(tokenizer, turn)))
        before = [*before, *examples[-1][1]]
    return examples


def response_text(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> str:
    """Text of sampled ids [T] up to the first end-of-sequence or pad, other special tokens skipped.

    A pad ends the text like end-of-sequence does: the filler after a response says nothing, and a policy that
    samples pads inside an answer must not be graded as if it had not.
    """
    ends = {eos_id(tokenizer), pad_id(tokenizer)}
    length = next((t for t, token in enumerate(ids) if int(token) in ends), len(ids))
    return str(tokenizer.decode([int(token) for token in ids[:length]], skip_special_tokens=True))
