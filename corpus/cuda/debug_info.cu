// Kept with line directives and debug sections, so that the parser meets them.
extern "C" __global__ void debug_info(float* out, const float* in, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) out[i] = in[i] * 2.0f;
}
