"""The communication skeleton of a training on shaped links: replayed, on slower links, and on twice the ranks."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from configurations import Links
from jobs import DEVICE
from measure import Ranks, cluster, fit, rows
from namespaces import Bed, why_not

from echograph.ir.passes.annotate import ForgetCommunication
from echograph.simulator.clusters import load_cluster
from echograph.units import to_s
from echograph.workflow.formats import IMPORTS
from echograph.workflow.plan import Plan
from echograph.workflow.predict import predict

WORKER = Path(__file__).with_name("comms_worker.py")
NIC, SLOW, STEPS, PORT = 400e6, 200e6, 8, 29_800
REPLAYED, PREDICTED = 0.05, 0.1


def train(bed: Bed, world: int, folder: Path) -> float:
    """Trains on some ranks; the slowest one's seconds of all steps."""
    folder.mkdir()
    started = []
    for rank in range(world):
        arguments = [str(rank), str(world), bed.address(0), str(PORT), str(folder), str(STEPS)]
        command = bed.command(rank, "env", "GLOO_SOCKET_IFNAME=eth0", sys.executable, str(WORKER), *arguments)
        started.append(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
    said: list[float] = []
    for process in started:
        output, errors = process.communicate(timeout=300)
        assert process.returncode == 0, errors[-2000:]
        said.append(json.loads(output.splitlines()[-1]))
    return max(said)


@pytest.mark.slow
def test_two_traced_ranks_say_what_slower_links_and_four_ranks_take(tmp_path: Path) -> None:
    if reason := why_not():
        pytest.skip(f"no test bed here: {reason}")
    real: dict[str, float] = {}
    with Bed() as bed:
        bed.shape(NIC)
        with Ranks(bed) as ranks:
            made = fit(tmp_path, NIC, rows(ranks, [2, 4]))
        real["two"], real["four"] = train(bed, 2, tmp_path / "two"), train(bed, 4, tmp_path / "four")
        bed.shape(SLOW)
        real["slow"] = train(bed, 2, tmp_path / "slow")
    wheres = {}
    for name, nic in (("bed", NIC), ("slower", SLOW)):
        (tmp_path / name).mkdir()
        cluster(tmp_path / name, Links(nic), made)
        file = tmp_path / name / "bed.toml"
        # A device that there is, of which nothing but the name is asked: all work is in the trace.
        file.write_text(file.read_text().replace(DEVICE, load_cluster().device))
        wheres[name] = str(file)
    job = IMPORTS["comms"](tmp_path / "two").graph
    asked: dict[str, tuple[Any, dict[str, Any]]] = {
        "two": (job, {}),
        "four": (job, {"cluster": wheres["bed"], "gpus": 4}),
        "slow": (ForgetCommunication()(job), {"cluster": wheres["slower"]}),
    }
    errors = {}
    for name, (graph, options) in asked.items():
        predicted = to_s(predict(graph, Plan(**options))[0].step_ps)
        errors[name] = predicted / real[name] - 1
        print(f"{name}: predicted {predicted:.3f} s, real {real[name]:.3f} s, {errors[name]:+.1%}")
    assert abs(errors["two"]) < REPLAYED
    assert abs(errors["four"]) < PREDICTED and abs(errors["slow"]) < PREDICTED
    # Neither is what the traced job took.
    assert min(real["four"], real["slow"]) > 1.15 * real["two"]
