// Times the addition of n arrays on one GPU, by the number of blocks, beside a copy of the same bytes by `cudaMemcpyAsync`.
//
// nvcc -O3 -arch=native additions.cu -o additions && ./additions

#include <cstdio>
#include <cuda_bf16.h>
#include <cuda_runtime.h>

constexpr size_t BYTES = 256 << 20;
constexpr int THREADS = 512;

struct Sources {
    const void *at[8];
};

struct F32 {
    using Vector = float4;
    static __device__ void add(float *sums, const Vector &v) {
        sums[0] += v.x, sums[1] += v.y, sums[2] += v.z, sums[3] += v.w;
    }
    static __device__ Vector narrow(const float *s) { return make_float4(s[0], s[1], s[2], s[3]); }
    static constexpr int COUNT = 4;
};

struct Bf16 {
    using Vector = uint4;
    static __device__ void add(float *sums, const Vector &v) {
        const unsigned words[4] = {v.x, v.y, v.z, v.w};
        for (int i = 0; i < 4; i++) {
            sums[2 * i] += __uint_as_float(words[i] << 16);
            sums[2 * i + 1] += __uint_as_float(words[i] & 0xffff0000u);
        }
    }
    static __device__ Vector narrow(const float *s) {
        unsigned words[4];
        for (int i = 0; i < 4; i++) {
            __nv_bfloat162 pair = __floats2bfloat162_rn(s[2 * i], s[2 * i + 1]);
            words[i] = *reinterpret_cast<unsigned *>(&pair);
        }
        return make_uint4(words[0], words[1], words[2], words[3]);
    }
    static constexpr int COUNT = 8;
};

template <typename T, int N, int UNROLL>
__global__ void add(typename T::Vector *target, Sources sources, size_t vectors) {
    size_t stride = size_t(gridDim.x) * blockDim.x;
    for (size_t begin = size_t(blockIdx.x) * blockDim.x + threadIdx.x; begin < vectors; begin += UNROLL * stride) {
        typename T::Vector loaded[N][UNROLL];
#pragma unroll
        for (int n = 0; n < N; n++)
#pragma unroll
            for (int u = 0; u < UNROLL; u++)
                if (begin + u * stride < vectors)
                    loaded[n][u] = __ldcs(static_cast<const typename T::Vector *>(sources.at[n]) + begin + u * stride);
#pragma unroll
        for (int u = 0; u < UNROLL; u++) {
            if (begin + u * stride >= vectors) break;
            float sums[T::COUNT] = {};
#pragma unroll
            for (int n = 0; n < N; n++) T::add(sums, loaded[n][u]);
            __stcs(target + begin + u * stride, T::narrow(sums));
        }
    }
}

template <typename Run> float seconds(Run run) {
    cudaEvent_t begin, end;
    cudaEventCreate(&begin), cudaEventCreate(&end);
    for (int i = 0; i < 3; i++) run();
    cudaEventRecord(begin);
    for (int i = 0; i < 10; i++) run();
    cudaEventRecord(end);
    cudaEventSynchronize(end);
    float milliseconds;
    cudaEventElapsedTime(&milliseconds, begin, end);
    return milliseconds / 1e4f;
}

template <typename T, int N, int UNROLL> void measure(const char *name, char *target, Sources sources, double copied) {
    printf("%s, %d sources:", name, N);
    for (int blocks : {8, 16, 32, 64, 132, 264, 528, 1056, 2112}) {
        float time = seconds([&] {
            add<T, N, UNROLL><<<blocks, THREADS>>>(reinterpret_cast<typename T::Vector *>(target), sources, BYTES / 16);
        });
        double rate = double(BYTES) * (N + 1) / time;
        printf(" %d: %.0f GB/s (%.2f)", blocks, rate / 1e9, rate / copied);
    }
    printf(" %s\n", cudaGetErrorString(cudaGetLastError()));
}

int main() {
    char *memory;
    if (cudaMalloc(&memory, 9 * BYTES) != cudaSuccess) return 1;
    cudaMemset(memory, 0, 9 * BYTES);
    Sources sources;
    for (int n = 0; n < 8; n++) sources.at[n] = memory + (n + 1) * BYTES;
    float time = seconds([&] { cudaMemcpyAsync(memory, sources.at[0], BYTES, cudaMemcpyDeviceToDevice); });
    double copied = 2.0 * BYTES / time;
    cudaDeviceProp device;
    cudaGetDeviceProperties(&device, 0);
    printf("%s: a copy moves %.0f GB/s, read and written\n", device.name, copied / 1e9);
    measure<F32, 2, 4>("f32", memory, sources, copied);
    measure<F32, 4, 2>("f32", memory, sources, copied);
    measure<F32, 8, 1>("f32", memory, sources, copied);
    measure<Bf16, 2, 4>("bf16", memory, sources, copied);
    measure<Bf16, 4, 2>("bf16", memory, sources, copied);
    measure<Bf16, 8, 1>("bf16", memory, sources, copied);
}
