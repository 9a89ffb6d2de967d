"""The names and values of cuda.core.system.typing that are used."""

from __future__ import annotations

from enum import IntEnum, StrEnum


class EventType(StrEnum):
    SINGLE_BIT_ECC_ERROR = "single_bit_ecc_error"
    DOUBLE_BIT_ECC_ERROR = "double_bit_ecc_error"
    XID_CRITICAL_ERROR = "xid_critical_error"
    DRAM_RETIREMENT_FAILURE = "dram_retirement_failure"
    FATAL_POISON_ERROR = "fatal_poison_error"
    GPU_UNAVAILABLE_ERROR = "gpu_unavailable_error"


class ClocksEventReasons(StrEnum):
    GPU_IDLE = "gpu_idle"
    SW_POWER_CAP = "sw_power_cap"
    HW_SLOWDOWN = "hw_slowdown"
    SYNC_BOOST = "sync_boost"
    SW_THERMAL_SLOWDOWN = "sw_thermal_slowdown"
    HW_THERMAL_SLOWDOWN = "hw_thermal_slowdown"
    HW_POWER_BRAKE_SLOWDOWN = "hw_power_brake_slowdown"
    BOARD_LIMIT = "board_limit"
    RELIABILITY = "reliability"


class FieldId(IntEnum):
    DEV_ECC_SBE_VOL_TOTAL = 3
    DEV_ECC_DBE_VOL_TOTAL = 4
    DEV_POWER_INSTANT = 186
    DEV_GET_GPU_RECOVERY_ACTION = 230
