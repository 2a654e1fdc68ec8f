"""Prompts and verifiable rewards."""

from moe_rl.tasks.base import Problem, Task
from moe_rl.tasks.encode import answer_ids, eos_id, pad_id, prompt_ids, response_text
from moe_rl.tasks.registry import TASKS, get_task
from moe_rl.tasks.tokenizers import bpe_tokenizer, char_tokenizer

__all__ = [
    "TASKS",
    "Problem",
    "Task",
    "answer_ids",
    "bpe_tokenizer",
    "char_tokenizer",
    "eos_id",
    "get_task",
    "pad_id",
    "prompt_ids",
    "response_text",
]
