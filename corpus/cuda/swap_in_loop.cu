// Trap 1: registers are assigned again; the two buffers trade places in the loop, so both are read and written.
extern "C" __global__ void swap_in_loop(float* a, float* b, int steps, int n) {
    int i = threadIdx.x;
    float *src = a, *dst = b;
    for (int s = 0; s < steps; s++) {
        if (i < n) dst[i] = 0.5f * src[n - 1 - i];
        __syncthreads();
        float* t = src;
        src = dst;
        dst = t;
    }
}

// Three buffers in rotation: a full cycle is needed before the set of bases is closed.
extern "C" __global__ void rotate_three(float* a, float* b, const float* c, float* out, int steps) {
    const float *p = a, *q = b, *r = c;
    float sum = 0.0f;
    int i = threadIdx.x;
    for (int s = 0; s < steps; s++) {
        sum += p[i];
        const float* t = p;
        p = q;
        q = r;
        r = t;
    }
    out[i] = sum;
}

// The pointer itself is the induction variable.
extern "C" __global__ void pointer_walk(float* out, const float* in, int rows, int pitch) {
    const float* p = in + threadIdx.x;
    float* q = out + threadIdx.x;
    for (int r = 0; r < rows; r++, p += pitch, q += pitch) *q = *p + 1.0f;
}

// The last of the loop's pointers is used after the loop.
extern "C" __global__ void pointer_after_loop(float* a, float* b, const int* stop) {
    float* p = a;
    for (int i = 0; i < 8; i++)
        if (stop[i] > 0) p = b + i;
    *p = 1.0f;
}
