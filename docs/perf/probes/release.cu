// Measures how long the captured starts of a graph take after their waits are released from outside, and
// what the word costs that a captured start sets while it waits.
//
//   nvcc -O2 -std=c++17 release.cu -o release -lcuda && ./release

#include <cuda.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <thread>
#include <vector>

using Clock = std::chrono::steady_clock;
using Op = CUstreamBatchMemOpParams;

#define CHECK(call)                                                     \
    do {                                                                \
        CUresult result_ = (call);                                      \
        if (result_ != CUDA_SUCCESS) {                                  \
            const char *text_ = nullptr;                                \
            cuGetErrorString(result_, &text_);                          \
            printf("%s failed in line %d: %s\n", #call, __LINE__, text_); \
            fflush(stdout);                                             \
            _exit(1);                                                   \
        }                                                               \
    } while (0)

static CUcontext context;
static CUstream stream, urgent;
// Flags in device memory, a word in device memory, and a buffer.
static CUdeviceptr flags, device_word, buffer;
// A page in pinned host memory: word 0 counts rounds, word 64 is the word of a start.
static volatile uint64_t *page;
static CUdeviceptr page_device;

static double micros(Clock::time_point from) {
    return std::chrono::duration<double, std::micro>(Clock::now() - from).count();
}

static Op write_word(CUdeviceptr address, uint64_t value) {
    Op op;
    memset(&op, 0, sizeof op);
    op.operation = CU_STREAM_MEM_OP_WRITE_VALUE_64;
    op.writeValue.address = address;
    op.writeValue.value64 = value;
    return op;
}

static Op wait_word(CUdeviceptr address, uint64_t value) {
    Op op;
    memset(&op, 0, sizeof op);
    op.operation = CU_STREAM_MEM_OP_WAIT_VALUE_64;
    op.waitValue.address = address;
    op.waitValue.value64 = value;
    op.waitValue.flags = CU_STREAM_WAIT_VALUE_GEQ;
    return op;
}

static void put(CUstream on, std::vector<Op> &ops) {
    CHECK(cuStreamBatchMemOp(on, ops.size(), ops.data(), 0));
    ops.clear();
}

// Records starts of two halves with a copy of 4 KiB between them. Behind each wait, the flag is set to `after`.
static CUgraphExec record(int starts, int waits, CUdeviceptr word, CUdeviceptr flag, uint64_t after) {
    CUgraph graph;
    CUgraphExec executable;
    CHECK(cuStreamBeginCapture(stream, CU_STREAM_CAPTURE_MODE_RELAXED));
    for (int start = 0; start < starts; start++) {
        std::vector<Op> ops;
        if (word) ops.push_back(write_word(word, 1));
        for (int half = 0; half < 2; half++) {
            for (int wait = 0; wait < waits / 2; wait++) {
                CUdeviceptr address = flag + 8 * (half * 64 + wait);
                ops.push_back(wait_word(address, 1));
                ops.push_back(write_word(address, after));
            }
            if (half == 1) continue;
            put(stream, ops);
            CHECK(cuMemcpyAsync(buffer, buffer + 65536, 4096, stream));
        }
        if (word) ops.push_back(write_word(word, 0));
        put(stream, ops);
    }
    CHECK(cuStreamEndCapture(stream, &graph));
    CHECK(cuGraphInstantiate(&executable, graph, 0));
    CHECK(cuGraphUpload(executable, stream));
    CHECK(cuStreamSynchronize(stream));
    cuGraphDestroy(graph);
    return executable;
}

static void cost_of_the_word(int waits) {
    const char *names[] = {"no word", "in device memory", "in host memory"};
    CUdeviceptr words[] = {0, device_word, page_device + 512};
    std::vector<uint64_t> ones(512, 1);
    CHECK(cuMemcpyHtoD(flags, ones.data(), 4096));
    CUevent begin, end;
    CHECK(cuEventCreate(&begin, 0));
    CHECK(cuEventCreate(&end, 0));
    CUgraphExec graphs[3];
    for (int kind = 0; kind < 3; kind++) graphs[kind] = record(200, waits, words[kind], flags, 1);
    std::vector<float> times[3];
    for (int lap = 0; lap < 15; lap++) {
        for (int kind = 0; kind < 3; kind++) {
            float millis;
            CHECK(cuEventRecord(begin, stream));
            CHECK(cuGraphLaunch(graphs[kind], stream));
            CHECK(cuEventRecord(end, stream));
            CHECK(cuEventSynchronize(end));
            CHECK(cuEventElapsedTime(&millis, begin, end));
            times[kind].push_back(millis * 1000 / 200);
        }
    }
    for (int kind = 0; kind < 3; kind++) {
        std::sort(times[kind].begin(), times[kind].end());
        printf("%2d waits, %-16s %.2f us per start\n", waits, names[kind], times[kind][7]);
    }
}

// Launches a graph of blocked starts, and writes the flags until it is complete.
static void drain(int starts, int repeats) {
    CHECK(cuMemsetD8(flags, 0, 4096));
    CHECK(cuCtxSynchronize());
    CUgraphExec graph = record(starts, 2, device_word, flags, 0);
    std::atomic<bool> launched{false};
    // The launch of a large graph blocks its caller until there is room.
    std::thread launcher([&] {
        CHECK(cuCtxSetCurrent(context));
        CHECK(cuGraphLaunch(graph, stream));
        launched = true;
    });
    usleep(200000);
    auto begun = Clock::now();
    uint64_t issued = page[0];
    int rounds = 0;
    while (!launched || cuStreamQuery(stream) == CUDA_ERROR_NOT_READY) {
        if (page[0] != issued) continue;
        std::vector<Op> ops;
        for (int repeat = 0; repeat < repeats; repeat++) {
            ops.push_back(write_word(flags, 1));
            ops.push_back(write_word(flags + 8 * 64, 1));
        }
        ops.push_back(write_word(page_device, ++issued));
        put(urgent, ops);
        rounds++;
    }
    printf("%4d starts, %2d writes a round: %8.0f us, %d rounds\n", starts, repeats, micros(begun), rounds);
    launcher.join();
    CHECK(cuCtxSynchronize());
    cuGraphExecDestroy(graph);
}

int main() {
    CUdevice device;
    int lowest, highest;
    void *host;
    CHECK(cuInit(0));
    CHECK(cuDeviceGet(&device, 0));
    CHECK(cuDevicePrimaryCtxRetain(&context, device));
    CHECK(cuCtxSetCurrent(context));
    CHECK(cuCtxGetStreamPriorityRange(&lowest, &highest));
    CHECK(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
    CHECK(cuStreamCreateWithPriority(&urgent, CU_STREAM_NON_BLOCKING, highest));
    CHECK(cuMemAlloc(&flags, 4096));
    CHECK(cuMemAlloc(&device_word, 4096));
    CHECK(cuMemAlloc(&buffer, 1 << 20));
    CHECK(cuMemHostAlloc(&host, 4096, CU_MEMHOSTALLOC_DEVICEMAP));
    memset(host, 0, 4096);
    page = static_cast<volatile uint64_t *>(host);
    CHECK(cuMemHostGetDevicePointer(&page_device, host, 0));
    for (int waits : {2, 14}) cost_of_the_word(waits);
    for (int starts : {10, 500, 4000}) {
        for (int repeats : {1, 8, 60}) drain(starts, repeats);
    }
}
