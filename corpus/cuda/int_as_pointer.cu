// Trap 14: addresses carried by integers, aligned by masks, tagged in the low bits, put together from halves.
typedef unsigned long long u64;

extern "C" __global__ void int_as_pointer(u64 address, int value) {
    int* p = (int*)(address & ~7ull);
    p[threadIdx.x] = value;
}

extern "C" __global__ void aligned_up(u64 address, float* out) {
    const float* p = (const float*)((address + 127) & ~127ull);
    out[threadIdx.x] = p[threadIdx.x];
}

extern "C" __global__ void tagged_pointer(u64 tagged, float* out) {
    float* p = (float*)(tagged & ~1ull);
    if (tagged & 1) p[threadIdx.x] = 1.0f;
    else out[threadIdx.x] = 2.0f;
}

extern "C" __global__ void two_halves(unsigned low, unsigned high, int* out) {
    const int* p = (const int*)(((u64)high << 32) | low);
    out[threadIdx.x] = p[threadIdx.x];
}

// A pointer to one type, used as another.
extern "C" __global__ void reinterpret(float* out, const void* bytes, int n) {
    const int* p = (const int*)bytes;
    if (threadIdx.x < n) out[threadIdx.x] = __int_as_float(p[threadIdx.x] ^ 0x80000000);
}

// Pointers combined bitwise: which buffer is meant cannot be known from the code.
extern "C" __global__ void xor_pointers(u64 a, u64 b, int* out) {
    const int* p = (const int*)(a ^ b);
    out[threadIdx.x] = p[threadIdx.x];
}
