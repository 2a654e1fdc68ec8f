"""Bytes and text of the wire formats to integer arrays. Nothing here unpickles."""

from __future__ import annotations

import base64
import binascii
import io
import math
from collections.abc import Mapping
from typing import Any, Literal

import numpy as np
import torch

from moe_rl.routing.trace import RoutingError

_DTYPES = {
    name: np.dtype(name).newbyteorder("<") for name in ("uint8", "int8", "uint16", "int16", "int32", "int64")
}


def integers(value: Any, source: str) -> np.ndarray:
    """An integer array of an ndarray, a tensor or nested lists. Raises RoutingError for anything else."""
    if isinstance(value, torch.Tensor):
        if (
            value.is_floating_point()
            or value.is_complex()
            or value.is_nested
            or value.is_quantized
            or value.is_meta
            or value.layout != torch.strided
        ):
            raise RoutingError(
                f"{source}: expert ids must be a dense integer tensor, got {value.dtype} on {value.device}"
            )
        array = value.detach().cpu().numpy()
    elif isinstance(value, np.ndarray):
        array = value
    elif isinstance(value, list | tuple):
        array = _nested_integers(value, source)
    else:
        raise RoutingError(f"{source}: expected an array of expert ids, got {type(value).__name__}")
    if array.dtype.kind not in "iu":
        raise RoutingError(f"{source}: expert ids must be integers, got {array.dtype}")
    return array.astype(array.dtype.newbyteorder("="), copy=False)


def _nested_integers(value: list[Any] | tuple[Any, ...], source: str) -> np.ndarray:
    try:
        array = np.array(value, dtype=object)
        # True would pass for 1, and a ragged list for an array of lists.
        if any(type(number) is not int for number in array.flat):
            raise RoutingError(f"{source}: nested lists must be rectangular and hold integers only")
        return array.astype(np.int64)
    except (ValueError, OverflowError, TypeError, RuntimeError) as error:  # the last two of tensors in it
        if isinstance(error, RoutingError):
            raise
        raise RoutingError(f"{source}: the nested lists are no array of ids: {error}") from error


def base64_bytes(text: Any, source: str) -> bytes:
    """Strictly decoded base64. Raises RoutingError for any character outside its alphabet."""
    if not isinstance(text, str | bytes):
        raise RoutingError(f"{source}: expected base64 text, got {type(text).__name__}")
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise RoutingError(f"{source}: not base64: {error}") from error


def npy_array(data: bytes, source: str) -> np.ndarray:
    """An integer array from the bytes of one `.npy` file.

    The header is read and checked before anything is allocated: an object array (a pickle) and a shape that
    does not fill the file exactly are refused.
    """
    stream = io.BytesIO(data)
    try:
        version = np.lib.format.read_magic(stream)
        read = (
            np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        )
        shape, fortran_order, dtype = read(stream)
    except Exception as error:  # NumPy evaluates the header as Python text, which fails in many ways
        raise RoutingError(f"{source}: no readable .npy header: {error}") from error
    if dtype.kind not in "iu":
        raise RoutingError(f"{source}: expert ids must be integers, the .npy file holds {dtype}")
    return _array(data[stream.tell() :], shape, dtype, source, order="F" if fortran_order else "C")


def raw_array(data: bytes, shape: Any, dtype_name: Any, source: str) -> np.ndarray:
    """Little-endian integers of a named dtype; `shape` None leaves them flat."""
    dtype = _DTYPES.get(dtype_name) if isinstance(dtype_name, str) else None
    if dtype is None:
        raise RoutingError(f"{source}: the dtype must be one of {', '.join(_DTYPES)}, got {dtype_name!r}")
    if shape is None:
        if len(data) % dtype.itemsize:
            raise RoutingError(f"{source}: {len(data)} bytes are not a whole number of {dtype_name} ids")
        shape = (len(data) // dtype.itemsize,)
    return _array(data, shape, dtype, source)


def _array(
    data: bytes, shape: Any, dtype: np.dtype, source: str, order: Literal["C", "F"] = "C"
) -> np.ndarray:
    if not isinstance(shape, list | tuple) or any(type(size) is not int or size < 0 for size in shape):
        raise RoutingError(f"{source}: a shape is a list of sizes, got {shape!r}")
    if math.prod(shape) * dtype.itemsize != len(data):
        raise RoutingError(
            f"{source}: {list(shape)} {dtype.name} needs {math.prod(shape) * dtype.itemsize} bytes, got "
            f"{len(data)}"
        )
    try:
        array = np.frombuffer(data, dtype=dtype).reshape(shape, order=order)
    except ValueError as error:  # more dimensions than NumPy has, or sizes that overflow around a zero
        raise RoutingError(f"{source}: no array has the shape {list(shape)}: {error}") from error
    return array.astype(dtype.newbyteorder("="))


def packed(payload: Any, source: str, default_dtype: str | None = None) -> np.ndarray:
    """A {data, shape, dtype} record; `data` is base64 text or raw bytes."""
    if not isinstance(payload, Mapping):
        raise RoutingError(
            f"{source}: expected an object with data, shape and dtype, got {type(payload).__name__}"
        )
    data = payload.get("data")
    raw = data if isinstance(data, bytes) else base64_bytes(data, source)
    shape = payload.get("shape")
    if shape is None:
        raise RoutingError(f"{source}: the payload has no shape")
    return raw_array(raw, shape, payload.get("dtype", default_dtype), source)
