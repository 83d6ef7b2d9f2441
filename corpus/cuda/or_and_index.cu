// Trap 17: `or` and `and` used as arithmetic on indices; shifts, bit fields, funnel shifts, byte permutes.
extern "C" __global__ void or_and_index(float* out, const float* in) {
    int i = (blockIdx.x << 7) | (threadIdx.x & 127);
    out[i] = in[i ^ 1] + in[i & ~3];
}

extern "C" __global__ void swizzle(float* out, const float* in) {
    int row = threadIdx.x >> 3, col = threadIdx.x & 7;
    out[blockIdx.x * 64 + (row << 3 | (col ^ row))] = in[blockIdx.x * 64 + threadIdx.x];
}

extern "C" __global__ void bit_reverse(float* out, const float* in, int bits) {
    unsigned i = threadIdx.x;
    out[__brev(i) >> (32 - bits)] = in[i];
}

extern "C" __global__ void modulo_index(float* out, const float* in, int n, unsigned m) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) out[i] = in[(unsigned)i % m];
}

extern "C" __global__ void divide_index(float* out, const float* in, int n, int h, int w) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    int c = i / (h * w), y = i / w % h, x = i % w;
    out[i] = in[(c * w + x) * h + y];
}

extern "C" __global__ void bit_tricks(unsigned* out, const unsigned* in, int n) {
    int i = threadIdx.x;
    if (i >= n) return;
    unsigned v = in[i];
    out[8 * i + 0] = __byte_perm(v, ~v, 0x3715);
    out[8 * i + 1] = __funnelshift_l(v, v + 1, 7);
    out[8 * i + 2] = __funnelshift_rc(v, v * 3, i);
    out[8 * i + 3] = __clz(v) + 64 * __ffs(v) + 4096 * __popc(v);
    out[8 * i + 4] = __umulhi(v, 0x9E3779B9u) ^ __dp4a((int)v, 0x01020304, 5);
    out[8 * i + 5] = ((v >> 5) & 0x7F) | ((unsigned)((int)v << 3 >> 24) << 8);
    out[8 * i + 6] = (v & 0xFF00FF) ^ (i | 0x10) & ~v;
    out[8 * i + 7] = __usad(v, 77, i) + __vabsdiffu4(v, 0x01020304);
}
