// Trap 3: cp.async reads global memory through its second operand.
#include <cuda_pipeline.h>

extern "C" __global__ void cp_async_copy(float4* out, const float4* in, int n4) {
    __shared__ float4 buf[128];
    int i = blockIdx.x * 128 + threadIdx.x;
    if (i < n4) __pipeline_memcpy_async(&buf[threadIdx.x], &in[i], 16);
    __pipeline_commit();
    __pipeline_wait_prior(0);
    __syncthreads();
    if (i < n4) out[i] = buf[threadIdx.x];
}

// Rows beyond n are filled with zeros: source size 0, so nothing is read.
extern "C" __global__ void cp_async_zfill(float* out, const float* in, int n) {
    __shared__ float buf[128];
    int i = blockIdx.x * 128 + threadIdx.x;
    __pipeline_memcpy_async(&buf[threadIdx.x], &in[i < n ? i : 0], 4, i < n ? 0 : 4);
    __pipeline_commit();
    __pipeline_wait_prior(0);
    __syncthreads();
    out[i] = buf[threadIdx.x];
}

// Two stages in flight, one loop.
extern "C" __global__ void cp_async_pipeline(float* out, const float* in, int tiles) {
    __shared__ float buf[2][64];
    int t = threadIdx.x;
    float sum = 0.0f;
    __pipeline_memcpy_async(&buf[0][t], &in[t], 4);
    __pipeline_commit();
    for (int k = 0; k < tiles; k++) {
        if (k + 1 < tiles) __pipeline_memcpy_async(&buf[(k + 1) & 1][t], &in[(k + 1) * 64 + t], 4);
        __pipeline_commit();
        __pipeline_wait_prior(1);
        __syncthreads();
        sum += buf[k & 1][63 - t];
        __syncthreads();
    }
    out[t] = sum;
}
