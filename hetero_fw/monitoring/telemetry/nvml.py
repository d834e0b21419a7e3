"""One NVIDIA device by what never changes: its UUID or its place on the PCI bus."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pynvml

from hetero_fw.policies import Measure, Reading

_THROTTLE_REASONS = {
    pynvml.nvmlClocksThrottleReasonHwThermalSlowdown: "hardware thermal slowdown",
    pynvml.nvmlClocksThrottleReasonHwPowerBrakeSlowdown: "power brake",
    pynvml.nvmlClocksThrottleReasonHwSlowdown: "hardware slowdown",
    pynvml.nvmlClocksThrottleReasonSwThermalSlowdown: "software thermal slowdown",
}
_MAX_EVENTS = 64


class NvmlTelemetry:
    """Reads one device through NVML. Never by index: CUDA and NVML number devices differently.

    Args:
        uuid: with or without `GPU-` or `MIG-` in front, as NVML or as CUDA tells it.
        pci_bus_id: used if there is no device with that UUID.
        reusable_bytes: device memory that this process holds but does not use, such as the cache of
            torch's allocator. NVML counts it as used: alone its figure is near 100 % late in any
            run.
        nvml: the module `pynvml`, or what stands in for it.

    Nothing is opened before the first `read`. What the device or its driver does not support is
    missing from the readings.
    """

    def __init__(
        self,
        *,
        uuid: str | None,
        pci_bus_id: str | None = None,
        reusable_bytes: Callable[[], int] = lambda: 0,
        nvml: Any = pynvml,
    ) -> None:
        self._uuid = uuid
        self._pci_bus_id = pci_bus_id
        self._reusable_bytes = reusable_bytes
        self._nvml = nvml
        self._handle: Any = None
        self._events: Any = None
        self._num_xids = 0
        self._last_xid = ""

    def read(self) -> Reading:
        """The present values.

        Raises:
            pynvml.NVMLError: no driver, no such device, or the device is lost.
        """
        if self._handle is None:
            self._open()
        values: dict[Measure, float] = {}
        notes: dict[Measure, str] = {}
        for measure, read in (
            (Measure.DEVICE_UTILIZATION_PERCENT, self._utilization_percent),
            (Measure.DEVICE_MEMORY_PERCENT, self._memory_percent),
            (Measure.DEVICE_TEMPERATURE_OVER_SLOWDOWN_C, self._over_slowdown_c),
            (Measure.DEVICE_ECC_ERRORS, self._ecc_errors),
        ):
            value = self._supported(read)
            if value is not None:
                values[measure] = float(value)
        reasons = self._supported(self._throttle_reasons)
        if reasons is not None:
            values[Measure.DEVICE_THROTTLING] = float(bool(reasons))
            notes[Measure.DEVICE_THROTTLING] = ", ".join(reasons)
        if self._events is not None:
            self._collect_xids()
            values[Measure.DEVICE_XID_ERRORS] = float(self._num_xids)
            notes[Measure.DEVICE_XID_ERRORS] = self._last_xid
        return Reading(values=values, notes=notes)

    def close(self) -> None:
        """End the use of NVML by this object."""
        if self._handle is None:
            return
        if self._events is not None:
            self._nvml.nvmlEventSetFree(self._events)
            self._events = None
        self._handle = None
        self._nvml.nvmlShutdown()

    def _open(self) -> None:
        self._nvml.nvmlInit()
        try:
            handle = self._find()
        except self._nvml.NVMLError:
            self._nvml.nvmlShutdown()
            raise
        self._handle = handle
        self._events = self._supported(self._register_events)

    def _find(self) -> Any:
        uuid = (self._uuid or "").removeprefix("GPU-").removeprefix("MIG-")
        for prefix in ("GPU-", "MIG-") if uuid else ():
            try:
                return self._nvml.nvmlDeviceGetHandleByUUID(f"{prefix}{uuid}")
            except (self._nvml.NVMLError_NotFound, self._nvml.NVMLError_InvalidArgument):
                continue
        return self._nvml.nvmlDeviceGetHandleByPciBusId(self._pci_bus_id or "")

    def _register_events(self) -> Any:
        events = self._nvml.nvmlEventSetCreate()
        try:
            self._nvml.nvmlDeviceRegisterEvents(
                self._handle, self._nvml.nvmlEventTypeXidCriticalError, events
            )
        except self._nvml.NVMLError:
            self._nvml.nvmlEventSetFree(events)
            raise
        return events

    def _supported(self, read: Callable[[], Any]) -> Any:
        """What `read` returns; None if this device or driver cannot tell."""
        nvml = self._nvml
        missing = (
            nvml.NVMLError_NotSupported,
            nvml.NVMLError_FunctionNotFound,
            nvml.NVMLError_NoPermission,
            nvml.NVMLError_InvalidArgument,
        )
        try:
            return read()
        except missing:
            return None

    def _utilization_percent(self) -> float:
        return float(self._nvml.nvmlDeviceGetUtilizationRates(self._handle).gpu)

    def _memory_percent(self) -> float:
        memory = self._nvml.nvmlDeviceGetMemoryInfo(self._handle)
        needed_bytes = max(0, memory.used - self._reusable_bytes())
        return float(100.0 * needed_bytes / memory.total)

    def _over_slowdown_c(self) -> float:
        nvml = self._nvml
        try:
            slowdown_c = nvml.nvmlDeviceGetTemperatureThreshold(
                self._handle, nvml.NVML_TEMPERATURE_THRESHOLD_SLOWDOWN
            )
        except nvml.NVMLError_NotSupported:
            # Newer devices tell the distance alone.
            return -float(nvml.nvmlDeviceGetMarginTemperature(self._handle))
        now_c = nvml.nvmlDeviceGetTemperature(self._handle, nvml.NVML_TEMPERATURE_GPU)
        return float(now_c - slowdown_c)

    def _ecc_errors(self) -> float:
        return float(
            self._nvml.nvmlDeviceGetTotalEccErrors(
                self._handle,
                self._nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED,
                self._nvml.NVML_VOLATILE_ECC,
            )
        )

    def _throttle_reasons(self) -> list[str]:
        """Reasons that mean trouble; a power cap or idle clocks are normal."""
        try:
            bits = self._nvml.nvmlDeviceGetCurrentClocksEventReasons(self._handle)
        except self._nvml.NVMLError_FunctionNotFound:
            # Drivers before 535 have it under its earlier name only.
            bits = self._nvml.nvmlDeviceGetCurrentClocksThrottleReasons(self._handle)
        return [text for bit, text in _THROTTLE_REASONS.items() if bits & bit]

    def _collect_xids(self) -> None:
        """Take in the events that have come since the last reading, without waiting for one."""
        for _ in range(_MAX_EVENTS):
            try:
                event = self._nvml.nvmlEventSetWait(self._events, 0)
            except self._nvml.NVMLError_Timeout:
                return
            self._num_xids += 1
            self._last_xid = f"XID {event.eventData}"
