// Matrix products: plain, tiled, by tensor cores through inline PTX, through wmma, in integers.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <mma.h>

extern "C" __global__ void matmul_naive(float* c, const float* a, const float* b, int m, int n, int k) {
    int col = blockIdx.x * blockDim.x + threadIdx.x, row = blockIdx.y * blockDim.y + threadIdx.y;
    if (row >= m || col >= n) return;
    float sum = 0.0f;
    for (int i = 0; i < k; i++) sum += a[row * k + i] * b[i * n + col];
    c[row * n + col] = sum;
}

extern "C" __global__ void matmul_tiled(float* c, const float* a, const float* b, int m, int n, int k) {
    __shared__ float as[16][16], bs[16][16];
    int x = threadIdx.x, y = threadIdx.y, col = blockIdx.x * 16 + x, row = blockIdx.y * 16 + y;
    float sum = 0.0f;
    for (int t = 0; t < k; t += 16) {
        as[y][x] = row < m && t + x < k ? a[row * k + t + x] : 0.0f;
        bs[y][x] = t + y < k && col < n ? b[(t + y) * n + col] : 0.0f;
        __syncthreads();
        for (int i = 0; i < 16; i++) sum += as[y][i] * bs[i][x];
        __syncthreads();
    }
    if (row < m && col < n) c[row * n + col] = sum;
}

// One warp: C[16x8] = A[16x16] B[16x8] with ldmatrix and mma.sync.
extern "C" __global__ void mma_f16(float* c, const __half* a, const __half* b) {
    __shared__ __half sa[16 * 16], sb[16 * 8];
    int t = threadIdx.x;
    for (int i = t; i < 256; i += 32) sa[i] = a[i];
    for (int i = t; i < 128; i += 32) sb[i] = b[i];
    __syncwarp();
    unsigned ra[4], rb[2];
    float d[4] = {0, 0, 0, 0};
    unsigned pa = (unsigned)__cvta_generic_to_shared(sa + (t & 15) * 16 + (t >> 4) * 8);
    unsigned pb = (unsigned)__cvta_generic_to_shared(sb + (t & 15) * 8);
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(ra[0]), "=r"(ra[1]), "=r"(ra[2]), "=r"(ra[3]) : "r"(pa));
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0,%1}, [%2];" : "=r"(rb[0]), "=r"(rb[1]) : "r"(pb));
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(ra[0]), "r"(ra[1]), "r"(ra[2]), "r"(ra[3]), "r"(rb[0]), "r"(rb[1]));
    int row = t >> 2, col = (t & 3) * 2;
    c[row * 8 + col] = d[0];
    c[row * 8 + col + 1] = d[1];
    c[(row + 8) * 8 + col] = d[2];
    c[(row + 8) * 8 + col + 1] = d[3];
}

// The same shape in tf32, fragments loaded straight from global memory: C[16x8] = A[16x8] B[8x8].
extern "C" __global__ void mma_tf32(float* c, const float* a, const float* b) {
    int t = threadIdx.x, g = t >> 2, q = t & 3;
    unsigned ra[4] = {__float_as_uint(a[g * 8 + q]), __float_as_uint(a[(g + 8) * 8 + q]),
                      __float_as_uint(a[g * 8 + q + 4]), __float_as_uint(a[(g + 8) * 8 + q + 4])};
    unsigned rb[2] = {__float_as_uint(b[q * 8 + g]), __float_as_uint(b[(q + 4) * 8 + g])};
    float d[4] = {0, 0, 0, 0};
    asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(ra[0]), "r"(ra[1]), "r"(ra[2]), "r"(ra[3]), "r"(rb[0]), "r"(rb[1]));
    for (int i = 0; i < 4; i++) c[(g + (i >> 1) * 8) * 8 + q * 2 + (i & 1)] = d[i];
}

// wmma loads and stores are memory instructions of their own.
extern "C" __global__ void matmul_wmma(float* c, const __half* a, const __half* b, int n, int k) {
    using namespace nvcuda::wmma;
    fragment<matrix_a, 16, 16, 16, __half, row_major> fa;
    fragment<matrix_b, 16, 16, 16, __half, col_major> fb;
    fragment<accumulator, 16, 16, 16, float> acc;
    fill_fragment(acc, 0.0f);
    for (int t = 0; t < k; t += 16) {
        load_matrix_sync(fa, a + blockIdx.y * 16 * k + t, k);
        load_matrix_sync(fb, b + blockIdx.x * 16 * k + t, k);
        mma_sync(acc, fa, fb, acc);
    }
    store_matrix_sync(c + blockIdx.y * 16 * n + blockIdx.x * 16, acc, n, mem_row_major);
}

extern "C" __global__ void gemv_int8(int* y, const int* a4, const int* x4, int rows, int k4) {
    int r = blockIdx.x * blockDim.x + threadIdx.x;
    if (r >= rows) return;
    int sum = 0;
    for (int i = 0; i < k4; i++) sum = __dp4a(a4[r * k4 + i], x4[i], sum);
    y[r] = sum;
}

// Batched, with strides as parameters; the batch is blockIdx.z.
extern "C" __global__ void bmm_strided(float* c, const float* a, const float* b, int n, int k, long sa, long sb, long sc) {
    int col = threadIdx.x, row = blockIdx.x, z = blockIdx.z;
    float sum = 0.0f;
    for (int i = 0; i < k; i++) sum += a[z * sa + row * k + i] * b[z * sb + i * n + col];
    if (col < n) c[z * sc + row * n + col] = sum;
}
