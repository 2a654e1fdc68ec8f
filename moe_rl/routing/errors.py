"""The one exception of `moe_rl.routing`."""


class RoutingError(ValueError):
    """A trace, a model or a forward pass that cannot be recorded or replayed; the text says what to do."""
