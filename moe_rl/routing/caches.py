"""Caches whose rows a recording follows: for as long as it does, their rows keep their order.

Beam search, and contrastive search, permute the rows of a cache between steps. What was recorded for a row
would then belong to another sequence, and nothing in the next forward would tell.
"""

from __future__ import annotations

import functools
from typing import Any, NoReturn

from moe_rl.routing.attach import reduced_to
from moe_rl.routing.errors import RoutingError

_FOLLOWERS = "_routing_followers"


class _Followed:
    """Mixin over a cache's class that refuses to move rows; a copy of the cache gets the plain class."""

    def _refuse(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise RoutingError(
            "the rows of a cache were reordered inside record_routing, as beam search does (num_beams > 1): "
            "its rows could no longer be told apart. Decode without the recorder, and record one forward on "
            "the sequences that came out."
        )

    reorder_cache = batch_select_indices = batch_repeat_interleave = _refuse

    def __reduce_ex__(self, protocol: Any) -> Any:
        return reduced_to(type(self).__mro__[2], super().__reduce_ex__(protocol), _FOLLOWERS)


@functools.cache
def _followed(cls: Any) -> type:
    return type(f"Followed{cls.__name__}", (_Followed, cls), {"__module__": cls.__module__})


def follow(cache: Any) -> None:
    """Refuse to reorder the rows of `cache` from now on."""
    followers = cache.__dict__.setdefault(_FOLLOWERS, 0)
    if not followers:
        cache.__class__ = _followed(type(cache))  # type: ignore[arg-type]
    cache.__dict__[_FOLLOWERS] = followers + 1


def release(cache: Any) -> None:
    """Undo `follow`; the last follower to leave restores the class of the cache."""
    cache.__dict__[_FOLLOWERS] -= 1
    if not cache.__dict__[_FOLLOWERS]:
        del cache.__dict__[_FOLLOWERS]
        cache.__class__ = type(cache).__mro__[2]
