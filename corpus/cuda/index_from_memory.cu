// Trap 8: an index read from memory makes an offset, not a pointer.
extern "C" __global__ void index_from_memory(float* out, const long long* idx, const float* in, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) out[idx[i]] = in[i];
}

extern "C" __global__ void byte_offset_from_memory(char* out, const long long* offset, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) out[offset[i]] = 1;
}

extern "C" __global__ void embedding(float* out, const int* ids, const float* table, int dim) {
    int row = ids[blockIdx.x];
    for (int c = threadIdx.x; c < dim; c += blockDim.x) out[blockIdx.x * dim + c] = table[(size_t)row * dim + c];
}

// Compressed sparse rows: bounds and columns are read from memory.
extern "C" __global__ void spmv_csr(float* y, const int* start, const int* col, const float* val, const float* x,
                                    int rows) {
    int r = blockIdx.x * blockDim.x + threadIdx.x;
    if (r >= rows) return;
    float sum = 0.0f;
    for (int k = start[r]; k < start[r + 1]; k++) sum += val[k] * x[col[k]];
    y[r] = sum;
}

// Two levels: a page table, then the page.
extern "C" __global__ void paged_gather(float* out, const float* pages, const int* page_table, int page_size, int dim) {
    int token = blockIdx.x;
    int page = page_table[token / page_size];
    const float* row = pages + ((size_t)page * page_size + token % page_size) * dim;
    for (int c = threadIdx.x; c < dim; c += blockDim.x) out[(size_t)token * dim + c] = row[c];
}

extern "C" __global__ void kv_append(float* cache, const float* fresh, const int* slot, int dim) {
    int s = slot[blockIdx.x];
    if (s < 0) return;
    for (int c = threadIdx.x; c < dim; c += blockDim.x) cache[(size_t)s * dim + c] = fresh[blockIdx.x * dim + c];
}

extern "C" __global__ void moe_gather(float* out, const float* tokens, const int* expert_of, const int* order, int dim,
                                      int expert) {
    int t = order[blockIdx.x];
    if (expert_of[t] != expert) return;
    for (int c = threadIdx.x; c < dim; c += blockDim.x) out[blockIdx.x * dim + c] = tokens[(size_t)t * dim + c];
}
