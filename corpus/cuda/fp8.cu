// Eight-bit floats: conversions that are instructions from sm_89 on and arithmetic before.
#include <cuda_fp8.h>

extern "C" __global__ void quantize_fp8(__nv_fp8x2_e4m3* out, const float2* in, float scale, int n2) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n2) out[i] = __nv_fp8x2_e4m3(make_float2(in[i].x * scale, in[i].y * scale));
}

extern "C" __global__ void dequantize_fp8(float2* out, const __nv_fp8x2_e5m2* in, int n2) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n2) out[i] = (float2)in[i];
}
