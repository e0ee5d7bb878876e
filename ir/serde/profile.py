"""Profiles to and from bytes (`proto/profile.proto`), in the manner of graphs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields as fields_of
from math import isfinite

from google.protobuf.message import DecodeError

from echograph.errors import FormatError
from echograph.ir import types as t
from echograph.ir.files import fields, with_checksum
from echograph.ir.graph import FORMAT_MAJOR
from echograph.ir.profile import Environment, Measurement, Profile, TensorType
from echograph.ir.serde import HEADER_FIELDS, check_header, decode_attributes, encode_attributes
from echograph.proto import profile_pb2 as pb
from echograph.proto import workload_pb2

MAGIC = "echograph-profile"
_KNOWN_FIELDS = {field.number for field in pb.Profile.DESCRIPTOR.fields}
_ENVIRONMENT = tuple(field.name for field in fields_of(Environment))


def encode_profile(profile: Profile) -> Iterator[bytes]:
    """The file's bytes, piece by piece."""
    types = {kind.dtype for m in profile.measurements for side in (m.inputs, m.outputs) for kind in side}
    message = pb.Profile(
        magic=MAGIC,
        format_major=2 if t.DType.FP4_E2M1 in types else 1,
        format_minor=0,
        environment=pb.Environment(**{name: getattr(profile.environment, name) for name in _ENVIRONMENT}),
        measurements=[_measurement(m) for m in profile.measurements],
    )
    return with_checksum((message.SerializeToString(deterministic=True), profile.unknown))


def decode_profile(data: bytes) -> Profile:
    """Parses and checks the bytes of a file.

    Raises:
        FormatError: not a profile, truncated, corrupted, or of a newer format.
    """
    if not data:
        raise FormatError("the file is empty")
    try:
        return _decode(data)
    except (DecodeError, ValueError) as error:
        line = " ".join(str(error).split())[:120]
        raise FormatError(f"not an echograph profile, or truncated or corrupted ({line})") from None


def _decode(data: bytes) -> Profile:
    identity, known, unknown = bytearray(), bytearray(), bytearray()
    for number, start, _, end in fields(data):
        target = identity if number in HEADER_FIELDS else known if number in _KNOWN_FIELDS else unknown
        target += data[start:end]
    check_header(pb.Profile.FromString(bytes(identity)), MAGIC, FORMAT_MAJOR)
    head = pb.Profile.FromString(bytes(known))
    return Profile(
        environment=Environment(**{name: getattr(head.environment, name) for name in _ENVIRONMENT}),
        measurements=tuple(_read(m, at) for at, m in enumerate(head.measurements)),
        unknown=bytes(unknown),
    )


def _measurement(m: Measurement) -> pb.Measurement:
    return pb.Measurement(
        operator=m.operator,
        inputs=map(_tensor_type, m.inputs),
        outputs=map(_tensor_type, m.outputs),
        attributes=None if m.attributes is None else encode_attributes(m.attributes),
        mean_picoseconds=m.mean_picoseconds,
        median_picoseconds=m.median_picoseconds,
        samples=m.samples,
        spread=m.spread,
        kernels=m.kernels,
        arguments=m.arguments,
        runs=m.runs,
        peak_bytes=m.peak_bytes,
    )


def _tensor_type(tensor: TensorType) -> pb.TensorType:
    return pb.TensorType(dtype=workload_pb2.DType.ValueType(tensor.dtype), shape=tensor.shape)


def _read(m: pb.Measurement, at: int) -> Measurement:
    if not m.operator or not isfinite(m.spread) or m.spread < 0:
        raise FormatError(f"corrupted: measurement {at} has no operator, or a spread that is no number >= 0")
    return Measurement(
        operator=m.operator,
        inputs=tuple(TensorType(dtype=t.DType(i.dtype), shape=tuple(i.shape)) for i in m.inputs),
        outputs=tuple(TensorType(dtype=t.DType(i.dtype), shape=tuple(i.shape)) for i in m.outputs),
        attributes=decode_attributes(m.attributes) if m.HasField("attributes") else None,
        mean_picoseconds=m.mean_picoseconds,
        median_picoseconds=m.median_picoseconds,
        samples=m.samples,
        spread=m.spread,
        kernels=tuple(m.kernels),
        arguments=m.arguments,
        runs=m.runs,
        peak_bytes=m.peak_bytes,
    )
