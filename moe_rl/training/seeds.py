"""Random streams named by what they are for, so that a resumed run draws what an uninterrupted one does."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

import torch


def derive_seed(*parts: object) -> int:
    """A 63-bit seed from the words that name a stream, e.g. `derive_seed(seed, "rollout", step)`."""
    digest = hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


@contextmanager
def random_stream(*parts: object) -> Iterator[None]:
    """Run torch's global generators from `derive_seed(*parts)`; the caller's state comes back afterwards."""
    devices = range(torch.cuda.device_count())
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(derive_seed(*parts))
        yield
