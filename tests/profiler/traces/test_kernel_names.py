"""A kernel that communicates is known by the name of its function, whatever is written around it."""

from __future__ import annotations

from pathlib import Path

import pytest
from small_traces import job, launched, operator, work

from echograph.profiler.analyses import ANALYSES
from echograph.profiler.analyses.work import KernelKind, kind_of_name
from echograph.profiler.traces.kernel_names import COMMUNICATION, function_name

COMMUNICATES = """
all-reduce-start.12
ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevComm*, unsigned long, ncclWork*)
ncclKernel_AllGather_RING_LL_Sum_int8_t(ncclWorkElem)
ncclSymkDevKernel_AllReduce_AGxLL_R_sum_bf16
mscclKernel_Sum_half_LL(ncclDevComm*)
mscclpp::allreduceNvls<float>(mscclpp::Handle)
void sglang::allreduce_LL_1node<__half>(mscclpp::MemoryChannel*)
void vllm::cross_device_reduce_1stage<__nv_bfloat16, 8>(vllm::RankData*, vllm::RankSignals, int)
void cross_device_reduce_2stage<__half, 4>(RankData*)
_ZN5aiter33reduce_scatter_cross_device_storeIDF16bLi8EEEvPNS_8RankDataENS_11RankSignalsEjiii
quickreduce::allreduce_prototype_twoshot<AllReduceTwoshot<__half, CodecQ4<__half, 8>, true>, __half>
void (anonymous namespace)::multimem_all_reduce_kernel<c10::BFloat16, 16>(c10::BFloat16*, unsigned long)
void <unnamed>::multimem_all_reduce_kernel<c10::BFloat16, (int)16>(T1 *, unsigned long)
void c10d::symmetric_memory::(anonymous namespace)::multimem_one_shot_all_reduce_kernel<float, 8>(float*)
void (anonymous namespace)::one_shot_all_reduce_kernel<c10::BFloat16, 16, 8, false>(c10::BFloat16**)
_ZN12_GLOBAL__N_134two_shot_all_reduce_kernel_inplaceIN3c108BFloat16ELi16ELi8EEEvPPT_
void c10d::intra_node_comm::hybridCubeMeshAllReduceKernel<4u, true>(c10::BFloat16*)
void tensorrt_llm::kernels::twoShotAllReduceKernel<__nv_bfloat16, 8, true, false>(tensorrt_llm::kernels::Params)
void tensorrt_llm::kernels::reduce_fusion::lamport_style_one_shot_all_reduce_norm_kernel<__half, 8>(Params)
void flashinfer::trtllm_allreduce_fusion::allreduce_fusion_kernel_oneshot_lamport<(Pattern)1, __nv_bfloat16, 8>(P)
void tensorrt_llm::kernels::ar_fusion::moe::moereduce_allreduce_fusion_kernel_oneshot_lamport<8>(Params)
void flashinfer::trtllm_mnnvl_allreduce::oneshotAllreduceFusionKernel<8, __nv_bfloat16>(__nv_bfloat16*)
void tensorrt_llm::kernels::mnnvl_throughput::moeA2ADispatchKernel<BlockPolicy, 8>(Pointers)
userbuffers_fp16_sum_inplace_gpu_rr_ag(int, int)
void kuserbuffers_pushrecv<8>(int*)
nvshmemi_proxy_barrier(int)
void nvshmem_all_to_all<float>(float*)
void deep_ep::internode_ll::dispatch<true, false, 7168>(void*, float*)
void deep_ep::intranode::combine<__nv_bfloat16, 8, 768, 4096>(__nv_bfloat16*)
mori::moe::EpDispatchIntraNodeKernel<hip_bfloat16>(mori::moe::EpDispatchCombineArgs)
hcom_allReduce_
rcclKernel
""".strip().splitlines()

COMPUTES = """
void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, ncclAllReduce<float>, unsigned int> >(ReduceOp)
void my::gemm<my::allreduce_fusion_kernel_oneshot_lamport<8> >(int)
void cutlass::Kernel2<nccl::Tile>(cutlass::Params)
void tensorrt_llm::kernels::rmsNorm<float>(tensorrt_llm::kernels::AllReduceParams, ncclDevComm*)
void deep_ep::layout::get_dispatch_layout<256, 4, 8>(long const*, int*)
cross_device_reduction_free_gemm
allreduce_free_gemm
_ZN2at6native13reduce_kernelILi512ELi1EN4nccl9AllReduceIfEEEEvT1_
triton_red_fused_native_layer_norm_all_reduce_0
dmatmul_kernel
BatchNormSync
void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<float> >(int)
""".strip().splitlines()


@pytest.mark.parametrize("name", COMMUNICATES)
def test_communication_is_known_by_its_function(name: str) -> None:
    assert kind_of_name(name) is KernelKind.COMMUNICATION


@pytest.mark.parametrize("name", COMPUTES)
def test_what_only_names_communication_computes(name: str) -> None:
    assert kind_of_name(name) is KernelKind.COMPUTATION


def test_every_line_of_the_table_is_met() -> None:
    import re

    names = [function_name(name) for name in COMMUNICATES]
    unmet = [pattern for pattern, _ in COMMUNICATION if not any(re.match(pattern, name) for name in names)]
    # What is left of the table are further spellings of the same libraries.
    assert unmet == [r"(\w+::)*(moeAllToAllKernel|fusedMoeCommKernel)$"]
    assert all(library for _, library in COMMUNICATION)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("Memcpy HtoD (Pinned -> Device)", KernelKind.MEMORY),
        ("hipMemcpyAsync", KernelKind.MEMORY),
        ("dma_0", KernelKind.MEMORY),
        ("event_wait", KernelKind.OTHER),
        ("Stream Wait Event", KernelKind.OTHER),
        ("Context Sync", KernelKind.OTHER),
    ],
)
def test_what_is_no_kernel_keeps_its_kind(name: str, kind: KernelKind) -> None:
    assert kind_of_name(name) is kind


def test_custom_all_reduces_overlap_and_are_not_joined_by_their_order(tmp_path: Path) -> None:
    reduces = "void vllm::cross_device_reduce_1stage<__half, 2>(vllm::RankData*)"
    events = [
        *launched("gemm", 1, 10, 100, 1),
        *launched(reduces, 3, 60, 100, 2, stream=20),
    ]
    traces = job(tmp_path, events, events)
    rows = ANALYSES["overlap"](traces).records()
    assert [(r["communication_time(us)"], r["overlapped_time(us)"]) for r in rows] == [(100, 50)] * 2
    # Which ranks they are of nothing says: groups of some ranks look the same.
    assert not ANALYSES["collectives"](traces).records()
    path = ANALYSES["cross-rank-critical-path"](traces).records()
    assert (path[-1]["name"], path[-1]["bound_by"]) == ("all_reduce", "communication")


def test_waits_of_mtia_are_no_work(tmp_path: Path) -> None:
    def of_mtia(name: str, ts: float, dur: float) -> dict[str, object]:
        return work(name, ts, dur, cat="mtia_ccp_events")

    traces = job(tmp_path, [operator("aten::mm", 0, 5), of_mtia("matmul", 10, 10), of_mtia("event_wait", 20, 80)])
    (row,) = ANALYSES["temporal-breakdown"](traces).records()
    assert (row["compute_time(us)"], row["kernel_time(us)"]) == (10, 10)
    assert [r["name"] for r in ANALYSES["kernels"](traces).records()] == ["matmul"]
    assert sum(r["idle_time"] for r in ANALYSES["idle"](traces).records()) == 0
