"""How many layers each chunk of a pipeline gets, from the words that Megatron-LM has for it.

The rules are those of megatron-core's `get_num_layers_to_build`: either the embedding or the loss counts as a
layer of the stage that has it (`--account-for-embedding-in-pipeline-split`,
`--account-for-loss-in-pipeline-split`), or the first or last stage has a number of its own
(`--decoder-first-pipeline-num-layers`, `--decoder-last-pipeline-num-layers`). All other stages get equal numbers,
and the chunks of a stage too.
"""

from __future__ import annotations

from echograph.errors import PlanError


def split_layers(
    layers: int,
    stages: int,
    chunks: int = 1,
    *,
    embedding: bool = False,
    loss: bool = False,
    first: int | None = None,
    last: int | None = None,
) -> tuple[int, ...]:
    """Layers of each chunk in the order of the model, for `Pipeline.layers`.

    Args:
        layers: layers of the model.
        stages: pipeline stages.
        chunks: chunks of each stage; chunk k of the model is on stage k modulo `stages`.
        embedding: count the embedding as a layer of the first stage.
        loss: count the loss as a layer of the last stage.
        first: layers of the first stage.
        last: layers of the last stage.

    Raises:
        PlanError: the numbers do not divide evenly; names the nearest that do.
    """
    if stages < 1 or chunks < 1:
        raise PlanError(f"{stages} pipeline stages of {chunks} chunks: give 1 or more of both")
    ends = [n for n in (first, last) if n is not None]
    if ends and (embedding or loss):
        raise PlanError(
            "layers of the first or last stage are given: then embedding and loss cannot count as layers"
        )
    if ends:
        of_stages = _with_ends(layers, stages, first, last)
    else:
        counted = layers + embedding + loss
        if counted % stages:
            fitting = [n for n in range(1, counted + 1) if counted % n == 0]
            near = _nearest(fitting, stages)
            words = f" ({counted} with embedding or loss)" if embedding or loss else ""
            raise PlanError(f"{layers} layers{words} do not divide among {stages} stages: use {near} stages")
        of_stages = [counted // stages] * stages
    if odd := [n for n in of_stages if n % chunks]:
        near = _nearest([n for n in range(1, odd[0] + 1) if odd[0] % n == 0], chunks)
        raise PlanError(f"{odd[0]} layers of a stage do not divide into {chunks} chunks: use {near} chunks")
    found = [n // chunks for _ in range(chunks) for n in of_stages]
    found[0] -= embedding
    found[-1] -= loss
    return tuple(found)


def _with_ends(layers: int, stages: int, first: int | None, last: int | None) -> list[int]:
    """Layers of each stage where the first or last has a number of its own."""
    given = [n for n in (first, last) if n is not None]
    between, left = stages - len(given), layers - sum(given)
    if between < 0 or min(given) < 0 or left < 0 or (left if not between else left % between):
        unit = max(1, between)
        fits = [n for n in range(layers + 1) if n % unit == 0] if between else [0]
        near = _nearest([layers - n for n in fits], sum(given))
        raise PlanError(
            f"{' and '.join(map(str, given))} layers of the first or last of {stages} stages leave {left} of "
            f"{layers} for the {max(0, between)} others: give them {near} in all"
        )
    middle = [left // between] * between if between else []
    return [*([] if first is None else [first]), *middle, *([] if last is None else [last])]


def _nearest(fitting: list[int], value: int) -> str:
    return " or ".join(map(str, sorted(sorted(fitting, key=lambda n: (abs(n - value), n))[:2])))
