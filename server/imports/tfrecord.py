"""TFRecord files and the tf.train.Example messages in them. Untrusted: runs only in the sandbox.

    uint64 length | uint32 masked CRC32C of the length | bytes | uint32 masked CRC32C of the bytes

Every length is checked against the file, every checksum against its bytes. The message is parsed by
protobuf, after a description of its three fields that is built here; TensorFlow is not needed.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from typing import Any, BinaryIO

import google_crc32c
import numpy as np
from google.protobuf import descriptor_pb2, descriptor_pool, message, message_factory

from server.imports.raw_file import Array, ImportRefused

HEAD, FOOT = struct.Struct("<QI"), struct.Struct("<I")
Features = dict[str, Array | list[bytes]]
"""By name: float32 or int64 [n], or n byte strings."""


def records(file: BinaryIO, name: str) -> Iterator[tuple[int, int]]:
    """(offset, length) of every record's bytes, checked. Raises `ImportRefused`."""
    size = file.seek(0, os.SEEK_END)
    at = 0
    while at < size:
        file.seek(at)
        head = file.read(HEAD.size)
        if len(head) != HEAD.size:
            raise _damaged(name, at, "it is cut short")
        length, checksum = HEAD.unpack(head)
        if masked_crc(head[:8]) != checksum:
            raise _damaged(name, at, "the checksum of its length is wrong")
        if length > size - at - HEAD.size - FOOT.size:
            raise _damaged(name, at, f"it claims {length} bytes, beyond the end of the file")
        data = file.read(length)
        foot = file.read(FOOT.size)
        if len(foot) != FOOT.size or masked_crc(data) != FOOT.unpack(foot)[0]:
            raise _damaged(name, at, "its checksum is wrong")
        yield at + HEAD.size, length
        at += HEAD.size + length + FOOT.size


def masked_crc(data: bytes) -> int:
    crc = int(google_crc32c.value(data))
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def parse(data: bytes, name: str) -> Features:
    """The features of one tf.train.Example. Raises `ImportRefused`."""
    example = _EXAMPLE()
    try:
        example.ParseFromString(data)
    except message.DecodeError:
        raise ImportRefused(
            f"{name} is not a tf.train.Example", expected="records that TFDS wrote"
        ) from None
    found: Features = {}
    for entry in example.features.feature:
        value = entry.value
        kind = value.WhichOneof("kind")
        if kind == "float_list":
            found[entry.key] = np.array(value.float_list.value, np.float32)
        elif kind == "int64_list":
            found[entry.key] = np.array(value.int64_list.value, np.int64)
        else:
            found[entry.key] = list(value.bytes_list.value)
    return found


def example_type() -> Any:
    """The class of tf.train.Example: a map from names to one list each."""
    field = descriptor_pb2.FieldDescriptorProto
    file = descriptor_pb2.FileDescriptorProto(name="example.proto", syntax="proto3")

    def add(name: str, *fields: tuple[str, int, int, str]) -> Any:
        made = file.message_type.add(name=name)
        for number, (called, kind, label, of) in enumerate(fields, 1):
            one_field = made.field.add(name=called, number=number, type=kind, label=label)
            if of:
                one_field.type_name = of
        return made

    one, many = field.LABEL_OPTIONAL, field.LABEL_REPEATED
    add("BytesList", ("value", field.TYPE_BYTES, many, ""))
    add("FloatList", ("value", field.TYPE_FLOAT, many, ""))
    add("Int64List", ("value", field.TYPE_INT64, many, ""))
    lists = [(f"{kind.lower()}_list", f".{kind}List") for kind in ("Bytes", "Float", "Int64")]
    feature = add("Feature", *((n, field.TYPE_MESSAGE, one, of) for n, of in lists))
    feature.oneof_decl.add(name="kind")
    for member in feature.field:
        member.oneof_index = 0
    # A map is a repeated message of pairs; read as such, a name that occurs twice is the last one.
    add("Pair", ("key", field.TYPE_STRING, one, ""), ("value", field.TYPE_MESSAGE, one, ".Feature"))
    add("Features", ("feature", field.TYPE_MESSAGE, many, ".Pair"))
    add("Example", ("features", field.TYPE_MESSAGE, one, ".Features"))
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("Example"))


_EXAMPLE = example_type()


def _damaged(name: str, at: int, why: str) -> ImportRefused:
    return ImportRefused(
        f"{name} is damaged at byte {at}: {why}", expected="records that TFDS wrote"
    )
