// Trap 9: true indirection; which buffer is touched is known only from memory.
extern "C" __global__ void pointer_table(const float* const* table, float* out, int n) {
    const float* p = table[blockIdx.x];
    int i = threadIdx.x;
    if (i < n) out[blockIdx.x * n + i] = p[i];
}

extern "C" __global__ void scatter_to_table(float** table, const float* in, int n) {
    int i = threadIdx.x;
    if (i < n) table[blockIdx.x][i] = in[i];
}

struct Node {
    Node* next;
    int value;
};

extern "C" __global__ void list_walk(const Node* head, int* out) {
    int sum = 0;
    for (const Node* p = head; p; p = p->next) sum += p->value;
    out[threadIdx.x] = sum;
}

struct Args {
    float* out;
    const float* in;
    int n;
};

// The whole argument block is passed by pointer.
extern "C" __global__ void args_by_pointer(const Args* args) {
    int i = threadIdx.x;
    if (i < args->n) args->out[i] = args->in[i];
}
