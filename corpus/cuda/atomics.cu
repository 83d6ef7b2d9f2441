// Atomic updates, with and without use of the old value.
extern "C" __global__ void histogram(int* hist, const int* idx, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) atomicAdd(&hist[idx[i]], 1);
}

extern "C" __global__ void histogram_shared(int* hist, const unsigned char* data, int n) {
    __shared__ int bins[64];
    if (threadIdx.x < 64) bins[threadIdx.x] = 0;
    __syncthreads();
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x)
        atomicAdd(&bins[data[i] & 63], 1);
    __syncthreads();
    if (threadIdx.x < 64) atomicAdd(&hist[threadIdx.x], bins[threadIdx.x]);
}

extern "C" __global__ void take_ticket(int* counter, int* slot) { slot[threadIdx.x] = atomicAdd(counter, 1); }

extern "C" __global__ void atomic_max_float(float* top, const float* in, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    int* address = (int*)top;
    int old = *address;
    while (__int_as_float(old) < in[i]) {
        int seen = atomicCAS(address, old, __float_as_int(in[i]));
        if (seen == old) break;
        old = seen;
    }
}

extern "C" __global__ void atomic_kinds(int* v, unsigned* u, unsigned long long* w) {
    int t = threadIdx.x;
    atomicMin(&v[0], t - 5);
    atomicMax(&v[1], t);
    atomicAnd(&v[2], ~(1 << (t & 31)));
    atomicOr(&v[3], 1 << (t & 31));
    atomicXor(&v[4], t);
    atomicExch(&v[5 + t], t * 3);
    atomicInc(&u[0], 9);
    atomicDec(&u[1], 9);
    atomicAdd(&w[0], (unsigned long long)t << 33);
    atomicMax(&w[1], (unsigned long long)t << 33);
}

extern "C" __global__ void float_sums(float* f, double* d, const float* in, int n) {
    int i = threadIdx.x;
    if (i < n) {
        atomicAdd(f, in[i]);
        atomicAdd(d, (double)in[i]);
    }
}

// A sum over blocks: the last block to finish adds the partial sums.
extern "C" __global__ void last_block_sum(float* partial, unsigned* done, float* out, const float* in) {
    __shared__ bool last;
    float v = in[blockIdx.x * 32 + threadIdx.x];
    for (int d = 16; d; d >>= 1) v += __shfl_xor_sync(~0u, v, d);
    if (threadIdx.x == 0) {
        partial[blockIdx.x] = v;
        __threadfence();
        last = atomicInc(done, gridDim.x - 1) == gridDim.x - 1;
    }
    __syncthreads();
    if (last && threadIdx.x == 0) {
        float sum = 0.0f;
        for (int b = 0; b < gridDim.x; b++) sum += *(volatile float*)&partial[b];
        *out = sum;
    }
}

extern "C" __global__ void release_acquire(int* flag, int* data, int* out) {
    if (threadIdx.x == 0) {
        data[blockIdx.x] = 42;
        asm volatile("st.release.gpu.global.u32 [%0], 1;" ::"l"(__cvta_generic_to_global(flag)) : "memory");
    }
    __syncthreads();
    int f;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(f) : "l"(__cvta_generic_to_global(flag)) : "memory");
    out[blockIdx.x * blockDim.x + threadIdx.x] = f ? data[blockIdx.x] : 0;
}
