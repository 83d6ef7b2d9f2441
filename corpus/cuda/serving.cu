// What the caches and quantisers of serving engines do with addresses: products of unknowns as indices,
// offsets made from another buffer's alignment, and buffers named in tables.

// A slot from memory, divided, times strides that are 64-bit parameters: all three look like pointers.
extern "C" __global__ void cache_by_slot(float* cache, const float* fresh, const long long* slots, long long page_stride,
                                         long long row_stride, int page_size, int dim) {
    long long slot = slots[blockIdx.x];
    if (slot < 0) return;
    long long page = slot / page_size, row = slot % page_size;
    float* to = cache + page * page_stride + row * row_stride;
    for (int c = threadIdx.x; c < dim; c += blockDim.x) to[c] = fresh[(long long)blockIdx.x * dim + c];
}

// The same, with the heads and the page folded into one product, and a scale read for each row.
extern "C" __global__ void cache_quantised(unsigned char* cache, float* scales, const float* fresh,
                                           const long long* slots, int page_size, int heads, int dim, int lanes) {
    long long slot = slots[blockIdx.x];
    if (slot < 0) return;
    long long page = slot / page_size, row = slot % page_size;
    for (int i = threadIdx.x; i < heads * dim; i += blockDim.x) {
        int head = i / dim, c = i % dim;
        long long at = page * heads * (dim / lanes) * page_size * lanes + head * (dim / lanes) * page_size * lanes +
                       (c / lanes) * page_size * lanes + row * lanes + c % lanes;
        cache[at] = (unsigned char)(int)fresh[(long long)blockIdx.x * heads * dim + i];
        if (c == 0) scales[(page * page_size + row) * heads + head] = 0.5f;
    }
}

// A part of a vocabulary, in bytes: the row is a difference of two 64-bit numbers times a third.
extern "C" __global__ void embedding_part(unsigned char* out, const long long* ids, const unsigned char* weight,
                                          long long width, long long first, long long last) {
    long long id = ids[blockIdx.x];
    for (long long c = threadIdx.x; c < width; c += blockDim.x)
        out[blockIdx.x * width + c] = id >= first && id < last ? weight[(id - first) * width + c] : 0;
}

// How far the input is from a multiple of 16 bytes decides where vectors begin, in the output too.
extern "C" __global__ void scale_aligned(signed char* out, const float* in, const float* scale, int dim,
                                         long long in_stride, long long out_stride) {
    const float* from = in + blockIdx.x * in_stride;
    signed char* to = out + blockIdx.x * out_stride;
    float s = *scale;
    int before = (int)((16 - ((unsigned long long)from & 15)) & 15) / 4;
    if (before > dim) before = dim;
    for (int i = threadIdx.x; i < before; i += blockDim.x) to[i] = (signed char)(from[i] * s);
    int vectors = (dim - before) / 4;
    for (int v = threadIdx.x; v < vectors; v += blockDim.x) {
        float4 four = ((const float4*)(from + before))[v];
        to[before + 4 * v] = (signed char)(four.x * s);
        to[before + 4 * v + 1] = (signed char)(four.y * s);
        to[before + 4 * v + 2] = (signed char)(four.z * s);
        to[before + 4 * v + 3] = (signed char)(four.w * s);
    }
    for (int i = before + 4 * vectors + threadIdx.x; i < dim; i += blockDim.x) to[i] = (signed char)(from[i] * s);
}

// Adapters: the weight of each is a buffer of its own, named in a table.
extern "C" __global__ void adapter_rows(float* out, const float* x, const float* const* weights, const int* adapter,
                                        int dim) {
    int which = adapter[blockIdx.x];
    if (which < 0) return;
    const float* w = weights[which];
    for (int c = threadIdx.x; c < dim; c += blockDim.x) out[blockIdx.x * dim + c] += x[blockIdx.x * dim + c] * w[c];
}

// A table of page tables, one for each sequence, that lead into one cache.
extern "C" __global__ void tables_of_pages(float* out, const float* cache, const int* const* tables, int page_size,
                                           int dim) {
    const int* pages = tables[blockIdx.y];
    int page = pages[blockIdx.x / page_size];
    const float* row = cache + ((long long)page * page_size + blockIdx.x % page_size) * dim;
    for (int c = threadIdx.x; c < dim; c += blockDim.x)
        out[((long long)blockIdx.y * gridDim.x + blockIdx.x) * dim + c] = row[c];
}

// Pages copied in every layer's cache; the caches are named in a table of integers.
extern "C" __global__ void copy_pages(const long long* caches, const long long* pairs, int numel) {
    float* cache = (float*)caches[blockIdx.x];
    long long from = pairs[2 * blockIdx.y] * numel, to = pairs[2 * blockIdx.y + 1] * numel;
    for (int i = threadIdx.x; i < numel; i += blockDim.x) cache[to + i] = cache[from + i];
}
