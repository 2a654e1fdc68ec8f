"""FSDP on the CPU under `accelerate launch`, which shards on accelerators alone and says nothing.

With an FSDP config and `use_cpu` accelerate 1.15.0 trains copies of the whole model instead (DDP). Two gloo
processes on one machine are how the sharded path is tested where there is no GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def fsdp_on_cpu() -> Iterator[None]:
    """Inside, an `Accelerator` with an FSDP plugin and several CPU processes shards as the plugin says.

    Make the trainer and train in it. Changes nothing for one process, or on a GPU.
    """
    from accelerate.state import AcceleratorState, PartialState
    from accelerate.utils import DistributedType

    plain = AcceleratorState.__init__

    def initialise(self: Any, *arguments: Any, fsdp_plugin: Any = None, **options: Any) -> None:
        plain(self, *arguments, fsdp_plugin=fsdp_plugin, **options)
        if fsdp_plugin is not None and self.distributed_type == DistributedType.MULTI_CPU:
            # what AcceleratorState does itself for every other kind of device
            self.distributed_type, self.fsdp_plugin = DistributedType.FSDP, fsdp_plugin
            PartialState._shared_state["distributed_type"] = DistributedType.FSDP
            if self._mixed_precision != "no":
                fsdp_plugin.set_mixed_precision(self._mixed_precision)

    AcceleratorState.__init__ = initialise
    try:
        yield
    finally:
        AcceleratorState.__init__ = plain
