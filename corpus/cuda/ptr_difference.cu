// Trap 7: scalars, sizes, strides and pointer differences are offsets, never bases.
extern "C" __global__ void ptr_difference(const char* a, const char* b, char* out) {
    long delta = b - a;
    out[delta + threadIdx.x] = 7;
}

// A 64-bit size and stride beside the pointers.
extern "C" __global__ void wide_scalars(float* out, const float* in, unsigned long long n, long long stride) {
    unsigned long long i = blockIdx.x * (unsigned long long)blockDim.x + threadIdx.x;
    if (i < n) out[i] = in[i * stride];
}

// An end pointer that is only compared.
extern "C" __global__ void end_pointer(float* begin, float* end) {
    for (float* p = begin + threadIdx.x; p < end; p += blockDim.x) *p = 3.0f;
}

// Rebasing: an address in one array moved to the same place in another.
extern "C" __global__ void rebase(const float* a, float* b, int n) {
    const float* p = a + threadIdx.x;
    float* q = b + (p - a);
    if (threadIdx.x < n) *q = *p;
}

// A pointer stored as a number.
extern "C" __global__ void address_of(unsigned long long* out, const float* p) {
    out[threadIdx.x] = (unsigned long long)(p + threadIdx.x);
}
