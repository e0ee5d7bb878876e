"""Measured profiles survive a file whole, in the manner of graphs."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
from conformance_graphs import GRAPHS

from echograph.errors import FormatError, InputError, OutputError
from echograph.ir import types as t
from echograph.ir.files import fields, with_checksum
from echograph.ir.profile import Environment, Measurement, Profile, TensorType, load_profile, save_profile
from echograph.ir.serde import decode, encode
from echograph.ir.serde.profile import decode_profile, encode_profile
from echograph.proto import profile_pb2 as pb

PROFILE = Profile(
    environment=Environment(
        device="h100", hardware="NVIDIA H100", driver="570.1", torch="2.13", cuda="12.8", date="2026-01-31",
        sm_clock_mhz=1980, memory_clock_mhz=2619,
    ),
    measurements=(
        Measurement(
            operator="aten.mm",
            inputs=(TensorType(dtype=t.DType.BF16, shape=(8, 4)), TensorType(dtype=t.DType.FP32, shape=())),
            outputs=(TensorType(dtype=t.DType.BOOL, shape=(0,)),),
            attributes=t.Gemm(), mean_picoseconds=2**40, median_picoseconds=2**40 - 1, samples=50, spread=0.125,
            kernels=("first", "second", "first"),
        ),
        *(Measurement(operator="op", attributes=a) for a in GRAPHS["kinds"]().ops.attribute_values),
        Measurement(operator="bare"),
    ),
)  # fmt: skip
WHOLE = b"".join(encode_profile(PROFILE))
KNOWN = b"".join(WHOLE[f.start : f.end] for f in fields(WHOLE))


def sealed(*messages: bytes) -> bytes:
    return b"".join(with_checksum(messages))


def test_a_profile_comes_back_from_its_file(tmp_path: Path) -> None:
    assert save_profile(PROFILE, tmp_path / "p.pb") == len(WHOLE)
    assert load_profile(tmp_path / "p.pb") == PROFILE


def test_an_empty_profile_comes_back() -> None:
    profile = Profile(environment=Environment(device="x"))
    assert decode_profile(b"".join(encode_profile(profile))) == profile


def test_unknown_fields_of_a_newer_minor_format_are_kept() -> None:
    newer = decode_profile(sealed(KNOWN, pb.Profile(format_minor=4).SerializeToString(), b"\xa2\x06\x03new"))
    assert newer == replace(PROFILE, unknown=b"\xa2\x06\x03new")
    assert decode_profile(b"".join(encode_profile(newer))) == newer


def test_a_newer_major_format_is_refused() -> None:
    with pytest.raises(FormatError, match="newer"):
        decode_profile(sealed(KNOWN, pb.Profile(format_major=3).SerializeToString()))


def test_cut_anywhere_it_is_refused() -> None:
    for end in range(len(WHOLE)):
        with pytest.raises(FormatError):
            decode_profile(WHOLE[:end])


@pytest.mark.parametrize(
    "measurement",
    [
        pb.Measurement(operator=""),
        pb.Measurement(operator="x", spread=float("nan")),
        pb.Measurement(operator="x", spread=-1.0),
        pb.Measurement(operator="x", inputs=[pb.TensorType()]),
        pb.Measurement(operator="x", attributes=type(pb.Measurement().attributes)()),
    ],
)
def test_a_measurement_that_says_nothing_is_refused(measurement: pb.Measurement) -> None:
    with pytest.raises(FormatError):
        decode_profile(sealed(KNOWN, pb.Profile(measurements=[measurement]).SerializeToString()))


def test_graphs_and_profiles_are_told_apart() -> None:
    with pytest.raises(FormatError, match="not an echograph file"):
        decode(WHOLE)
    with pytest.raises(FormatError, match="not an echograph-profile file"):
        decode_profile(b"".join(encode(GRAPHS["two_layers"]())))


def test_paths_that_cannot_be_read_or_written(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="echoprof ops"):
        load_profile(tmp_path / "none.pb")
    with pytest.raises(OutputError):
        save_profile(PROFILE, tmp_path / "no" / "p.pb")
    (tmp_path / "bad.pb").write_bytes(WHOLE[:-1])
    with pytest.raises(FormatError, match=r"bad\.pb: "):
        load_profile(tmp_path / "bad.pb")


def test_damage_is_refused_or_harmless() -> None:
    chance = random.Random(0)
    for _ in range(1000):
        damaged = bytearray(KNOWN)
        damaged[chance.randrange(len(damaged))] = chance.randrange(256)
        try:
            profile = decode_profile(sealed(bytes(damaged)))
        except FormatError:
            continue
        assert decode_profile(b"".join(encode_profile(profile))) == profile
