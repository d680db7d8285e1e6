"""Launching by the driver: what it is handed, on a driver that is not there."""

import ctypes
from types import SimpleNamespace

import pytest

from nemolab.errors import EngineError
from nemolab.kernels.gpu import launch

PTX = ".version 8.0\n.visible .entry k(\n.param .u64 p0,\n.param .u32 p1,\n.param .u64 p2,\n.param .u64 p3\n)\n{ ret; }"


@pytest.fixture
def driver(monkeypatch):
    """A driver that keeps the parameters of every launch and answers `.status`."""
    found = SimpleNamespace(launches=[], status=0)

    def launch_kernel(function, x, y, z, block, by, bz, shared, stream, parameters, extra):
        widths = (ctypes.c_uint64, ctypes.c_uint32, ctypes.c_uint64, ctypes.c_uint64)
        values = [width.from_address(at).value for width, at in zip(widths, parameters, strict=True)]
        found.launches.append(((x, y, z), block, shared, stream, values))
        return found.status

    monkeypatch.setattr(launch.ctypes, "CDLL", lambda name: SimpleNamespace(cuLaunchKernel=launch_kernel))
    return found


def compiled(**changed):
    metadata = {"name": "k", "num_warps": 2, "shared": 512, "global_scratch_size": 0, "num_ctas": 1} | changed
    return SimpleNamespace(asm={"ptx": PTX}, metadata=SimpleNamespace(**metadata), function=1)


def test_a_launch_hands_over_its_arguments_and_null_for_scratch(driver):
    direct = launch._Direct(compiled(), arguments=2)
    direct((3, 4), [2**40, 7], stream=9)
    direct((5,), [2**41, 8], stream=9)
    assert driver.launches == [
        ((3, 4, 1), 64, 512, 9, [2**40, 7, 0, 0]),
        ((5, 1, 1), 64, 512, 9, [2**41, 8, 0, 0]),
    ]


@pytest.mark.parametrize("values", [[2**40], [2**40, 7, 8]])
def test_a_launch_with_an_argument_too_few_or_too_many_does_not_happen(driver, values):
    direct = launch._Direct(compiled(), arguments=2)
    direct((1,), [1, 1], stream=0)
    with pytest.raises(ValueError, match="zip"):
        direct((1,), values, stream=0)
    assert len(driver.launches) == 1


def test_a_kernel_that_needs_more_than_its_arguments_is_refused(driver):
    for kernel, arguments in ((compiled(), 5), (compiled(global_scratch_size=8), 2), (compiled(num_ctas=2), 2)):
        with pytest.raises(EngineError, match="k: 4 parameters, scratch .*: not launched directly"):
            launch._Direct(kernel, arguments)


def test_a_launch_that_fails_is_said(driver):
    driver.status = 700
    with pytest.raises(EngineError, match=r"launching k on a grid of \(2, 1\) failed: CUDA error 700"):
        launch._Direct(compiled(), 2)((2, 1), [1, 1], stream=0)
