// Instructions of sm_90: clusters, distributed shared memory, stmatrix, asynchronous stores.
#include <cooperative_groups.h>
#include <cuda_fp16.h>
namespace cg = cooperative_groups;

extern "C" __global__ void __cluster_dims__(2) cluster_exchange(float* out, const float* in) {
    __shared__ float mine[64];
    auto cluster = cg::this_cluster();
    mine[threadIdx.x] = in[blockIdx.x * 64 + threadIdx.x];
    cluster.sync();
    const float* other = cluster.map_shared_rank(mine, cluster.block_rank() ^ 1);
    out[blockIdx.x * 64 + threadIdx.x] = other[threadIdx.x];
    cluster.sync();
}

extern "C" __global__ void stmatrix_store(__half* out, const unsigned* in) {
    __shared__ alignas(16) __half tile[64];
    unsigned address = (unsigned)__cvta_generic_to_shared(tile + (threadIdx.x & 7) * 8);
    asm volatile("stmatrix.sync.aligned.m8n8.x1.shared.b16 [%0], {%1};" ::"r"(address), "r"(in[threadIdx.x]) : "memory");
    __syncwarp();
    out[threadIdx.x] = tile[threadIdx.x];
    out[threadIdx.x + 32] = tile[threadIdx.x + 32];
}

extern "C" __global__ void programmatic_launch(float* out, const float* in) {
    asm volatile("griddepcontrol.wait;" ::: "memory");
    out[threadIdx.x] = in[threadIdx.x];
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}
