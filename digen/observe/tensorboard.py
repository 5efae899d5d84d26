"""TensorBoard event files, written without TensorBoard (which brings 60 MB of web server; it is only needed to look).

An event file is a sequence of TFRecords (length, checksum of the length, data, checksum of the data), each holding one
`tensorflow.Event` protocol buffer; of that message a scalar needs six fields. Invariant: one event per step holds the
whole row, so a file never shows half a step; a full disk costs events, never the run. A run that goes on begins a file
of its own, whose first words are that what older files say of its steps no longer counts.
"""

from __future__ import annotations

import os
import struct
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from digen.observe.base import StepRow
from digen.observe.files import AppendFile, Warn, log
from digen.types import Decision, Span


class TensorBoardObserver:
    """Writes every number of a row as a scalar named by its key, at the row's step, under `folder`.

    `first_step`: readers forget this step and later ones of older files in the folder.
    """

    def __init__(
        self,
        folder: Path,
        warn: Warn = log.warning,
        clock: Callable[[], float] = time.time,
        *,
        first_step: int = 0,
    ) -> None:
        self._clock = clock
        with suppress(OSError):  # what then cannot be written is warned of
            folder.mkdir(parents=True, exist_ok=True)
        self._file = AppendFile(folder / f"events.out.tfevents.{int(clock()):010d}.{os.getpid()}.digen", warn)
        self._file.append(_record(_double(1, clock()) + _bytes(3, b"brain.Event:2")))
        start = _bytes(7, _varint(1, 1))  # session_log { status: START }
        self._file.append(_record(_double(1, clock()) + _varint(2, first_step) + start))

    def on_span(self, span: Span) -> None:
        """Spans are for `events.jsonl`."""

    def on_decision(self, decision: Decision) -> None:
        """Decisions are for `decisions.jsonl`."""

    def on_step(self, row: StepRow) -> None:
        scalars = b"".join(
            _bytes(1, _bytes(1, name.encode()) + _float(2, value)) for name, value in row.items() if name != "step"
        )
        self._file.append(_record(_double(1, self._clock()) + _varint(2, int(row["step"])) + _bytes(5, scalars)))

    def on_note(self, message: str) -> None:
        """Notes are for `logs/driver.log`."""

    def close(self) -> None:
        self._file.close()


def _record(data: bytes) -> bytes:
    """TFRecord: uint64 length, its masked CRC, data, masked CRC of the data; all little-endian."""
    length = struct.pack("<Q", len(data))
    return length + struct.pack("<I", masked_crc32c(length)) + data + struct.pack("<I", masked_crc32c(data))


def _number(value: int) -> bytes:
    """Protocol-buffer varint: seven bits a byte, lowest first, the top bit says that more follow."""
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _varint(field: int, value: int) -> bytes:
    return _number(field << 3 | 0) + _number(value)


def _double(field: int, value: float) -> bytes:
    return _number(field << 3 | 1) + struct.pack("<d", value)


def _bytes(field: int, value: bytes) -> bytes:
    return _number(field << 3 | 2) + _number(len(value)) + value


def _float(field: int, value: float) -> bytes:
    try:
        packed = struct.pack("<f", value)
    except OverflowError:  # beyond float32: shown as infinite, with its sign
        packed = struct.pack("<f", float("inf") if value > 0 else float("-inf"))
    return _number(field << 3 | 5) + packed


def _crc_table() -> tuple[int, ...]:
    """CRC-32C (Castagnoli, reflected polynomial 0x82F63B78, RFC 3720) of every single byte."""
    table = []
    for byte in range(256):
        crc = byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
        table.append(crc)
    return tuple(table)


_CRC = _crc_table()


def masked_crc32c(data: bytes) -> int:
    """CRC-32C rotated right by 15 bits plus a constant, as TFRecord asks for: 32 bits."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc = _CRC[(crc ^ byte) & 0xFF] ^ crc >> 8
    crc ^= 0xFFFFFFFF
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF
