// Which copies still run while every multiprocessor is taken? Those run on copy engines, the others
// are kernels of the driver.
//
// A kernel that fills all multiprocessors spins until the host lets it go; meanwhile a copy is
// enqueued on another stream. Either it finishes, or it starves until the deadline.
//
//     nvcc -O3 -std=c++17 -arch=sm_90 local_copies.cu -o local_copies -lcuda && ./local_copies
//
// Wants two GPUs with peer access. Results: ../cuda-local-copies.md

#include <cuda.h>
#include <cuda_runtime.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <unistd.h>
#include <vector>

#define RT(call) check((call) == cudaSuccess, #call)
#define CU(call) check((call) == CUDA_SUCCESS, #call)

static void check(bool ok, const char *what) {
    if (!ok) {
        printf("failed: %s\n", what);
        exit(1);
    }
}

static double microseconds() {
    using namespace std::chrono;
    return duration<double, std::micro>(steady_clock::now().time_since_epoch()).count();
}

// Two blocks a multiprocessor, each with half of its threads and of its shared memory.
__global__ void occupy(volatile int *leave) {
    extern __shared__ char shared[];
    shared[threadIdx.x] = 1;
    if (threadIdx.x == 0) {
        while (!*leave) __nanosleep(2000);
    }
    __syncthreads();
}

static char *mapped(size_t bytes) {
    CUmemAllocationProp prop{};
    prop.type = CU_MEM_ALLOCATION_TYPE_PINNED;
    prop.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
    prop.location = {CU_MEM_LOCATION_TYPE_DEVICE, 0};
    CUmemGenericAllocationHandle handle;
    CU(cuMemCreate(&handle, bytes, &prop, 0));
    CUdeviceptr address;
    CU(cuMemAddressReserve(&address, bytes, 0, 0, 0));
    CU(cuMemMap(address, bytes, 0, handle, 0));
    CUmemAccessDesc access{prop.location, CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
    CU(cuMemSetAccess(address, bytes, &access, 1));
    return reinterpret_cast<char *>(address);
}

int main() {
    const size_t most = 64 << 20, deadline_us = 60000;
    const int blocks_a_multiprocessor = 2, threads = 1024, shared_bytes = 100 * 1024;
    char *own, *other, *peer, *host;
    RT(cudaSetDevice(1));
    RT(cudaMalloc(&peer, most));
    RT(cudaSetDevice(0));
    RT(cudaDeviceEnablePeerAccess(1, 0));
    RT(cudaMalloc(&own, most));
    RT(cudaMalloc(&other, most));
    RT(cudaHostAlloc(reinterpret_cast<void **>(&host), most, cudaHostAllocMapped));
    char *virtual_memory = mapped(most);
    CUcontext context, second;
    CU(cuCtxGetCurrent(&context));
    CUctxCreateParams params{};
    CU(cuCtxCreate(&second, &params, 0, 0));
    CU(cuCtxSetCurrent(context));

    cudaStream_t stream, busy;
    RT(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    RT(cudaStreamCreateWithFlags(&busy, cudaStreamNonBlocking));
    cudaEvent_t begin, end, done;
    RT(cudaEventCreate(&begin));
    RT(cudaEventCreate(&end));
    RT(cudaEventCreateWithFlags(&done, cudaEventDisableTiming));
    volatile int *leave;
    RT(cudaHostAlloc((void **)&leave, sizeof(int), cudaHostAllocMapped));
    RT(cudaFuncSetAttribute(occupy, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes));
    int multiprocessors;
    RT(cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, 0));

    auto device = [](void *pointer) { return reinterpret_cast<CUdeviceptr>(pointer); };
    auto plain = [&](char *to, char *from, size_t bytes) {
        CU(cuMemcpyDtoDAsync(device(to), device(from), bytes, stream));
    };
    auto batch = [&](char *to, char *from, size_t bytes, unsigned flags) {
        cudaMemcpyAttributes attributes{};
        attributes.srcAccessOrder = cudaMemcpySrcAccessOrderStream;
        attributes.flags = flags;
        attributes.srcLocHint = attributes.dstLocHint = {cudaMemLocationTypeDevice, 0};
        size_t index = 0;
        const void *sources[] = {from}, *targets[] = {to};
        RT(cudaMemcpyBatchAsync(targets, sources, &bytes, 1, &attributes, &index, 1, stream));
    };
    auto rows = [&](size_t bytes, size_t width, size_t pitch) {
        CUDA_MEMCPY2D copy{};
        copy.srcMemoryType = copy.dstMemoryType = CU_MEMORYTYPE_DEVICE;
        copy.srcDevice = device(own);
        copy.dstDevice = device(virtual_memory);
        copy.srcPitch = copy.dstPitch = pitch;
        copy.WidthInBytes = width;
        copy.Height = bytes / pitch;
        CU(cuMemcpy2DAsync(&copy, stream));
    };
    struct Way {
        const char *name;
        std::function<void(size_t)> copy;
    };
    std::vector<Way> ways = {
        {"to a peer, cuMemcpyDtoDAsync", [&](size_t n) { plain(peer, own, n); }},
        {"from a peer, cuMemcpyDtoDAsync", [&](size_t n) { plain(own, peer, n); }},
        {"to the host", [&](size_t n) { CU(cuMemcpyDtoHAsync(host, device(own), n, stream)); }},
        {"from the host", [&](size_t n) { CU(cuMemcpyHtoDAsync(device(own), host, n, stream)); }},
        {"own, cuMemcpyDtoDAsync", [&](size_t n) { plain(other, own, n); }},
        {"own, to virtual memory", [&](size_t n) { plain(virtual_memory, own, n); }},
        {"own, unaligned", [&](size_t n) { plain(other + 1, own + 3, n - 8); }},
        {"own, cuMemcpyPeerAsync, one context",
         [&](size_t n) { CU(cuMemcpyPeerAsync(device(other), context, device(own), context, n, stream)); }},
        {"own, cuMemcpyPeerAsync, two contexts",
         [&](size_t n) { CU(cuMemcpyPeerAsync(device(other), second, device(own), context, n, stream)); }},
        {"own, 2D, rows of 64 KiB", [&](size_t n) { rows(n, 65536, 65536); }},
        {"own, 2D, rows with gaps", [&](size_t n) { rows(n, 65536 - 16, 65536); }},
        {"own, 2D, rows of 4 KiB", [&](size_t n) { rows(n, 4096, 4096); }},
        {"own, cudaMemcpyBatchAsync", [&](size_t n) { batch(other, own, n, 0); }},
        {"own, cudaMemcpyBatchAsync, overlap preferred",
         [&](size_t n) { batch(other, own, n, cudaMemcpyFlagPreferOverlapWithCompute); }},
    };
    printf("| copy | bytes | alone, us | GB/s | host, us | all multiprocessors taken |\n");
    for (auto &way : ways) {
        for (size_t bytes : {size_t(64) << 10, size_t(2) << 20, most}) {
            const int times = 20;
            way.copy(bytes);
            RT(cudaDeviceSynchronize());
            double from = microseconds();
            for (int i = 0; i < times; i++) way.copy(bytes);
            double host_us = (microseconds() - from) / times;
            RT(cudaDeviceSynchronize());
            RT(cudaEventRecord(begin, stream));
            for (int i = 0; i < times; i++) way.copy(bytes);
            RT(cudaEventRecord(end, stream));
            RT(cudaEventSynchronize(end));
            float milliseconds;
            RT(cudaEventElapsedTime(&milliseconds, begin, end));
            double alone_us = milliseconds * 1e3 / times;

            *leave = 0;
            occupy<<<blocks_a_multiprocessor * multiprocessors, threads, shared_bytes, busy>>>((int *)leave);
            usleep(2000);
            way.copy(bytes);
            RT(cudaEventRecord(done, stream));
            from = microseconds();
            bool ran = false;
            while (!ran && microseconds() - from < deadline_us) ran = cudaEventQuery(done) == cudaSuccess;
            *leave = 1;
            RT(cudaDeviceSynchronize());
            printf("| %s | %zu | %.1f | %.0f | %.1f | %s |\n", way.name, bytes, alone_us,
                   bytes / alone_us / 1e3, host_us, ran ? "runs" : "**starves**");
        }
    }
}
