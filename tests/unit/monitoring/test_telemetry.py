"""Readings: taken beside training, merged, and never the end of anything."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest

from hetero_fw.monitoring import HostTelemetry, NvmlTelemetry, TelemetryThread
from hetero_fw.monitoring.telemetry import (
    available_memory_bytes,
    cgroup_memory_percent,
    merge_readings,
)
from hetero_fw.policies import Measure, Reading

MEMORY = Measure.HOST_MEMORY_PERCENT
SWAP = Measure.HOST_SWAP_PERCENT


class Source:
    """Gives what it was told to, or raises it."""

    def __init__(self, *results: Reading | Exception) -> None:
        self.results = list(results)
        self.is_closed = False

    def read(self) -> Reading:
        result = self.results.pop(0) if len(self.results) > 1 else self.results[0]
        if isinstance(result, Exception):
            raise result
        return result

    def close(self) -> None:
        self.is_closed = True


def thread_of(
    *sources: Source, on_reading: Callable[[Reading], None], errors: list[str]
) -> TelemetryThread:
    return TelemetryThread(sources, interval_s=0.001, on_reading=on_reading, on_error=errors.append)


def test_the_thread_reads_until_it_is_stopped_and_closes_its_sources() -> None:
    source, enough, count = Source(Reading(values={MEMORY: 50.0})), threading.Event(), []

    def note(reading: Reading) -> None:
        count.append(reading.values[MEMORY])
        if len(count) == 5:
            enough.set()

    thread = thread_of(source, on_reading=note, errors=[])
    thread.start()
    assert enough.wait(10)
    thread.stop()
    thread.stop()
    assert source.is_closed
    assert set(count) == {50.0}


def test_a_thread_that_never_ran_can_be_stopped() -> None:
    thread_of(Source(Reading(values={})), on_reading=lambda _: None, errors=[]).stop()


def test_errors_are_told_once_and_the_rest_is_read_on() -> None:
    good = Source(Reading(values={MEMORY: 60.0}))
    bad = Source(
        OSError("sensor gone"), OSError("still gone"), Reading(values={SWAP: 1.0}), OSError("again")
    )
    readings: list[Reading] = []
    errors: list[str] = []
    thread = thread_of(good, bad, on_reading=readings.append, errors=errors)
    for _ in range(4):
        thread.sample()
    assert [set(reading.values) for reading in readings] == [
        {MEMORY},
        {MEMORY},
        {MEMORY, SWAP},
        {MEMORY},
    ]
    assert errors == ["Source cannot be read: OSError: sensor gone"]


def test_readings_are_merged() -> None:
    first = Reading(values={MEMORY: 1.0}, notes={MEMORY: "a"})
    merged = merge_readings([first, Reading(values={SWAP: 2.0})])
    assert merged == Reading(values={MEMORY: 1.0, SWAP: 2.0}, notes={MEMORY: "a"})


def test_the_host_is_read(tmp_path: Path) -> None:
    reading = HostTelemetry(cgroup=tmp_path).read()
    assert 0 < reading.values[MEMORY] <= 100
    assert SWAP not in reading.values


def test_a_container_counts_if_it_is_nearer_its_end(tmp_path: Path) -> None:
    (tmp_path / "memory.max").write_text("1000\n")
    (tmp_path / "memory.current").write_text("1190\n")
    (tmp_path / "memory.stat").write_text("anon 900\ninactive_file 200\n")
    assert cgroup_memory_percent(tmp_path) == pytest.approx(99.0)
    reading = HostTelemetry(cgroup=tmp_path).read()
    assert reading.values[MEMORY] == pytest.approx(99.0)
    assert "container" in reading.notes[MEMORY]
    assert available_memory_bytes(tmp_path) == 10
    (tmp_path / "memory.max").write_text("max\n")
    assert cgroup_memory_percent(tmp_path) is None
    assert available_memory_bytes(tmp_path) > 10


class Nvml:
    """Stands in for `pynvml`: one device, found by `uuid` or by `bus`."""

    def __init__(self, *, uuid: str = "GPU-1234", bus: str = "0000:3b:00.0") -> None:
        self.uuid, self.bus = uuid, bus
        self.unsupported: set[str] = set()
        self.num_open = 0
        self.xids: list[int] = []
        self.reasons = 0
        self.is_lost = False

    def __getattr__(self, name: str) -> Any:
        # Constants and exceptions are those of the real module.
        return getattr(pynvml, name)

    def _check(self, name: str) -> None:
        if self.is_lost:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_GPU_IS_LOST)
        if name in self.unsupported:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)

    def nvmlInit(self) -> None:
        self.num_open += 1

    def nvmlShutdown(self) -> None:
        self.num_open -= 1

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        if uuid != self.uuid:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)
        return "device"

    def nvmlDeviceGetHandleByPciBusId(self, bus: str) -> str:
        if bus != self.bus:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)
        return "device"

    def nvmlDeviceGetUtilizationRates(self, handle: str) -> Any:
        self._check("utilization")
        return SimpleNamespace(gpu=98)

    def nvmlDeviceGetMemoryInfo(self, handle: str) -> Any:
        self._check("memory")
        return SimpleNamespace(used=960, total=1000)

    def nvmlDeviceGetTemperature(self, handle: str, sensor: int) -> int:
        self._check("temperature")
        return 85

    def nvmlDeviceGetTemperatureThreshold(self, handle: str, kind: int) -> int:
        self._check("threshold")
        assert kind == pynvml.NVML_TEMPERATURE_THRESHOLD_SLOWDOWN
        return 88

    def nvmlDeviceGetMarginTemperature(self, handle: str) -> int:
        self._check("margin")
        return 11

    def nvmlDeviceGetTotalEccErrors(self, handle: str, kind: int, counter: int) -> int:
        self._check("ecc")
        assert kind == pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED
        return 4

    def nvmlDeviceGetCurrentClocksEventReasons(self, handle: str) -> int:
        if "reasons" in self.unsupported:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_FUNCTION_NOT_FOUND)
        return self.reasons

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle: str) -> int:
        return self.reasons

    def nvmlEventSetCreate(self) -> str:
        self.num_open += 1
        return "events"

    def nvmlEventSetFree(self, events: str) -> None:
        self.num_open -= 1

    def nvmlDeviceRegisterEvents(self, handle: str, kinds: int, events: str) -> None:
        self._check("events")

    def nvmlEventSetWait(self, events: str, timeout_ms: int) -> Any:
        assert timeout_ms == 0, "reading must not wait"
        if not self.xids:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_TIMEOUT)
        return SimpleNamespace(eventData=self.xids.pop(0))


def test_a_device_is_read_in_full() -> None:
    nvml = Nvml()
    source = NvmlTelemetry(uuid="1234", nvml=nvml, reusable_bytes=lambda: 60)
    assert source.read().values == {
        Measure.DEVICE_UTILIZATION_PERCENT: 98.0,
        Measure.DEVICE_MEMORY_PERCENT: pytest.approx(90.0),
        Measure.DEVICE_TEMPERATURE_OVER_SLOWDOWN_C: -3.0,
        Measure.DEVICE_ECC_ERRORS: 4.0,
        Measure.DEVICE_THROTTLING: 0.0,
        Measure.DEVICE_XID_ERRORS: 0.0,
    }
    source.close()
    source.close()
    assert nvml.num_open == 0


@pytest.mark.parametrize(
    ("asked", "there"),
    [
        ({"uuid": "GPU-1234"}, {}),
        ({"uuid": "1234"}, {"uuid": "MIG-1234"}),
        ({"uuid": "other", "pci_bus_id": "0000:3b:00.0"}, {}),
        ({"uuid": None, "pci_bus_id": "0000:3b:00.0"}, {}),
    ],
)
def test_a_device_is_found_by_what_never_changes(
    asked: dict[str, Any], there: dict[str, str]
) -> None:
    assert NvmlTelemetry(**asked, nvml=Nvml(**there)).read().values


def test_a_device_that_is_not_there_is_an_error_that_holds_nothing_open() -> None:
    nvml = Nvml()
    with pytest.raises(pynvml.NVMLError):
        NvmlTelemetry(uuid="other", pci_bus_id="0000:00:00.0", nvml=nvml).read()
    assert nvml.num_open == 0


def test_xids_and_throttling_are_named() -> None:
    nvml = Nvml()
    source = NvmlTelemetry(uuid="1234", nvml=nvml)
    source.read()
    nvml.xids = [31, 79]
    nvml.reasons = (
        pynvml.nvmlClocksThrottleReasonHwThermalSlowdown | pynvml.nvmlClocksThrottleReasonSwPowerCap
    )
    reading = source.read()
    assert reading.values[Measure.DEVICE_XID_ERRORS] == 2
    assert reading.notes[Measure.DEVICE_XID_ERRORS] == "XID 79"
    assert reading.values[Measure.DEVICE_THROTTLING] == 1
    assert reading.notes[Measure.DEVICE_THROTTLING] == "hardware thermal slowdown"
    nvml.unsupported = {"reasons"}
    nvml.reasons = pynvml.nvmlClocksThrottleReasonSwPowerCap
    assert source.read().values[Measure.DEVICE_THROTTLING] == 0, "a power cap is no trouble"


def test_what_a_device_cannot_tell_is_left_out() -> None:
    nvml = Nvml()
    nvml.unsupported = {"ecc", "events", "threshold"}
    values = NvmlTelemetry(uuid="1234", nvml=nvml).read().values
    assert values[Measure.DEVICE_TEMPERATURE_OVER_SLOWDOWN_C] == -11.0
    assert Measure.DEVICE_ECC_ERRORS not in values
    assert Measure.DEVICE_XID_ERRORS not in values
    nvml.unsupported |= {"margin", "utilization", "memory"}
    assert set(NvmlTelemetry(uuid="1234", nvml=nvml).read().values) == {Measure.DEVICE_THROTTLING}


def test_a_lost_device_is_an_error() -> None:
    nvml = Nvml()
    source = NvmlTelemetry(uuid="1234", nvml=nvml)
    source.read()
    nvml.is_lost = True
    with pytest.raises(pynvml.NVMLError):
        source.read()
