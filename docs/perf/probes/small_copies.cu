// What many small copies cost, by the call that carries them.
//
// One process copies 1,000 blocks inside a GPU and, with two GPUs, from one to the other. The blocks are apart at both
// ends, and their order at the source is mixed; the two-dimensional copy takes them with a constant stride instead. Two
// times of each way, the median of six laps: of the host's calls, and until the stream is idle. First it compares the
// bytes of two-dimensional copies with odd pitches.
//
//     nvcc -O3 -std=c++17 -arch=sm_90 small_copies.cu -o small_copies -lcuda && ./small_copies
//
// Wants CUDA 13 headers. Results: ../cuda-small-copies.md

#include "ranks.h"

#include <functional>

static const int BLOCKS = 1000, LAPS = 8, WARM_UP = 2;
static const size_t SIZES[] = {4 << 10, 16 << 10, 64 << 10};
static const long long OCCUPIED_CYCLES = 100000000;

static double median(std::vector<double> values) {
    std::sort(values.begin(), values.end());
    return values[values.size() / 2];
}

__global__ void copy_blocks(const uint4 *const *from, uint4 *const *to, size_t words, int blocks) {
    for (int block = blockIdx.x; block < blocks; block += gridDim.x)
        for (size_t word = threadIdx.x; word < words; word += blockDim.x) to[block][word] = from[block][word];
}

__global__ void occupy(long long cycles) {
    for (long long begun = clock64(); clock64() - begun < cycles;) {
    }
}

struct Way {
    const char *name;
    std::function<void()> issue;
};

static void copy_rows(CUdeviceptr to, size_t to_pitch, CUdeviceptr from, size_t from_pitch, size_t width, size_t rows,
                      CUstream stream) {
    CUDA_MEMCPY2D copy{};
    copy.srcMemoryType = copy.dstMemoryType = CU_MEMORYTYPE_DEVICE;
    copy.srcDevice = from, copy.dstDevice = to;
    copy.srcPitch = from_pitch, copy.dstPitch = to_pitch;
    copy.WidthInBytes = width, copy.Height = rows;
    CU(cuMemcpy2DAsync(&copy, stream));
}

// One address range of several physical allocations, which all devices access.
static CUdeviceptr in_segments(int device, int devices, size_t segment, int segments) {
    CUdeviceptr address;
    CU(cuMemAddressReserve(&address, segment * segments, 0, 0, 0));
    CUmemAllocationProp prop{};
    prop.type = CU_MEM_ALLOCATION_TYPE_PINNED;
    prop.location.type = CU_MEM_LOCATION_TYPE_DEVICE, prop.location.id = device;
    for (int index = 0; index < segments; index++) {
        CUmemGenericAllocationHandle handle;
        CU(cuMemCreate(&handle, segment, &prop, 0));
        CU(cuMemMap(address + index * segment, segment, 0, handle, 0));
        CU(cuMemRelease(handle));
    }
    std::vector<CUmemAccessDesc> access(devices);
    for (int index = 0; index < devices; index++) {
        access[index].location.type = CU_MEM_LOCATION_TYPE_DEVICE, access[index].location.id = index;
        access[index].flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
    }
    CU(cuMemSetAccess(address, segment * segments, access.data(), devices));
    return address;
}

// Compares rows of odd pitches that cross physical allocations, at once and in a graph.
static void check_rows(const char *where, int device, int devices) {
    const size_t SEGMENT = 2 << 20, WIDTH = 4999, FROM = 7001, TO = 13007, ROWS = 1200;
    const int SEGMENTS = 8;
    CUdeviceptr from = in_segments(0, devices, SEGMENT, SEGMENTS), to = in_segments(device, devices, SEGMENT, SEGMENTS);
    std::vector<unsigned char> sent(SEGMENT * SEGMENTS), seen(sent.size()), wanted(sent.size(), 9);
    for (size_t at = 0; at < sent.size(); at++) sent[at] = at * 2654435761u >> 13;
    for (size_t row = 0; row < ROWS; row++) memcpy(&wanted[row * TO], &sent[row * FROM], WIDTH);
    CUstream stream;
    CU(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
    CU(cuMemcpyHtoD(from, sent.data(), sent.size()));
    CUgraph graph;
    CUgraphExec replay;
    CU(cuStreamBeginCapture(stream, CU_STREAM_CAPTURE_MODE_RELAXED));
    copy_rows(to, TO, from, FROM, WIDTH, ROWS, stream);
    CU(cuStreamEndCapture(stream, &graph));
    CU(cuGraphInstantiate(&replay, graph, 0));
    for (bool captured : {false, true}) {
        CU(cuMemsetD8(to, 9, seen.size()));
        CU(cuCtxSynchronize());
        if (captured) CU(cuGraphLaunch(replay, stream));
        else copy_rows(to, TO, from, FROM, WIDTH, ROWS, stream);
        CU(cuStreamSynchronize(stream));
        CU(cuMemcpyDtoH(seen.data(), to, seen.size()));
        printf("rows %s, %s: %s\n", where, captured ? "in a graph" : "at once", seen == wanted ? "right" : "WRONG");
    }
}

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
    auto rows = [&] { copy_rows(target, pitch, source, pitch, bytes, BLOCKS, stream); };
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

    CUstream occupied;
    CU(cuStreamCreate(&occupied, CU_STREAM_NON_BLOCKING));
    const char *beside = "one `cuMemcpy2DAsync`, all multiprocessors occupied";
    Way ways[] = {
        {"one copy of all bytes", [&] { CU(cuMemcpyDtoDAsync(target, source, BLOCKS * bytes, stream)); }},
        {"a `cuMemcpyDtoDAsync` each", each},
        {"one `cuMemcpyBatchAsync`", batch},
        {"a graph of all copies", [&] { CU(cuGraphLaunch(replay, stream)); }},
        {"one `cuMemcpy2DAsync`", rows},
        {beside, rows},
        {"a kernel of 8 blocks", [&] { kernel(8); }},
        {"a kernel of 32 blocks", [&] { kernel(32); }},
    };
    for (auto &way : ways) {
        std::vector<double> host, total;
        for (int lap = 0; lap < LAPS; lap++) {
            CU(cuStreamSynchronize(stream));
            if (way.name == beside) {
                occupy<<<512, 1024, 0, occupied>>>(OCCUPIED_CYCLES);
                for (double launched = microseconds(); microseconds() - launched < 2000;) {
                }
            }
            double begun = microseconds();
            way.issue();
            double issued = microseconds();
            CU(cuStreamSynchronize(stream));
            double done = microseconds();
            CU(cuStreamSynchronize(occupied));
            if (lap < WARM_UP) continue;
            host.push_back(issued - begun), total.push_back(done - begun);
        }
        printf("| %s | %zu | %s | %.1f | %.1f |\n", where, bytes, way.name, median(host), median(total));
    }
    CU(cuGraphExecDestroy(replay));
    CU(cuGraphDestroy(graph));
    CU(cuStreamDestroy(stream));
    CU(cuStreamDestroy(occupied));
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
    check_rows("inside a GPU", 0, devices);
    if (devices > 1) check_rows("to a peer", 1, devices);
    for (size_t bytes : SIZES) measure("inside a GPU", bytes, contexts[0]);
    if (devices > 1)
        for (size_t bytes : SIZES) measure("to a peer", bytes, contexts[1]);
}
