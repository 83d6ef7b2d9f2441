// Attention as it is written by hand for decoding: one block a head, keys and values in pages.
extern "C" __global__ void paged_attention(float* out, const float* q, const float* kcache, const float* vcache,
                                           const int* block_table, const int* lengths, float scale, int heads,
                                           int max_blocks, int page) {
    __shared__ float scores[256], query[32];
    int head = blockIdx.x, seq = blockIdx.y, t = threadIdx.x, len = lengths[seq];
    query[t & 31] = q[(seq * heads + head) * 32 + (t & 31)] * scale;
    __syncthreads();
    for (int p = t; p < len; p += blockDim.x) {
        int block = block_table[seq * max_blocks + p / page];
        const float* key = kcache + (((size_t)block * page + p % page) * heads + head) * 32;
        float s = 0.0f;
        for (int d = 0; d < 32; d++) s += query[d] * key[d];
        scores[p] = s;
    }
    __syncthreads();
    float top = -INFINITY, sum = 0.0f;
    for (int p = 0; p < len; p++) top = fmaxf(top, scores[p]);
    for (int p = 0; p < len; p++) sum += __expf(scores[p] - top);
    if (t < 32) {
        float acc = 0.0f;
        for (int p = 0; p < len; p++) {
            int block = block_table[seq * max_blocks + p / page];
            acc += __expf(scores[p] - top) * vcache[(((size_t)block * page + p % page) * heads + head) * 32 + t];
        }
        out[(seq * heads + head) * 32 + t] = acc / sum;
    }
}

// One state a channel, carried along the sequence.
extern "C" __global__ void selective_scan(float* y, float* state, const float* x, const float* decay, const float* b,
                                          const float* c, int steps, int channels) {
    int ch = blockIdx.x * blockDim.x + threadIdx.x;
    if (ch >= channels) return;
    float h = state[ch];
    for (int t = 0; t < steps; t++) {
        h = h * expf(-decay[ch]) + b[t] * x[t * channels + ch];
        y[t * channels + ch] = c[t] * h;
    }
    state[ch] = h;
}

extern "C" __global__ void causal_conv1d(float* out, const float* in, const float* w, const float* bias, int length,
                                         int channels) {
    int ch = blockIdx.y, t = blockIdx.x * blockDim.x + threadIdx.x;
    if (t >= length) return;
    float sum = bias ? bias[ch] : 0.0f;
    for (int k = 0; k < 4; k++)
        if (t - k >= 0) sum += in[(t - k) * channels + ch] * w[ch * 4 + k];
    out[t * channels + ch] = sum;
}

extern "C" __global__ void cross_entropy(float* loss, const float* logits, const int* label, int classes) {
    const float* row = logits + (size_t)blockIdx.x * classes;
    float top = -INFINITY, sum = 0.0f;
    for (int c = threadIdx.x; c < classes; c += 32) top = fmaxf(top, row[c]);
    for (int d = 16; d; d >>= 1) top = fmaxf(top, __shfl_xor_sync(~0u, top, d));
    for (int c = threadIdx.x; c < classes; c += 32) sum += expf(row[c] - top);
    for (int d = 16; d; d >>= 1) sum += __shfl_xor_sync(~0u, sum, d);
    if (threadIdx.x == 0) loss[blockIdx.x] = logf(sum) + top - row[label[blockIdx.x]];
}

// The split over the key length, joined by a second kernel.
extern "C" __global__ void combine_splits(float* out, const float* part, const float* lse, int splits, int dim) {
    float top = -INFINITY, sum = 0.0f, acc = 0.0f;
    for (int s = 0; s < splits; s++) top = fmaxf(top, lse[blockIdx.x * splits + s]);
    for (int s = 0; s < splits; s++) {
        float w = __expf(lse[blockIdx.x * splits + s] - top);
        sum += w;
        acc += w * part[(blockIdx.x * splits + s) * dim + threadIdx.x];
    }
    out[blockIdx.x * dim + threadIdx.x] = acc / sum;
}
