// Trap 12, the rest: calls whose body is in no module at hand. The only honest answer is: immovable.
#include <cstdio>

extern "C" __global__ void calls_printf(const int* in, int n) {
    if (threadIdx.x < n) printf("%d\n", in[threadIdx.x]);
}

extern "C" __global__ void calls_malloc(int* out) {
    int* p = (int*)malloc(4 * sizeof(int));
    if (p) {
        p[threadIdx.x & 3] = 1;
        out[threadIdx.x] = p[0];
        free(p);
    }
}
