// Traps 5 and 6: pointers inside structs passed by value, read at fixed or at computed offsets.
struct Views {
    float* out;
    const float* a;
    const float* b;
    int n;
};

extern "C" __global__ void struct_by_value(Views v, float scale) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < v.n) v.out[i] = scale * (v.a[i] + v.b[i]);
}

struct Table {
    float* ptr[4];
    int stride;
};

// The struct stays in parameter space and is indexed there.
extern "C" __global__ void struct_param_index(const __grid_constant__ Table t, int which, float* out) {
    out[threadIdx.x] = t.ptr[which][threadIdx.x * t.stride];
}

// The struct is changed, so the compiler copies it to local memory and indexes it there.
extern "C" __global__ void struct_local_index(Table t, int which, int other, float* spare) {
    t.ptr[other & 3] = spare;
    t.ptr[which & 3][threadIdx.x] = (float)t.stride;
}

// Every block works on its own field.
extern "C" __global__ void struct_block_index(const __grid_constant__ Table t, int n) {
    float* p = t.ptr[blockIdx.x & 3];
    if (threadIdx.x < n) p[threadIdx.x] += 1.0f;
}

struct Nested {
    int kind;
    Views views;
    struct {
        long stride;
        double* last;
    } tail;
};

extern "C" __global__ void nested_struct(Nested s) {
    int i = threadIdx.x;
    if (i < s.views.n) {
        s.views.out[i] = s.kind ? s.views.a[i] : s.views.b[i];
        s.tail.last[i * s.tail.stride] = 2.0;
    }
}

// Operands of an elementwise operator as an array of pointers with per-operand strides.
struct Operands {
    char* data[3];
    int strides[3];
};

extern "C" __global__ void tensor_iterator_add(int n, Operands o) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    *(float*)(o.data[0] + i * o.strides[0]) =
        *(float*)(o.data[1] + i * o.strides[1]) + *(float*)(o.data[2] + i * o.strides[2]);
}
