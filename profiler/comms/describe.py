"""What a call is: its bytes, shapes and channel, from the arguments of the operator."""

from __future__ import annotations

from typing import Any, TypeAlias

from echograph.profiler.comms.bandwidth import message_bytes
from echograph.profiler.comms.call import Kind
from echograph.profiler.comms.context import Site
from echograph.profiler.comms.groups import Group
from echograph.profiler.comms.operations import Operation, OperatorArguments

SHOWN_SHAPES = 8
MAX_KINDS = 1 << 16
Place: TypeAlias = tuple[Site, str, str]
_ASYNCHRONOUS_APIS = {"isend", "irecv", "batch_isend_irecv"}


class Kinds:
    """Finds the kind of a call; a training step makes the same calls again and again, so that most are known."""

    def __init__(self) -> None:
        self._known: dict[tuple[Any, ...], Kind] = {}

    def of(
        self,
        operation: Operation,
        arguments: OperatorArguments,
        group: Group,
        coalesced: bool,
        device: str,
        sparse: bool,
        place: Place,
    ) -> Kind:
        """What a call has in common with others like it.

        Args:
            operation: the operator.
            arguments: of the operator.
            group: its group.
            coalesced: whether it stands in a coalesced block.
            device: type of the device.
            sparse: whether tensors are, whose shapes do not tell their bytes.
            place: call site, phase and module.
        """
        root = operation.root >= 0 and arguments[operation.root] == group.rank
        inputs = operation.inputs(arguments, root)
        outputs = inputs if operation.in_place else operation.outputs(arguments, root)
        first = inputs[0] if inputs else outputs[0] if outputs else None
        # The default of the operators, and so what is not passed on, is asynchronous.
        position = operation.asynchronous
        asynchronous = position >= 0 and (bool(arguments[position]) if len(arguments) > position else True)
        peer = arguments[operation.peer] if operation.peer >= 0 else -1
        tag = arguments[operation.tag] if operation.tag >= 0 else -1
        stream = _stream(first) if device == "cuda" and first is not None else 0
        given = tuple([tensor.shape for tensor in inputs])
        got = given if outputs is inputs else tuple([tensor.shape for tensor in outputs])
        dtype = None if first is None else first.dtype
        signature = (
            operation, group, given, got, dtype, asynchronous, peer, tag, coalesced, device, stream, place,
        )  # fmt: skip
        kind = self._known.get(signature)
        if kind is None or sparse:
            kind = _make(
                operation, group, inputs, outputs, (peer, tag), asynchronous, coalesced, device, stream, place
            )
            if len(self._known) >= MAX_KINDS:
                self._known.clear()
            self._known[signature] = kind
        return kind


def _make(
    operation: Operation,
    group: Group,
    inputs: Any,
    outputs: Any,
    other: tuple[int, int],
    asynchronous: bool,
    coalesced: bool,
    device: str,
    stream: int,
    place: Place,
) -> Kind:
    # What each rank holds alike: the root of a scatter alone has the parts of all.
    tensors = outputs if operation.name == "scatter" else inputs or outputs
    given, got = sum(map(_bytes, inputs)), sum(map(_bytes, outputs))
    site, phase, module = place
    peer, channel = -1, group.name
    if operation.point_to_point:
        peer, channel = _channel(operation, group, *other)
        asynchronous = site.api in _ASYNCHRONOUS_APIS
    return Kind(
        op=operation.name,
        group=group.name,
        channel=channel,
        bytes=message_bytes(operation.name, given, got, len(group.ranks)),
        input_bytes=given,
        output_bytes=got,
        shapes=tuple([tuple(tensor.shape) for tensor in tensors[:SHOWN_SHAPES]]),
        tensors=len(tensors),
        dtype=str(tensors[0].dtype).removeprefix("torch.") if tensors else "",
        asynchronous=asynchronous,
        coalesced=coalesced,
        device=device,
        stream=stream,
        api=site.api,
        site=site.site,
        phase=phase,
        module=module,
        peer=peer,
    )


def _channel(operation: Operation, group: Group, peer: int, tag: int) -> tuple[int, str]:
    """The other rank, and what a message is numbered by: sender, receiver and tag, the same on both sides."""
    me = group.ranks[group.rank]
    if peer < 0:
        return -1, f"{group.name}:?>{me}/{tag}"
    other = group.ranks[peer]
    sender, receiver = (me, other) if operation.name == "send" else (other, me)
    return other, f"{group.name}:{sender}>{receiver}/{tag}"


def _bytes(tensor: Any) -> int:
    if tensor.is_sparse:
        return int(tensor._values().nbytes + tensor._indices().nbytes)
    return int(tensor.nbytes)


def _stream(tensor: Any) -> int:
    import torch

    return int(torch.cuda.current_stream(tensor.device).cuda_stream)
