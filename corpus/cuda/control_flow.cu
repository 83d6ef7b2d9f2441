// Control flow: switches (brx.idx), early exits, nested divergence, local arrays, inline assembly labels.
extern "C" __global__ void switch_dense(int* out, const int* op, const int* a, const int* b, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    int x = a[i], y = b[i], r;
    switch (op[i]) {
        case 0: r = x + y; break;
        case 1: r = x - y * 3; break;
        case 2: r = x * y + 1; break;
        case 3: r = x & y; break;
        case 4: r = (x | y) + out[i]; break;
        case 5: r = x ^ y; break;
        case 6: r = x << (y & 7); break;
        case 7: r = x >> (y & 7); break;
        default: r = -1;
    }
    out[i] = r;
}

extern "C" __global__ void collatz(int* steps, const int* start, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    int count = 0;
    for (unsigned v = start[i]; v > 1; count++) v = v & 1 ? 3 * v + 1 : v / 2;
    steps[i] = count;
}

extern "C" __global__ void early_exit_search(int* found, const int* keys, const int* sorted, int n, int m) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    int lo = 0, hi = m;
    while (lo < hi) {
        int mid = (lo + hi) >> 1, v = sorted[mid];
        if (v == keys[i]) { found[i] = mid; return; }
        if (v < keys[i]) lo = mid + 1; else hi = mid;
    }
    found[i] = -1;
}

extern "C" __global__ void nested_break(int* out, const int* grid, int w) {
    int t = threadIdx.x, hits = 0;
    for (int y = 0; y < w; y++) {
        for (int x = 0; x < w; x++) {
            if (grid[y * w + x] == t) break;
            if ((x ^ y) == t) continue;
            hits += x;
        }
        if (hits > 100 + t) break;
    }
    out[t] = hits;
}

// An array too large and too irregular for registers lives in local memory.
extern "C" __global__ void local_array(int* out, const int* idx, int n) {
    int bucket[16];
    for (int k = 0; k < 16; k++) bucket[k] = k * threadIdx.x;
    for (int k = 0; k < n; k++) bucket[idx[k] & 15] += k;
    int sum = 0;
    for (int k = 0; k < 16; k++) sum = sum * 3 + bucket[k];
    out[threadIdx.x] = sum;
}

// Only one side of the branch writes.
extern "C" __global__ void write_on_one_side(int* a, int* b, int flag) {
    if (flag > 3) a[threadIdx.x] = 1;
    else if (b[threadIdx.x] == 2) __trap();
}

extern "C" __global__ void dynamic_shared(float* out, const float* in, int n) {
    extern __shared__ float s[];
    for (int i = threadIdx.x; i < n; i += blockDim.x) s[i] = in[i];
    __syncthreads();
    for (int i = threadIdx.x; i < n; i += blockDim.x) out[i] = s[n - 1 - i];
}

extern "C" __global__ void dropout_philox(float* out, const float* in, unsigned seed, float p, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    unsigned a = i, b = seed, k = 0x9E3779B9u;
    for (int r = 0; r < 7; r++) {
        unsigned hi = __umulhi(0xD2511F53u, a), lo = 0xD2511F53u * a;
        a = hi ^ b ^ k;
        b = lo;
        k += 0xBB67AE85u;
    }
    float u = (a >> 8) * 5.9604645e-8f;
    out[i] = u < p ? 0.0f : in[i] / (1.0f - p);
}

extern "C" __global__ void math_functions(float* out, const float* in, int n) {
    int i = threadIdx.x;
    if (i >= n) return;
    float x = in[i];
    out[8 * i + 0] = sqrtf(x) + rsqrtf(x);
    out[8 * i + 1] = expf(x) + exp2f(x);
    out[8 * i + 2] = logf(x) - __log2f(x);
    out[8 * i + 3] = __sinf(x) * __cosf(x);
    out[8 * i + 4] = floorf(x) + ceilf(x * 1.5f) + truncf(x * 2.5f) + rintf(x * 3.5f);
    out[8 * i + 5] = fdividef(x, 3.0f) + __frcp_rz(x) + __fadd_ru(x, 1e-8f);
    out[8 * i + 6] = copysignf(fabsf(x - 2.0f), x - 1.0f) + fmaf(x, x, -x);
    out[8 * i + 7] = (float)(long long)(x * 1000.0f) + (float)__double2int_rd((double)x * 7.7) + powf(x, 1.5f);
}

extern "C" __global__ void volatile_and_cache_hints(float* a, const float* b, float* c) {
    int i = threadIdx.x;
    float v = __ldg(b + i) + __ldcs(b + i + 32) + __ldcg(b + i + 64);
    *(volatile float*)(a + i) = v;
    __stcs(c + i, v);
    __stwt(c + i + 32, v);
    asm volatile("prefetch.global.L2 [%0];" ::"l"(b + 128 + i));
}
