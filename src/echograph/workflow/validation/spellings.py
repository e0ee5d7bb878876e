"""What cells of tables of measured steps say, in their publishers' spellings; None where it is not known."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

StepType = Literal["bf16", "fp16", "fp32"]

_TYPES: dict[str, StepType] = {
    "fp32": "fp32", "float32": "fp32", "32": "fp32", "fp16": "fp16", "float16": "fp16", "half": "fp16",
    "16": "fp16", "bf16": "bf16", "bfloat16": "bf16",
}  # fmt: skip
_TYPE_NOISE = re.compile(r"torch\.|amp|mixed|true|precision|training|transformer ?engine|\bte\b|[\s_.-]+")
_NARROW = re.compile(r"(?P<maker>mx|nv)?(?:fp|float)(?P<bits>[48])(?P<scales>.*)")
_SCALES = (
    (r"mx", "mxfp8"),
    (r"sc|.*(block|tile|subchannel|1x128).*", "fp8-blockwise"),
    (r".*(row|axis|channel).*", "fp8-rowwise"),
    (r"|hybrid|cs|ds|.*(tensor|scaling|current|delayed|e4m3|e5m2).*", "fp8"),
)
"""Which part of a tensor has a scale of its own, of FP8."""

_NO = ("none", "no", "false", "off", "0", "n", "without", "disabled", "-")
_YES = ("full", "yes", "true", "on", "1", "y", "all", "enabled", "uniform")
_RECOMPUTE_NOISE = re.compile(
    r"\b(activation|gradient|checkpoint(ing)?|recompute|recomputation|ac|granularity)\b|[\W_]+"
)

_FSDP = re.compile(r"(?P<hybrid>hsdp|hybrid[ _-]?fsdp)?(?(hybrid)|fsdp)(?P<version>[0-3])?(?P<more>[^0-9].*)?")
_ZERO = re.compile(r"(?:zero|deepspeed)?[\s_-]*(?:stage)?[\s_-]*(?P<stage>[0-3])(?P<more>[^0-9].*)?")
_GROUPS = re.compile(r"\((?P<gpus>[0-9]+)-gpu groups\)|^=\s*(?P<size>[1-9][0-9]*)$")

_NETWORK = re.compile(
    r"(?:(?P<many>[0-9]+) ?[x*] ?)?(?:(?P<ib>[EHNX]DR)(?P<class>[0-9]+)\b"
    r"|(?P<rate>[0-9]+(?:\.[0-9]+)?) ?(?P<unit>[GT])b(?:ps|/s|it/s)?\b)(?P<after>[^;,()]*)"
)

_NODE = re.compile(r"\b(?P<gpus>[1-9][0-9]?) ?(?:x ?)?(?:gpus? ?)?(?:per|a|/) ?node\b", re.IGNORECASE)


def precision(text: str) -> tuple[StepType, str] | None:
    """Type of a step, and precision of its matrix products, "" where that is the type's.

    Args:
        text: as "bf16-mixed", "FP8-CS (FP8-MX)", "FP8 (1x128 tiles)"; what stands in parentheses counts where the
            rest does not say which scales FP8 has.
    """
    bare, *inside = (_TYPE_NOISE.sub("", part) for part in re.split(r"[()]", text.lower()))
    if bare in _TYPES:
        return _TYPES[bare], ""
    if bare == "tf32":
        return "fp32", "tf32"
    said = _NARROW.fullmatch(bare)
    if said is None:
        return None
    if said["bits"] == "4":
        return None if said["maker"] == "mx" else ("bf16", "nvfp4")
    scales = said["maker"] or said["scales"] or "".join(inside[:1]).removeprefix("fp8")
    return next((("bf16", kind) for words, kind in _SCALES if re.fullmatch(words, scales)), None)


def recompute(text: str, selective: str = "selective") -> str | None:
    """What is computed again, as plans call it.

    Args:
        text: as "No AC", "True", "selective(op)", "every 2 layers"; "": nothing.
        selective: what a bare "selective" is.
    """
    said = _RECOMPUTE_NOISE.sub(" ", text.lower()).strip()
    if not text or said in _NO:
        return "none"
    if said in ("selective op", "op", "per op", "sac op"):
        return "selective-op"
    if said in ("selective", "sac"):
        return selective
    if said in ("selective attn", "selective attention", "core attn", "core attention"):
        return "selective"
    if every := re.fullmatch(r"(?:selective|sac|every) ([1-9][0-9]*)(?:nd|rd|th)?(?: layers?)?", said):
        return "full" if every[1] == "1" else every[1]
    if said == "full uniform 1":  # Megatron-LM's words: one layer after the other
        return "full"
    # What only names recomputation has it.
    return "full" if not said or said in _YES else None


def flag(text: str) -> bool | None:
    """Yes or no."""
    said = text.strip().lower()
    return True if said in _YES else False if said in _NO else None


@dataclass(frozen=True, slots=True, kw_only=True)
class SaidSharding:
    """What data-parallel ranks divide among themselves.

    Attributes:
        stage: of ZeRO.
        copies: whether the sharded model has copies (HSDP).
        group: ranks that divide it; 0: it is not said.
        reshards: whether gathered parameters are dropped after forward.
        unread: what else stands there.
    """

    stage: int
    copies: bool = False
    group: int = 0
    reshards: bool = True
    unread: str = ""


def sharding(text: str) -> SaidSharding | None:
    """What a cell says of ZeRO, FSDP or a distributed optimizer.

    A number behind "fsdp" is a stage or the version of PyTorch's interface, which both shard all; a stage less is
    said by FSDP's own word, SHARD_GRAD_OP.

    Args:
        text: as "1", "zero1=8", "ZeRO-3", "1 (8-GPU groups)", "fsdp2(SHARD_GRAD_OP)", "HSDP", "DDP"; "": nothing.
    """
    said = text.strip().lower()
    if re.search(r"offload|infinity|nvme|\+\+", said):
        return None
    if not said or said in (*_NO, "ddp", "dp"):
        return SaidSharding(stage=0)
    if re.fullmatch(r"dist(ributed)?[ _-]?opt(imi[sz]er)?", said):
        return SaidSharding(stage=1)
    if re.fullmatch(r"((full|hybrid|no)[ _-]?shard|shard_grad_op)", said):
        said = "fsdp " + re.sub("[ -]", "_", said)
    if found := _FSDP.fullmatch(said):
        more = found["more"] or ""
        copies = bool(found["hybrid"]) or "hybrid" in more
        return SaidSharding(
            stage=0 if "no_shard" in more or found["version"] == "0" else 3,
            copies=copies,
            group=_group(more),
            reshards="shard_grad_op" not in more,
        )
    if found := _ZERO.fullmatch(said):
        more = (found["more"] or "").strip()
        group = _group(more)
        return SaidSharding(stage=int(found["stage"]), group=group, unread="" if group or more == "=-1" else more)
    return None


def _group(more: str) -> int:
    said = _GROUPS.search(more)
    return int(said["gpus"] or said["size"]) if said else 0


def node_gpus(text: str) -> int | None:
    """GPUs of a node, of free words as "4 per node" or "8 GPUs/node"; None where nothing is said."""
    said = _NODE.search(text)
    return int(said["gpus"]) if said else None


def node_network(text: str, nic_Gbps: float, gpus: int) -> float | None:
    """What a node sends and receives over the network, in Gb/s; None where nothing is said that is clear.

    A figure alone may be a port's or the node's: what no port of the machine reaches is the node's.

    Args:
        text: free words, as "4 * 100Gb RoCE", "400Gb/s RoCE per GPU", "3.2Tb/s node"; GB are bytes, and not read.
        nic_Gbps: what a port of this kind of machine has.
        gpus: those of a node.
    """
    for said in _NETWORK.finditer(text):
        rate = float(said["class"] or said["rate"]) * (1000 if said["unit"] == "T" else 1)
        after = said["after"]
        if re.search(r"nvlink|hbm|memory", after, re.I):
            continue
        if said["many"]:
            return rate * int(said["many"])
        if re.search(r"(per|each|/) ?gpu", after, re.I):
            return rate * gpus
        if re.search(r"node|machine", after, re.I) or rate > nic_Gbps:
            return rate
    return None
