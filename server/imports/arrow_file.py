"""Arrow's IPC files and streams: what Hugging Face's `save_to_disk` writes, and Feather files.
Untrusted: runs only in the sandbox.

Both are read one record batch at a time. A stream has no index, so it is read through once for the
places of its batches. One that ends without its end marker has been cut short, even between two
batches, where pyarrow reports nothing.
"""

from __future__ import annotations

from typing import BinaryIO

import pyarrow as pa
import pyarrow.ipc

from server.imports.raw_file import ImportRefused

FILE = b"ARROW1"
CONTINUATION = b"\xff\xff\xff\xff"
END = CONTINUATION + b"\0\0\0\0"


class ArrowFile:
    """Batches of a file or stream, each checked when it is read.

    Raises `ImportRefused`, `ValueError`, and pyarrow's and the file's errors.
    """

    def __init__(self, file: BinaryIO):
        self._file = file
        self._batch: tuple[int, pa.RecordBatch] | None = None
        self._places: list[int] = []
        self.batch_rows: list[int] = []
        self.batch_bytes: list[int] = []
        """Unpacked."""
        self._reader: pa.ipc.RecordBatchFileReader | None = None
        if file.read(len(FILE)) == FILE:
            file.seek(0)
            self._reader = pa.ipc.open_file(pa.PythonFile(file, mode="r"))
            self.schema = self._reader.schema
            for number in range(self._reader.num_record_batches):
                self._note(self._reader.get_batch(number))
            return
        file.seek(0)
        self.schema = pa.ipc.read_schema(self._message("schema"))
        while (message := self._message("record batch")) is not None:
            self._places.append(self._before)
            self._note(pa.ipc.read_record_batch(message, self.schema))

    def read(self, number: int) -> pa.RecordBatch:
        """A batch; the last one is kept."""
        if self._batch is None or self._batch[0] != number:
            self._batch = None
            if self._reader is not None:
                batch = self._reader.get_batch(number)
            else:
                self._file.seek(self._places[number])
                batch = pa.ipc.read_record_batch(self._message("record batch"), self.schema)
            # Offsets and lengths in it are claims.
            batch.validate(full=True)
            self._batch = (number, batch)
        return self._batch[1]

    def _message(self, kind: str) -> pa.Message | None:
        """The next message of a stream; None at its end."""
        self._before = self._file.tell()
        start = self._file.read(len(END))
        if start == END:
            return None
        if len(start) < len(END) or not start.startswith(CONTINUATION):
            raise ValueError("no end of the stream, or something else in it")
        self._file.seek(self._before)
        message = pa.ipc.read_message(pa.PythonFile(self._file, mode="r"))
        if message.type == "dictionary":
            raise ImportRefused(
                "dictionary-encoded columns of an Arrow stream are not read",
                expected="plain columns, or an Arrow file",
            )
        if message.type != kind:
            raise ValueError(f"expected a {kind}, got a {message.type}")
        return message

    def _note(self, batch: pa.RecordBatch) -> None:
        self.batch_rows.append(batch.num_rows)
        self.batch_bytes.append(batch.nbytes)


def is_arrow(start: bytes) -> bool:
    """Whether a file that begins so is one of Arrow's."""
    return start.startswith((FILE, CONTINUATION))
