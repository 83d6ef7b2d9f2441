// Reductions: shuffles, shared memory, barriers, votes and scans.
#include <cuda_bf16.h>

__device__ __forceinline__ float warp_sum(float v) {
    for (int d = 16; d; d >>= 1) v += __shfl_xor_sync(~0u, v, d);
    return v;
}

__device__ __forceinline__ float block_sum(float v) {
    __shared__ float partial[32];
    v = warp_sum(v);
    __syncthreads();
    if ((threadIdx.x & 31) == 0) partial[threadIdx.x >> 5] = v;
    __syncthreads();
    v = threadIdx.x < (blockDim.x >> 5) ? partial[threadIdx.x] : 0.0f;
    if (threadIdx.x < 32) {
        v = warp_sum(v);
        if (threadIdx.x == 0) partial[0] = v;
    }
    __syncthreads();
    return partial[0];
}

extern "C" __global__ void row_sum(float* out, const float* in, int cols) {
    float v = 0.0f;
    for (int c = threadIdx.x; c < cols; c += blockDim.x) v += in[(size_t)blockIdx.x * cols + c];
    v = block_sum(v);
    if (threadIdx.x == 0) out[blockIdx.x] = v;
}

extern "C" __global__ void rmsnorm(float* x, const float* __restrict__ w, float eps, int cols) {
    float v = 0.0f, *row = x + (size_t)blockIdx.x * cols;
    for (int c = threadIdx.x; c < cols; c += blockDim.x) v += row[c] * row[c];
    float inv = rsqrtf(block_sum(v) / cols + eps);
    for (int c = threadIdx.x; c < cols; c += blockDim.x) row[c] = row[c] * inv * w[c];
}

extern "C" __global__ void layernorm(float* out, const float* in, const float* w, const float* b, int cols) {
    const float* row = in + (size_t)blockIdx.x * cols;
    float s = 0.0f, q = 0.0f;
    for (int c = threadIdx.x; c < cols; c += blockDim.x) s += row[c];
    float mean = block_sum(s) / cols;
    for (int c = threadIdx.x; c < cols; c += blockDim.x) q += (row[c] - mean) * (row[c] - mean);
    float inv = rsqrtf(block_sum(q) / cols + 1e-5f);
    for (int c = threadIdx.x; c < cols; c += blockDim.x)
        out[(size_t)blockIdx.x * cols + c] = (row[c] - mean) * inv * w[c] + b[c];
}

// One warp a row; the row lives in registers.
extern "C" __global__ void softmax_warp(float* out, const float* in, int rows, int cols) {
    int row = blockIdx.x * (blockDim.x >> 5) + (threadIdx.x >> 5), lane = threadIdx.x & 31;
    if (row >= rows) return;
    float v[4], top = -INFINITY, sum = 0.0f;
#pragma unroll
    for (int k = 0; k < 4; k++) {
        int c = lane + 32 * k;
        v[k] = c < cols ? in[row * cols + c] : -INFINITY;
        top = fmaxf(top, v[k]);
    }
    for (int d = 16; d; d >>= 1) top = fmaxf(top, __shfl_xor_sync(~0u, top, d));
#pragma unroll
    for (int k = 0; k < 4; k++) sum += v[k] = __expf(v[k] - top);
    sum = warp_sum(sum);
#pragma unroll
    for (int k = 0; k < 4; k++)
        if (lane + 32 * k < cols) out[row * cols + lane + 32 * k] = v[k] / sum;
}

extern "C" __global__ void argmax_rows(int* best, const float* in, int cols) {
    float top = -INFINITY;
    int where = 0;
    for (int c = threadIdx.x; c < cols; c += 32) {
        float v = in[blockIdx.x * cols + c];
        if (v > top) { top = v; where = c; }
    }
    for (int d = 16; d; d >>= 1) {
        float other = __shfl_down_sync(~0u, top, d);
        int place = __shfl_down_sync(~0u, where, d);
        if (other > top || (other == top && place < where)) { top = other; where = place; }
    }
    if (threadIdx.x == 0) best[blockIdx.x] = where;
}

// Inclusive scan of a block of 256: shuffles within a warp, then across warps through shared memory.
extern "C" __global__ void scan_block(int* out, const int* in, int n) {
    __shared__ int sums[8];
    int i = blockIdx.x * 256 + threadIdx.x, lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    int v = i < n ? in[i] : 0;
    for (int d = 1; d < 32; d <<= 1) {
        int below = __shfl_up_sync(~0u, v, d);
        if (lane >= d) v += below;
    }
    if (lane == 31) sums[warp] = v;
    __syncthreads();
    for (int w = 0; w < warp; w++) v += sums[w];
    if (i < n) out[i] = v;
}

extern "C" __global__ void count_positive(unsigned* counts, const float* in, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    unsigned votes = __ballot_sync(~0u, i < n && in[i] > 0.0f);
    if ((threadIdx.x & 31) == 0) counts[i >> 5] = __popc(votes);
}

extern "C" __global__ void redux_max(unsigned* out, const unsigned* in) {
    unsigned v = __reduce_max_sync(~0u, in[blockIdx.x * 32 + threadIdx.x]);
    if (threadIdx.x == 0) out[blockIdx.x] = v;
}

extern "C" __global__ void match_groups(unsigned* out, const int* keys, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) out[i] = __match_any_sync(__activemask(), keys[i]);
}

extern "C" __global__ void bitonic_sort_block(int* data) {
    __shared__ int s[128];
    int t = threadIdx.x;
    s[t] = data[blockIdx.x * 128 + t];
    for (int k = 2; k <= 128; k <<= 1)
        for (int j = k >> 1; j; j >>= 1) {
            __syncthreads();
            int o = t ^ j;
            if (o > t && ((s[t] > s[o]) == ((t & k) == 0))) { int h = s[t]; s[t] = s[o]; s[o] = h; }
        }
    __syncthreads();
    data[blockIdx.x * 128 + t] = s[t];
}

extern "C" __global__ void dot_double(double* out, const double* a, const double* b, int n) {
    double v = 0.0;
    for (int i = threadIdx.x; i < n; i += 32) v += a[i] * b[i];
    for (int d = 16; d; d >>= 1) v += __shfl_xor_sync(~0u, v, d);
    if (threadIdx.x == 0) *out = v;
}

extern "C" __global__ void vote_any_all(int* out, const int* in) {
    int v = in[threadIdx.x];
    int any = __any_sync(~0u, v > 3), all = __all_sync(~0u, v > 3);
    out[threadIdx.x] = any * 2 + all + 4 * __syncthreads_count(v > 3) + 1000 * __syncthreads_or(v == 7);
}
