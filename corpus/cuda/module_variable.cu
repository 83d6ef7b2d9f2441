// Trap 13: variables of the module belong to no parameter.
__device__ float gbuf[256];
__device__ int counter;
__device__ float* gptr;
__constant__ float taps[8] = {0.1f, 0.2f, 0.3f, 0.4f, 0.5f, 0.6f, 0.7f, 0.8f};
__device__ const float lut[4] = {1.0f, 2.0f, 4.0f, 8.0f};

extern "C" __global__ void module_write(const float* in) { gbuf[threadIdx.x] = in[threadIdx.x]; }

extern "C" __global__ void module_read(float* out) { out[threadIdx.x] = gbuf[threadIdx.x] + 1.0f; }

extern "C" __global__ void module_counter(int* ticket) { ticket[threadIdx.x] = atomicAdd(&counter, 1); }

extern "C" __global__ void module_pointer(const float* in) { gptr[threadIdx.x] = in[threadIdx.x]; }

extern "C" __global__ void constant_taps(float* out, const float* in, int n) {
    int i = threadIdx.x;
    float sum = 0.0f;
    for (int k = 0; k < 8; k++)
        if (i + k < n) sum += taps[k] * in[i + k];
    out[i] = sum;
}

extern "C" __global__ void lookup_table(float* out, const unsigned char* code) {
    out[threadIdx.x] = lut[code[threadIdx.x] & 3];
}

// Either a parameter or the module's buffer.
extern "C" __global__ void module_or_param(float* a, int pick) {
    float* p = pick ? a : gbuf;
    p[threadIdx.x] = 9.0f;
}

// The address of the module's buffer escapes into memory.
extern "C" __global__ void module_address_out(float** out) { *out = gbuf; }
