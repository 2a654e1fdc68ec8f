import pytest
from tokenizers import processors

from moe_rl.tasks import Problem, answer_ids, char_tokenizer, pad_id, prompt_ids, response_text

PROBLEM = Problem("31=", "13")
PAD, EOS = 0, 1  # then "0" is 2, "1" is 3, "3" is 5, "=" is 12


@pytest.fixture
def tokenizer():
    return char_tokenizer("0123456789=")


def test_plain_prompt_and_answer(tokenizer):
    assert prompt_ids(tokenizer, PROBLEM) == [5, 3, 12]
    assert answer_ids(tokenizer, PROBLEM) == [3, 5, EOS]


def test_chat_template_is_applied_with_a_generation_prompt():
    tokenizer = char_tokenizer("0123456789=ua:|")  # u: is the user's turn, a: the assistant's
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.role[0] }}:{{ m.content }}|{% endfor %}"
        "{% if add_generation_prompt %}a:{% endif %}"
    )
    assert tokenizer.decode(prompt_ids(tokenizer, PROBLEM)) == "u:31=|a:"
    assert answer_ids(tokenizer, PROBLEM) == [3, 5, EOS]


def test_a_tokenizer_that_closes_every_text_leaves_the_prompt_open(tokenizer):
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="$A <eos>", special_tokens=[("<eos>", EOS)]
    )
    assert tokenizer("31=")["input_ids"] == [5, 3, 12, EOS]
    assert prompt_ids(tokenizer, PROBLEM) == [5, 3, 12]
    assert answer_ids(tokenizer, PROBLEM) == [3, 5, EOS]


def test_bos_of_the_tokenizer_opens_the_prompt_but_not_the_answer(tokenizer):
    tokenizer.add_special_tokens({"bos_token": "<bos>"})
    bos = tokenizer.bos_token_id
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", bos)]
    )
    assert prompt_ids(tokenizer, PROBLEM) == [bos, 5, 3, 12]
    assert answer_ids(tokenizer, PROBLEM) == [3, 5, EOS]


@pytest.mark.parametrize(
    ("ids", "text"),
    [
        ([3, 5, EOS, PAD, PAD], "13"),
        ([3, 5, EOS, 2, 2], "13"),
        ([3, 5], "13"),  # cut by the length limit
        ([EOS], ""),
        ([], ""),
        ([3, PAD, 5, EOS], "1"),  # a pad sampled inside an answer ends it, so it cannot score
    ],
)
def test_response_text_stops_at_the_first_end(tokenizer, ids, text):
    assert response_text(tokenizer, ids) == text


def test_response_text_skips_other_special_tokens(tokenizer):
    tokenizer.add_special_tokens({"additional_special_tokens": ["<think>"]})
    think = tokenizer.convert_tokens_to_ids("<think>")
    assert response_text(tokenizer, [think, 3, 5, EOS]) == "13"


def test_pad_falls_back_to_eos(tokenizer):
    assert pad_id(tokenizer) == PAD
    tokenizer.pad_token = None
    assert pad_id(tokenizer) == EOS
    assert response_text(tokenizer, [3, EOS, EOS]) == "1"


def test_no_eos_is_an_error_that_says_what_to_do(tokenizer):
    tokenizer.eos_token = None
    with pytest.raises(
        ValueError, match=r"no end-of-sequence token.*set one first, e\.g\. tokenizer\.eos_token"
    ):
        answer_ids(tokenizer, PROBLEM)
    with pytest.raises(ValueError, match="no end-of-sequence token"):
        response_text(tokenizer, [3])
