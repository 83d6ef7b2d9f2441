// Trap 2: accesses without a state space; the address may be global or shared.
#include <cuda_fp16.h>

extern "C" __global__ void generic_select(int* out, int* in, int use_shared, int n) {
    __shared__ int scratch[128];
    int i = threadIdx.x;
    scratch[i] = i;
    int* p = use_shared ? scratch : in;
    __syncthreads();
    p[i] += 5;
    __syncthreads();
    if (i < n) out[i] = scratch[i] + p[i];
}

extern "C" __global__ void generic_atomic(int* a, int* b, int pick, int n) {
    __shared__ int local_count;
    if (threadIdx.x == 0) local_count = 0;
    __syncthreads();
    int* p = pick ? a : &local_count;
    if (threadIdx.x < n) atomicAdd(p, 2);
    __syncthreads();
    if (threadIdx.x == 0) b[blockIdx.x] = local_count;
}

extern "C" __global__ void half_atomic(__half* acc, const __half* in, int n) {
    int i = threadIdx.x;
    if (i < n) atomicAdd(acc + (i & 3), in[i]);
}

// An address space test at run time.
extern "C" __global__ void is_shared_test(int* out, const int* in) {
    __shared__ int s[32];
    s[threadIdx.x] = in[threadIdx.x];
    const int* p = (threadIdx.x & 1) ? s : in;
    out[threadIdx.x] = __isShared(p) ? 1 : 2;
}

extern "C" __global__ void select_of_two(float* out, const float* a, const float* b, const int* flags, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    const float* p = flags[i] ? a : b;
    out[i] = p[i];
}
