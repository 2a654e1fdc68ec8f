import pytest
from transformers import AutoTokenizer

from moe_rl.tasks import bpe_tokenizer, char_tokenizer, get_task

TEXTS = ["There are 12 apples and 345 pears. How many?", "Answer: 357", "the apples the pears"]
# Accents, other scripts' digits, an emoji, runs of blanks, blanks before punctuation.
HARD = "naïve ١٢٣ 一二 🙂 x's  12 , 3 .\n\n\tend "


def test_char_ids_are_specials_then_the_alphabet():
    tokenizer = char_tokenizer("ab=")
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id, len(tokenizer)) == (0, 1, 5)
    assert tokenizer("ba=")["input_ids"] == [3, 2, 4]
    assert tokenizer.decode([3, 2, 4]) == "ba="


def test_char_refuses_what_it_cannot_encode():
    with pytest.raises(Exception, match="Missing \\[UNK\\]"):
        char_tokenizer("ab")("abc")
    with pytest.raises(ValueError, match="distinct characters"):
        char_tokenizer("aba")


def test_task_tokenizer_covers_the_task():
    task = get_task("running_sum")
    tokenizer = task.default_tokenizer()
    for index in range(50):
        problem = task.test(index)
        text = problem.prompt + problem.answer
        ids = tokenizer(text)["input_ids"]
        assert len(ids) == len(text) == 41
        assert tokenizer.decode(ids) == text


def test_bpe_gives_every_digit_its_own_token_and_learns_words():
    tokenizer = bpe_tokenizer(TEXTS, vocab_size=300)
    assert tokenizer.convert_ids_to_tokens(tokenizer("12345")["input_ids"]) == list("12345")
    assert len(tokenizer("Answer: 357" * 3)["input_ids"]) < 3 * len("Answer: 357")
    assert len(tokenizer) <= 300


@pytest.mark.parametrize("text", [*TEXTS, HARD, "", " ", "<pa", "A . B"])
def test_bpe_is_lossless(text):
    tokenizer = bpe_tokenizer(TEXTS, vocab_size=300)
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_bpe_needs_room_for_the_bytes():
    with pytest.raises(ValueError, match="at least 258"):
        bpe_tokenizer(TEXTS, vocab_size=200)


@pytest.mark.parametrize(
    ("tokenizer", "text"),
    [(char_tokenizer("0123456789="), "3917=1379"), (bpe_tokenizer(TEXTS, 300), HARD)],
    ids=["char", "bpe"],
)
def test_saves_and_reloads_through_auto_tokenizer(tokenizer, text, tmp_path):
    tokenizer.save_pretrained(tmp_path)
    reloaded = AutoTokenizer.from_pretrained(tmp_path)
    ids = tokenizer(text)["input_ids"]
    assert reloaded(text)["input_ids"] == ids
    assert reloaded.decode(ids) == text
    assert len(reloaded) == len(tokenizer)
    assert (reloaded.pad_token_id, reloaded.eos_token_id) == (0, 1)
    assert reloaded.padding_side == "left"
