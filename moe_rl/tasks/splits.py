"""Which split a problem belongs to: decided by its prompt alone."""

from hashlib import blake2b

TEST_FRACTION = 0.25
"""Share of all possible prompts that generators hold out."""


def is_held_out(prompt: str, test_fraction: float) -> bool:
    """True where a hash of the prompt puts it in the test split.

    The same prompt always lands in the same split, however often and from wherever it is drawn, so train and
    test cannot share one. `test_fraction` is the expected share of distinct prompts held out.
    """
    digest = blake2b(prompt.encode("utf-8"), digest_size=8).digest()
    return int.from_bytes(digest, "big") < test_fraction * 2**64
