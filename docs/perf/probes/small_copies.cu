// What many small copies cost, by the call that carries them.
//
// One process copies 1,000 blocks inside a GPU and, with two GPUs, from one to the other. The blocks are apart at both
// ends, and their order at the source is mixed; the two-dimensional copy takes them at equal distances instead. Two
// times of each way, the median of six laps: of the host's calls, and until the stream is idle.
//
//     nvcc -O3 -std=c++17 -arch=sm_90 small_copies.cu -o small_copies -lcuda && ./small_copies
//
// Wants CUDA 13 headers. Results: ../cuda-small-copies.md

#include <cuda.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <vector>

static const int BLOCKS = 1000, LAPS = 8, WARM_UP = 2;
static const size_t SIZES[] = {4 << 10, 16 << 10, 64 << 10};

#define CU(call) check((call), #call)
static void check(CUresult result, const char *call) {
    if (result == CUDA_SUCCESS) return;
    const char *text = "";
    cuGetErrorString(result, &text);
    fprintf(stderr, "%s: %s\n", call, text);
    exit(1);
}

static double microseconds() {
    using namespace std::chrono;
    return duration<double, std::micro>(steady_clock::now().time_since_epoch()).count();
}

static double median(std::vector<double> values) {
    std::sort(values.begin(), values.end());
    return values[values.size() / 2];
}

__global__ void copy_blocks(const uint4 *const *from, uint4 *const *to, size_t words, int blocks) {
    for (int block = blockIdx.x; block < blocks; block += gridDim.x)
        for (size_t word = threadIdx.x; word < words; word += blockDim.x) to[block][word] = from[block][word];
}

struct Way {
    const char *name;
    std::function<void()> issue;
};

static void measure(const char *where, size_t bytes, CUcontext other) {
    CUcontext own;
    CU(cuCtxGetCurrent(&own));
    size_t pitch = 2 * bytes;
    CUdeviceptr source, target, lists;
    CU(cuMemAlloc(&source, BLOCKS * pitch));
    CU(cuCtxSetCurrent(other));
    CU(cuMemAlloc(&target, BLOCKS * pitch));
    CU(cuCtxSetCurrent(own));
    std::vector<CUdeviceptr> from, to;
    std::vector<size_t> lengths(BLOCKS, bytes);
    for (int block = 0; block < BLOCKS; block++) {
        from.push_back(source + pitch * (block * 7 % BLOCKS));
        to.push_back(target + pitch * block);
    }
    CU(cuMemAlloc(&lists, 2 * BLOCKS * sizeof(CUdeviceptr)));
    CUdeviceptr to_list = lists + BLOCKS * sizeof(CUdeviceptr);
    CU(cuMemcpyHtoD(lists, from.data(), BLOCKS * sizeof(CUdeviceptr)));
    CU(cuMemcpyHtoD(to_list, to.data(), BLOCKS * sizeof(CUdeviceptr)));
    CUstream stream;
    CU(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));

    auto each = [&] {
        for (int block = 0; block < BLOCKS; block++)
            CU(cuMemcpyDtoDAsync(to[block], from[block], bytes, stream));
    };
    auto batch = [&] {
        CUmemcpyAttributes attributes{};
        attributes.srcAccessOrder = CU_MEMCPY_SRC_ACCESS_ORDER_STREAM;
        size_t first = 0;
        CU(cuMemcpyBatchAsync(to.data(), from.data(), lengths.data(), BLOCKS, &attributes, &first, 1, stream));
    };
    auto rows = [&] {
        CUDA_MEMCPY2D copy{};
        copy.srcMemoryType = copy.dstMemoryType = CU_MEMORYTYPE_DEVICE;
        copy.srcDevice = source, copy.dstDevice = target;
        copy.srcPitch = copy.dstPitch = pitch;
        copy.WidthInBytes = bytes, copy.Height = BLOCKS;
        CU(cuMemcpy2DAsync(&copy, stream));
    };
    auto kernel = [&](int grid) {
        copy_blocks<<<grid, 512, 0, stream>>>((const uint4 *const *)lists, (uint4 *const *)to_list,
                                              bytes / sizeof(uint4), BLOCKS);
    };
    CUgraph graph;
    CUgraphExec replay;
    CU(cuStreamBeginCapture(stream, CU_STREAM_CAPTURE_MODE_RELAXED));
    each();
    CU(cuStreamEndCapture(stream, &graph));
    CU(cuGraphInstantiate(&replay, graph, 0));

    Way ways[] = {
        {"one copy of all bytes", [&] { CU(cuMemcpyDtoDAsync(target, source, BLOCKS * bytes, stream)); }},
        {"a `cuMemcpyDtoDAsync` each", each},
        {"one `cuMemcpyBatchAsync`", batch},
        {"a graph of all copies", [&] { CU(cuGraphLaunch(replay, stream)); }},
        {"one `cuMemcpy2DAsync`", rows},
        {"a kernel of 8 blocks", [&] { kernel(8); }},
        {"a kernel of 32 blocks", [&] { kernel(32); }},
    };
    for (auto &way : ways) {
        std::vector<double> host, total;
        for (int lap = 0; lap < LAPS; lap++) {
            CU(cuStreamSynchronize(stream));
            double begun = microseconds();
            way.issue();
            double issued = microseconds();
            CU(cuStreamSynchronize(stream));
            double done = microseconds();
            if (lap < WARM_UP) continue;
            host.push_back(issued - begun), total.push_back(done - begun);
        }
        printf("| %s | %zu | %s | %.1f | %.1f |\n", where, bytes, way.name, median(host), median(total));
    }
    CU(cuGraphExecDestroy(replay));
    CU(cuGraphDestroy(graph));
    CU(cuStreamDestroy(stream));
    for (CUdeviceptr memory : {source, target, lists}) CU(cuMemFree(memory));
}

int main() {
    CU(cuInit(0));
    int devices;
    CU(cuDeviceGetCount(&devices));
    devices = std::min(devices, 2);
    CUcontext contexts[2];
    for (int index = 0; index < devices; index++) {
        CUdevice device;
        CU(cuDeviceGet(&device, index));
        CU(cuDevicePrimaryCtxRetain(&contexts[index], device));
    }
    CU(cuCtxSetCurrent(contexts[0]));
    if (devices > 1) CU(cuCtxEnablePeerAccess(contexts[1], 0));
    for (size_t bytes : SIZES) measure("inside a GPU", bytes, contexts[0]);
    if (devices > 1)
        for (size_t bytes : SIZES) measure("to a peer", bytes, contexts[1]);
}
