import base64
import io

import numpy as np
import pytest

from moe_rl.routing import RoutingError
from moe_rl.routing.formats.decode import base64_bytes, integers, npy_array, raw_array


def saved(array, **options):
    buffer = io.BytesIO()
    np.save(buffer, array, **options)
    return buffer.getvalue()


@pytest.mark.parametrize("dtype", ["u1", "<i2", ">i2", "<u2", "<i4", "<i8"])
@pytest.mark.parametrize("order", ["C", "F"])
def test_npy_files_read_as_numpy_reads_them(dtype, order):
    array = np.asarray(np.arange(24).reshape(4, 3, 2), dtype=dtype, order=order)
    data = saved(array)
    assert np.array_equal(npy_array(data, "test"), np.load(io.BytesIO(data), allow_pickle=False))


class Code:
    executed = False

    def __reduce__(self):
        return setattr, (Code, "executed", True)


def test_a_pickled_object_array_is_refused_and_not_run():
    with pytest.raises(RoutingError, match="holds object"):
        npy_array(saved(np.array([Code()], dtype=object), allow_pickle=True), "test")
    assert not Code.executed


def test_a_header_that_asks_for_terabytes_allocates_nothing():
    data = saved(np.zeros((4, 3, 2), dtype=np.uint8)).replace(b"(4, 3, 2)", b"(9**9, 3)")
    with pytest.raises(RoutingError):
        npy_array(data, "test")
    data = saved(np.zeros((4, 3, 2), dtype=np.int64)).replace(b"(4, 3, 2), }   ", b"(4000000000, 3)}")
    with pytest.raises(RoutingError):
        npy_array(data, "test")


def test_a_truncated_file_is_refused():
    with pytest.raises(RoutingError, match="needs 24 bytes, got 23"):
        npy_array(saved(np.zeros((4, 3, 2), dtype=np.uint8))[:-1], "test")


def test_base64_is_strict():
    text = base64.b64encode(b"routing").decode()
    assert base64_bytes(text, "test") == b"routing"
    for damaged in (text[:-1], text[:3] + "\n" + text[3:], text[:3] + "-" + text[4:], "é", 7):
        with pytest.raises(RoutingError):
            base64_bytes(damaged, "test")


@pytest.mark.parametrize("shape", [[-1, 4], [4.0], [True, 8], "8", [0, 2**62, 2**62], [1] * 70])
def test_shapes_that_are_none_are_refused(shape):
    with pytest.raises(RoutingError):
        raw_array(bytes(8) if shape != [0, 2**62, 2**62] else b"", shape, "uint8", "test")


@pytest.mark.parametrize("dtype", ["float32", "object", "bool", "O", None, 3, ["int16"]])
def test_dtypes_that_hold_no_ids_are_refused(dtype):
    with pytest.raises(RoutingError, match="dtype must be one of"):
        raw_array(bytes(8), None, dtype, "test")


def test_nested_lists_must_be_rectangular():
    assert integers([[1, 2], [3, 4]], "test").tolist() == [[1, 2], [3, 4]]
    for nested in ([[1, 2], [3]], [[1, 2.0]], [[1, None]], [[1, "2"]], [[2**70]]):
        with pytest.raises(RoutingError):
            integers(nested, "test")
