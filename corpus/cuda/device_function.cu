// Trap 12: device functions, function pointers, recursion and functions of other modules.
__device__ __noinline__ void add_row(float* dst, const float* src, int n) {
    for (int i = threadIdx.x; i < n; i += blockDim.x) dst[i] += src[i];
}

__device__ __noinline__ const float* pick(const float* a, const float* b, int k) { return k ? a + k : b; }

__device__ __noinline__ float square(float x) { return x * x; }

extern "C" __global__ void device_function(float* out, const float* in, int n) {
    add_row(out + blockIdx.x * n, in + blockIdx.x * n, n);
}

// The same helper called twice with other buffers.
extern "C" __global__ void device_function_twice(float* a, float* b, const float* c, int n) {
    add_row(a, b, n);
    __syncthreads();
    add_row(b, c, n);
}

extern "C" __global__ void returned_pointer(float* out, const float* a, const float* b, int k) {
    out[threadIdx.x] = pick(a, b, k)[threadIdx.x];
}

extern "C" __global__ void pure_function(float* out, const float* in) { out[threadIdx.x] = square(in[threadIdx.x]); }

typedef float (*Op)(float, const float*);
__device__ __noinline__ float op_add(float x, const float* y) { return x + *y; }
__device__ __noinline__ float op_mul(float x, const float* y) { return x * *y; }
__device__ Op op_table[2] = {op_add, op_mul};

extern "C" __global__ void function_pointer(float* out, const float* y, int which) {
    out[threadIdx.x] = op_table[which](out[threadIdx.x], y);
}

__device__ __noinline__ int descend(const int* tree, int node, int depth) {
    if (depth == 0) return node;
    return descend(tree, tree[node], depth - 1) + 1;
}

extern "C" __global__ void recursion(int* out, const int* tree, int depth) {
    out[threadIdx.x] = descend(tree, threadIdx.x, depth);
}

// The callee writes through a pointer to a pointer in local memory.
__device__ __noinline__ void advance(float** p, int k) { *p += k; }

extern "C" __global__ void pointer_to_pointer(float* data, int k) {
    float* p = data;
    advance(&p, k);
    p[threadIdx.x] = 1.0f;
}

struct Pair {
    float* first;
    const float* second;
};

__device__ __noinline__ void copy_pair(Pair p) { p.first[threadIdx.x] = p.second[threadIdx.x]; }

extern "C" __global__ void struct_to_function(float* a, const float* b) { copy_pair(Pair{a, b}); }
