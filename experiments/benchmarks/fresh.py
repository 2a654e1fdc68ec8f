"""One call in a new interpreter, whose memory nothing before it has touched."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

CALL = "import json, sys; from {module} import {name}; print(json.dumps({name}(*json.loads(sys.argv[1]))))"


def in_fresh_process(function: str, *arguments: Any) -> Any:
    """The result of `module:name` on `arguments`, all of them JSON; from a worker of a sweep too, where
    multiprocessing starts nothing. Raises RuntimeError with what a call that failed said."""
    module, name = function.split(":")
    code = CALL.format(module=module, name=name)
    done = subprocess.run([sys.executable, "-c", code, json.dumps(arguments)], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{function} failed: {done.stderr.strip()}")
    return json.loads(done.stdout.splitlines()[-1])
