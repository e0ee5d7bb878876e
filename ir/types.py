"""The vocabulary of a workload graph: enumerations, tensors, operations and their attributes.

Everything here is frozen: a graph is made by `GraphBuilder` and never changed. Operations and tensors are
what one sees of the columns that stand behind a graph (`ir.columns`).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from math import prod


class DType(IntEnum):
    """Element type; the value is the number on the wire."""

    FP32 = 1
    FP16 = 2
    BF16 = 3
    FP64 = 4
    FP8_E4M3 = 5
    FP8_E5M2 = 6
    INT64 = 7
    INT32 = 8
    INT16 = 9
    INT8 = 10
    UINT8 = 11
    BOOL = 12
    COMPLEX64 = 13
    FP4_E2M1 = 14

    @property
    def bits(self) -> int:
        """Bits of one element."""
        return _BITS[self]

    def nbytes(self, elements: int) -> int:
        """Bytes that so many elements span: those of less than a byte share one."""
        return -(-elements * _BITS[self] // 8)

    @property
    def text(self) -> str:
        """The name as the text form and the command line spell it."""
        return self.name.lower()


_BITS = {
    DType.FP32: 32,
    DType.FP16: 16,
    DType.BF16: 16,
    DType.FP64: 64,
    DType.FP8_E4M3: 8,
    DType.FP8_E5M2: 8,
    DType.INT64: 64,
    DType.INT32: 32,
    DType.INT16: 16,
    DType.INT8: 8,
    DType.UINT8: 8,
    DType.BOOL: 8,
    DType.COMPLEX64: 64,
    DType.FP4_E2M1: 4,
}


class TensorRole(IntEnum):
    """What a tensor is to the training step.

    Parameters, gradients, optimizer state and buffers live through the step, once per block instance;
    activations and inputs belong to one micro-batch.
    """

    PARAMETER = 1
    GRADIENT = 2
    OPTIMIZER_STATE = 3
    ACTIVATION = 4
    INPUT = 5
    BUFFER = 6

    @property
    def persistent(self) -> bool:
        """Whether one copy serves every micro-batch."""
        return self not in (TensorRole.ACTIVATION, TensorRole.INPUT)


class Phase(IntEnum):
    """The part of the step that an operation belongs to."""

    FORWARD = 1
    BACKWARD = 2
    RECOMPUTE = 3
    OPTIMIZER = 4
    OTHER = 5


class OpKind(IntEnum):
    """Which alternative of `Op` an operation is."""

    COMPUTE = 1
    COLLECTIVE = 2
    SEND = 3
    RECV = 4
    COPY = 5
    HOST = 6


COMMUNICATIONS = (OpKind.COLLECTIVE, OpKind.SEND, OpKind.RECV)
"""Operations that other ranks take part in."""


class CollectiveKind(IntEnum):
    """A collective operation, in the words of NCCL and torch.distributed."""

    ALL_REDUCE = 1
    ALL_GATHER = 2
    REDUCE_SCATTER = 3
    ALL_TO_ALL = 4
    BROADCAST = 5
    REDUCE = 6
    GATHER = 7
    SCATTER = 8
    BARRIER = 9


class Payload(IntEnum):
    """What a communication carries."""

    PARAMETER = 1
    GRADIENT = 2
    ACTIVATION = 3
    OPTIMIZER_STATE = 4
    OTHER = 5


class CopyDirection(IntEnum):
    """Between which memories a copy moves bytes."""

    HOST_TO_DEVICE = 1
    DEVICE_TO_HOST = 2
    DEVICE_TO_DEVICE = 3


class Source(IntEnum):
    """Where a duration comes from, best first."""

    MEASURED = 1
    FITTED = 2
    ANALYTICAL = 3
    IMPORTED = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Duration:
    """How long an operation takes on one device.

    Attributes:
        device: name of the device (a profile's name), or of the fabric for a communication.
        picoseconds: the value that a simulator uses.
        source: where it comes from.
        samples: number of measurements behind it; 0 when none.
        spread: relative standard error (one sigma) of the value; 0 when unknown.
    """

    device: str
    picoseconds: int
    source: Source
    samples: int = 0
    spread: float = 0.0


ANY_HOST = "/host"
"""What durations are of that hold for the hosts of all devices, where no host's own is known: what an operation
takes to issue, nothing behind the first of a CUDA graph."""

SCRIPT = "/script"
"""After a processor's name: durations of what a script's own work takes on it, operator by operator."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gemm:
    """Matrix product.

    Attributes:
        transpose_a: the left operand is read transposed from row-major memory.
        transpose_b: the right one is.
        block: elements along the summed dimension that share a scale; 0: a scale a tensor or a row, or none.
        tf32: operands of fp32 may be rounded to TF32.
    """

    transpose_a: bool = False
    transpose_b: bool = False
    block: int = 0
    tf32: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Attention:
    """Fused scaled-dot-product attention; sequence lengths are in the tensors' shapes.

    `deterministic`: the backward pass adds in one order, so that the same inputs give the same bits.
    """

    heads: int
    kv_heads: int
    head_dim: int
    causal: bool = False
    dropout: float = 0.0
    deterministic: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Convolution:
    """N-dimensional convolution; one entry per spatial dimension.

    `ieee`: operands of fp32 may not be rounded to TF32, as PyTorch lets cuDNN do unless it is told not to.
    """

    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int = 1
    transposed: bool = False
    ieee: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class MultiTensor:
    """One tensor's share of a kernel launch that handles many (fused optimizers, foreach operations).

    Attributes:
        parts: how many operations share the launch.
        leads: whether this one bears the launch; one of them does. No more is said of the order, so that the
            shares of equal layers are equal.
    """

    parts: int
    leads: bool = False


Attributes = Gemm | Attention | Convolution | MultiTensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Tensor:
    """A tensor of the graph.

    Attributes:
        id: position in the graph's tensor table.
        name: where it comes from, for people (a parameter's name, or the operation that made it).
        shape: extents; empty for a scalar.
        dtype: element type.
        role: what it is to the step.
        alias_of: tensor whose memory it shares (a view, or the next version after an in-place update).
        port: a formal parameter of its block, bound per instance to a tensor elsewhere.
        sharded: mesh axes whose ranks hold different parts of it; the shape is that of one part. Said of what
            lives through the step (parameters, gradients, optimizer state), which other axes have copies of.
    """

    id: int
    name: str
    shape: tuple[int, ...]
    dtype: DType
    role: TensorRole
    alias_of: int | None = None
    port: bool = False
    sharded: tuple[str, ...] = ()

    @property
    def numel(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes that its elements span; it owns them only if `alias_of` is None."""
        return self.dtype.nbytes(self.numel)


@dataclass(frozen=True, slots=True, kw_only=True)
class _OpBase:
    """What every operation has.

    Attributes:
        id: position in the graph's operation table.
        name: for `Compute`, `Copy` and `Host` the operator ("aten.mm"); for communications a label.
        phase: part of the step.
        module: dotted path of the module that ran it; inside a block `{}` stands for the instance's label.
        inputs: tensors read.
        outputs: tensors made; each tensor is made by one operation at most.
        stream: index into the graph's streams; work on one stream runs in program order.
        deps: further operations of the same block that must end before this one starts.
        durations: what is known of its time, by device.
    """

    id: int
    name: str
    phase: Phase
    module: str = ""
    inputs: tuple[int, ...] = ()
    outputs: tuple[int, ...] = ()
    stream: int = 0
    deps: tuple[int, ...] = ()
    durations: tuple[Duration, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Compute(_OpBase):
    """A device kernel, or a view when it moves no byte and does no arithmetic.

    Attributes:
        forward_op: the forward operation that it differentiates or computes again. An operation of another
            block instance is named through the instance's `op_bindings`: -2 - position.
        flops: floating-point operations, a multiply-add counted as two.
        bytes_read: bytes read from device memory, each input once.
        bytes_written: bytes written to device memory.
        attributes: what a cost needs beyond shapes.
        arguments: what the operator was given beside its tensors and shapes, as a JSON object by the names of its
            schema, defaults left out; "" where there is nothing to say. A cost does not depend on it, and a job,
            whose passes split tensors, does not hold it.
    """

    forward_op: int | None = None
    flops: int = 0
    bytes_read: int = 0
    bytes_written: int = 0
    attributes: Attributes | None = None
    arguments: str = ""

    @property
    def is_view(self) -> bool:
        """Whether it only renames memory, and so costs the device nothing."""
        return self.flops == 0 and self.bytes_read == 0 and self.bytes_written == 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Collective(_OpBase):
    """A collective communication of a process group.

    Attributes:
        collective: which one.
        group: index into the graph's groups.
        bytes_per_rank: the whole per-rank buffer, as nccl-tests counts it: for an all-gather the gathered
            output, for a reduce-scatter the full input.
        dtype: element type.
        payload: what it carries.
        asynchronous: whether the issuing stream goes on without waiting for it.
    """

    collective: CollectiveKind
    group: int
    bytes_per_rank: int
    dtype: DType
    payload: Payload = Payload.OTHER
    asynchronous: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Send(_OpBase):
    """A point-to-point send within a group.

    Attributes:
        group: index into the graph's groups.
        peer: position in the group of the receiver, relative to this rank (+1: the next stage).
        tag: pairs it with its receive; the n-th send of a tag meets the n-th receive.
        nbytes: bytes sent.
        payload: what it carries.
    """

    group: int
    peer: int
    tag: int
    nbytes: int
    payload: Payload = Payload.ACTIVATION


@dataclass(frozen=True, slots=True, kw_only=True)
class Recv(_OpBase):
    """A point-to-point receive; the fields are those of `Send`, `peer` names the sender."""

    group: int
    peer: int
    tag: int
    nbytes: int
    payload: Payload = Payload.ACTIVATION


@dataclass(frozen=True, slots=True, kw_only=True)
class Copy(_OpBase):
    """A copy between memories.

    Attributes:
        direction: between which memories.
        nbytes: bytes moved.
    """

    direction: CopyDirection
    nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Host(_OpBase):
    """Work of the host alone: data loading, Python, a synchronisation."""


Op = Compute | Collective | Send | Recv | Copy | Host
