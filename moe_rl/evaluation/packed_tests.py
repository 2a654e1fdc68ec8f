"""LiveCodeBench's packed tests: base64 of zlib of a pickled string of JSON, read without unpickling."""

from __future__ import annotations

import base64
import pickletools
import zlib

LARGEST = 1 << 30  # bytes of one problem's tests; more is no test set but a bomb
STRINGS = ("SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8")
HARMLESS = ("PROTO", "FRAME", "MEMOIZE", "BINPUT", "LONG_BINPUT", "STOP")


def unpack(text: str) -> str:
    """The JSON text of packed tests. Its opcodes are read, never executed.

    Raises ValueError for anything but the pickle of a single string, and for more than `LARGEST` bytes.
    """
    try:
        inflater = zlib.decompressobj()
        pickled = inflater.decompress(base64.b64decode(text, validate=True), LARGEST)
    except (ValueError, zlib.error) as error:
        raise ValueError(f"expected JSON, or base64 of zlib of a pickled string ({error})") from error
    if not inflater.eof:
        raise ValueError(f"expected at most {LARGEST} bytes of tests, and their end")
    found: list[str] = []
    for opcode, argument, _ in pickletools.genops(pickled):
        if opcode.name in STRINGS:
            found.append(str(argument))
        elif opcode.name not in HARMLESS:
            raise ValueError(f"expected a pickled string, got the opcode {opcode.name}: it is not executed")
    if len(found) != 1:
        raise ValueError(f"expected one pickled string, got {len(found)}")
    return found[0]
