// Trap 4: pointers stored to shared memory and loaded by another thread.
extern "C" __global__ void pointer_in_shared(float* a, float* b, const int* idx, int n) {
    __shared__ float* where[64];
    int t = threadIdx.x;
    where[t] = (t & 1) ? a + idx[t] : b + idx[t];
    __syncthreads();
    if (t < n) *where[63 - t] = (float)t;
}

extern "C" __global__ void base_in_shared(const float* in, float* out) {
    __shared__ const float* base;
    if (threadIdx.x == 0) base = in + blockIdx.x * 32;
    __syncthreads();
    out[blockIdx.x * 32 + threadIdx.x] = base[threadIdx.x] * 2.0f;
}
