"""What there is to simulate on, in rows: clusters and devices, what they rest on, and how far fits were off."""

from __future__ import annotations

from typing import Any

from echograph.units import format_bytes


def cluster_rows(name: str | None = None) -> list[dict[str, Any]]:
    """The cluster presets, or one cluster.

    Args:
        name: a preset or a TOML file; None: all presets.

    Raises:
        UnknownNameError: no such preset.
        InputError: the file cannot be read.
    """
    from echograph.simulator.clusters import cluster_names, load_cluster

    return [
        {
            "name": c.name,
            "device": c.device,
            "gpus_per_node": c.gpus_per_node,
            "nvlink_domain_gpus": c.domain_gpus,
            "nvlink_GBps": c.nvlink_bytes_per_s / 1e9,
            "pcie_GBps": c.pcie_bytes_per_s / 1e9,
            "domain_GBps": round(c.node_fabric.bytes_per_s(c.domain_gpus) / 1e9, 2),
            "nvls": c.node_fabric.nvls is not None,
            "nics_per_node": c.network.nics_per_node,
            "nic_GBps": c.network.nic_bytes_per_s / 1e9,
            "max_gpus": c.max_gpus,
            "node_fabric": f"{c.node_fabric.name} ({c.node_fabric.about.origin})",
            "network_fabric": f"{c.network.fabric.name} ({c.network.fabric.about.origin})",
        }
        for c in map(load_cluster, [name] if name else cluster_names())
    ]


def device_rows(name: str | None = None) -> list[dict[str, Any]]:
    """The device profiles, or one.

    Args:
        name: a device or a profile file; None: all that ship.

    Raises:
        UnknownNameError: no such device.
        InputError: the file cannot be read.
    """
    from echograph.profiler.costs import device_names, load_device

    rows = []
    for d in map(load_device, [name] if name else device_names()):
        gemm, sheet = d.gemm.get("bf16"), d.datasheet
        held_out = None if gemm is None else gemm.label.held_out.long
        rows.append(
            {
                "name": d.name,
                "title": sheet.title,
                "bf16_TFLOPs": round(sheet.peak_flops_per_s.get("bf16", 0.0) / 1e12, 1),
                "memory": format_bytes(sheet.memory_bytes),
                "bandwidth_GBps": round(sheet.memory_bandwidth_bytes_per_s / 1e9),
                "matrix_products": (gemm or d.gemm["fp32"]).label.basis,
                "held_out_median_error": None if held_out is None else round(held_out.median_abs, 4),
            }
        )
    return rows
