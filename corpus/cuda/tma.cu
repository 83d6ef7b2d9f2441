// Traps 10 and 11: tensor maps passed by value, by pointer, and bulk copies. For sm_90 and later only.
#include <cuda.h>

#define SMEM(p) ((unsigned)__cvta_generic_to_shared(p))

__device__ __forceinline__ void arrive_and_wait(unsigned long long* bar, unsigned bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(SMEM(bar)), "r"(bytes) : "memory");
    asm volatile(
        "{ .reg .pred done; wait_%=: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], 0; @!done bra wait_%=; }" ::"r"(
            SMEM(bar))
        : "memory");
}

__device__ __forceinline__ void start(unsigned long long* bar) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(SMEM(bar)) : "memory");
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void load_2d(void* dst, const void* map, int x, int y, unsigned long long* bar) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::"r"(
                     SMEM(dst)), "l"(map), "r"(x), "r"(y), "r"(SMEM(bar))
                 : "memory");
}

__device__ __forceinline__ void store_2d(const void* map, int x, int y, void* src) {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%1, %2}], [%3];" ::"l"(map), "r"(x),
                 "r"(y), "r"(SMEM(src))
                 : "memory");
    asm volatile("cp.async.bulk.commit_group; cp.async.bulk.wait_group 0;" ::: "memory");
}

extern "C" __global__ void tma_copy(const __grid_constant__ CUtensorMap in, const __grid_constant__ CUtensorMap out) {
    __shared__ alignas(128) float tile[16 * 16];
    __shared__ unsigned long long bar;
    if (threadIdx.x) return;
    start(&bar);
    load_2d(tile, &in, blockIdx.x * 16, blockIdx.y * 16, &bar);
    arrive_and_wait(&bar, sizeof tile);
    store_2d(&out, blockIdx.x * 16, blockIdx.y * 16, tile);
}

extern "C" __global__ void tma_read_only(const __grid_constant__ CUtensorMap in, float* out) {
    __shared__ alignas(128) float tile[16 * 16];
    __shared__ unsigned long long bar;
    if (threadIdx.x == 0) {
        start(&bar);
        load_2d(tile, &in, blockIdx.x * 16, 0, &bar);
        arrive_and_wait(&bar, sizeof tile);
    }
    __syncthreads();
    out[blockIdx.x * 256 + threadIdx.x] = tile[threadIdx.x];
}

// The map itself lies in global memory: the buffer behind it is known only from there.
extern "C" __global__ void tma_map_by_pointer(const CUtensorMap* map, float* out) {
    __shared__ alignas(128) float tile[16 * 16];
    __shared__ unsigned long long bar;
    if (threadIdx.x == 0) {
        start(&bar);
        load_2d(tile, map, 0, 0, &bar);
        arrive_and_wait(&bar, sizeof tile);
    }
    __syncthreads();
    out[threadIdx.x] = tile[threadIdx.x];
}

extern "C" __global__ void tma_reduce_add(const __grid_constant__ CUtensorMap acc, const float* in) {
    __shared__ alignas(128) float tile[16 * 16];
    tile[threadIdx.x] = in[threadIdx.x];
    __syncthreads();
    if (threadIdx.x) return;
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    asm volatile("cp.reduce.async.bulk.tensor.2d.global.shared::cta.add.tile.bulk_group [%0, {%1, %2}], [%3];" ::"l"(&acc),
                 "r"(0), "r"(0), "r"(SMEM(tile))
                 : "memory");
    asm volatile("cp.async.bulk.commit_group; cp.async.bulk.wait_group 0;" ::: "memory");
}

extern "C" __global__ void tma_prefetch_only(const __grid_constant__ CUtensorMap in, float* out) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(&in) : "memory");
    out[threadIdx.x] = 1.0f;
}

// Bulk copies without a map: plain addresses.
extern "C" __global__ void bulk_copy(float* out, const float* in, int n) {
    __shared__ alignas(128) float buf[256];
    __shared__ unsigned long long bar;
    if (threadIdx.x) return;
    start(&bar);
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(SMEM(buf)),
                 "l"(in + blockIdx.x * 256), "r"(1024), "r"(SMEM(&bar))
                 : "memory");
    arrive_and_wait(&bar, 1024);
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(out + blockIdx.x * 256),
                 "r"(SMEM(buf)), "r"(1024)
                 : "memory");
    asm volatile("cp.async.bulk.commit_group; cp.async.bulk.wait_group 0;" ::: "memory");
}

extern "C" __global__ void bulk_reduce(int* acc, const int* in) {
    __shared__ alignas(128) int buf[64];
    buf[threadIdx.x] = in[blockIdx.x * 64 + threadIdx.x];
    __syncthreads();
    if (threadIdx.x) return;
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.s32 [%0], [%1], %2;" ::"l"(acc), "r"(SMEM(buf)),
                 "r"(256)
                 : "memory");
    asm volatile("cp.async.bulk.commit_group; cp.async.bulk.wait_group 0;" ::: "memory");
}
