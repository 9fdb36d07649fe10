// Times the kernels of Peerlane's reductions on one GPU, by the number of blocks, beside a copy by `cudaMemcpyAsync`.
//
// nvcc -O3 -arch=native additions.cu -o additions && ./additions

#include "../../../backend-cuda/kernels/reduce.cu"
#include <cstdio>
#include <cuda_runtime.h>

constexpr size_t BYTES_MAX = 256 << 20;
constexpr int THREADS = 512;

template <typename Run> float seconds(Run run) {
    cudaEvent_t begin, end;
    cudaEventCreate(&begin), cudaEventCreate(&end);
    for (int i = 0; i < 3; i++) run();
    cudaEventRecord(begin);
    for (int i = 0; i < 20; i++) run();
    cudaEventRecord(end);
    cudaEventSynchronize(end);
    float milliseconds;
    cudaEventElapsedTime(&milliseconds, begin, end);
    return milliseconds / 2e4f;
}

using Kernel = void (*)(void *, Sources, uint32_t, uint32_t, uint64_t, uint64_t);

void measure(const char *name, Kernel kernel, int element, char *target, Sources sources, size_t bytes, int processors) {
    float time = seconds([&] { cudaMemcpyAsync(target, sources.at[0], bytes, cudaMemcpyDeviceToDevice); });
    double copied = 2.0 * bytes / time;
    for (int number : {2, 4, 8}) {
        printf("%s, %zu MiB, %d sources (copy %.0f GB/s):", name, bytes >> 20, number, copied / 1e9);
        for (int blocks : {8, 16, 32, 64, processors, 2 * processors}) {
            float time =
                seconds([&] { kernel<<<blocks, THREADS>>>(target, sources, number, 1, 0, bytes / element); });
            printf(" %d: %.2f", blocks, double(bytes) * (number + 1) / time / copied);
        }
        printf(" %s\n", cudaGetErrorString(cudaGetLastError()));
    }
}

int main() {
    char *memory;
    if (cudaMalloc(&memory, 9 * BYTES_MAX) != cudaSuccess) return 1;
    cudaMemset(memory, 0, 9 * BYTES_MAX);
    Sources sources = {};
    for (int n = 0; n < 8; n++) sources.at[n] = memory + (n + 1) * BYTES_MAX;
    cudaDeviceProp device;
    cudaGetDeviceProperties(&device, 0);
    printf("%s\n", device.name);
    for (size_t bytes : {size_t(64) << 20, BYTES_MAX}) {
        measure("f32", reduce_sum_f32, 4, memory, sources, bytes, device.multiProcessorCount);
        measure("bf16", reduce_sum_bf16, 2, memory, sources, bytes, device.multiProcessorCount);
        measure("u8", reduce_sum_u8, 1, memory, sources, bytes, device.multiProcessorCount);
    }
}
