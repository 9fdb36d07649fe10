// What it costs to submit a direct all-gather, by the calls that carry its copies.
//
// One process a GPU, memory of the virtual memory API shared by file descriptors. A start pushes the
// own shard to all peers in shifted order, then signals and waits in one batched memory operation, with
// two sets of flags in turn. Varied are how many calls and streams the copies take, how the own shard
// gets to its place, and whether a graph does it all. Two times of each: of starts back to back between
// two events, and of the host for the first starts of a lap, whose queues are empty. Both are the
// longest of all ranks, the median of five laps. Every way is checked to move bytes first.
//
//     nvcc -O3 -std=c++17 -arch=sm_90 submission.cu -o submission -lcuda && ./submission 4
//
// Wants CUDA 13 headers. Results: ../cuda-submission.md

#include "ranks.h"

#include <cuda.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <functional>
#include <time.h>
#include <unistd.h>
#include <utility>
#include <vector>

static const int LAPS = 5, HOST_STARTS = 8;
static const size_t KIB = 1 << 10, MIB = 1 << 20, MOST = 256 * MIB;
static const size_t TOTALS[] = {4 * KIB, MIB, 4 * MIB, 16 * MIB, 64 * MIB, MOST};
static const unsigned WAY_SECONDS = 60;

static double median(std::vector<double> values) {
    std::sort(values.begin(), values.end());
    return values[values.size() / 2];
}

// The own shard: in its place already, on a stream of its own, in the call or on the stream of the
// others, or back from the first peer.
enum class Own { InPlace, Aside, Among, Link };

struct Way {
    const char *name;
    // How many streams carry the pushes: none, one, or two with every other push each.
    int streams;
    // Whether the copies of a stream go there in one call.
    bool together;
    Own own;
    bool graph;
};

static const Way WAYS[] = {
    {"flags only", 0, false, Own::InPlace, false},
    {"in place: copies on one stream", 1, false, Own::InPlace, false},
    {"in place: copies on two streams", 2, false, Own::InPlace, false},
    {"in place: one batch", 1, true, Own::InPlace, false},
    {"in place: a batch on each of two streams", 2, true, Own::InPlace, false},
    {"in place: a graph", 1, false, Own::InPlace, true},
    {"copies on two streams, own copy on a third", 2, false, Own::Aside, false},
    {"one batch, own copy on another stream", 1, true, Own::Aside, false},
    {"a batch on each of two streams, own copy on a third", 2, true, Own::Aside, false},
    {"one batch with the own copy in it", 1, true, Own::Among, false},
    {"one batch, own copy back over the link", 1, true, Own::Link, false},
    {"a graph with the own copy in its chain", 1, false, Own::Among, true},
};
static const size_t WAY_COUNT = sizeof WAYS / sizeof WAYS[0];

static std::vector<CUdeviceptr> outputs, flags;
static CUdeviceptr input;
static CUstream streams[3];
static CUevent started, ended[3], begin_event, end_event;
static CUgraphExec graphs[2];
static uint64_t epoch = 0;

// Memory operations of one call.
struct Words {
    CUstreamBatchMemOpParams ops[3 * RANKS_MAX];
    unsigned count = 0;
    void write(CUdeviceptr address, uint64_t value) {
        auto &op = next();
        op.writeValue.operation = CU_STREAM_MEM_OP_WRITE_VALUE_64;
        op.writeValue.address = address, op.writeValue.value64 = value;
    }
    void wait(CUdeviceptr address, uint64_t value) {
        auto &op = next();
        op.waitValue.operation = CU_STREAM_MEM_OP_WAIT_VALUE_64;
        op.waitValue.address = address, op.waitValue.value64 = value;
        op.waitValue.flags = CU_STREAM_WAIT_VALUE_GEQ;
    }
    void issue() { CU(cuStreamBatchMemOp(streams[0], count, ops, 0)); }

  private:
    CUstreamBatchMemOpParams &next() {
        memset(&ops[count], 0, sizeof ops[count]);
        return ops[count++];
    }
};

// Copies of one stream.
struct Copies {
    CUdeviceptr to[RANKS_MAX], from[RANKS_MAX];
    size_t bytes[RANKS_MAX], count = 0;
    void add(CUdeviceptr target, CUdeviceptr source, size_t length) {
        to[count] = target, from[count] = source, bytes[count] = length;
        count++;
    }
    void issue(CUstream stream, bool together) {
        if (together) {
            CUmemcpyAttributes attributes{};
            attributes.srcAccessOrder = CU_MEMCPY_SRC_ACCESS_ORDER_STREAM;
            size_t first = 0;
            CU(cuMemcpyBatchAsync(to, from, bytes, count, &attributes, &first, 1, stream));
        } else {
            for (size_t i = 0; i < count; i++) CU(cuMemcpyDtoDAsync(to[i], from[i], bytes[i], stream));
        }
        count = 0;
    }
};

static CUdeviceptr flag(int reader, int set, int writer) {
    return flags[reader] + 64 * (RANKS_MAX * set + writer);
}

static void copy(const Way &way, size_t shard) {
    if (way.streams == 0) return;
    CUdeviceptr own = outputs[me] + shard * me, source = way.own == Own::InPlace ? own : input;
    Copies on[2];
    if (way.own == Own::Among) on[0].add(own, source, shard);
    for (int step = 1; step < ranks; step++) {
        CUdeviceptr there = outputs[(me + step) % ranks] + shard * me;
        on[(step - 1) % way.streams].add(there, source, shard);
        if (way.own == Own::Link && step == 1) {
            // A batch has no order inside, so what is copied back is put before.
            on[0].issue(streams[0], false);
            on[0].add(own, there, shard);
        }
    }
    bool used[3] = {true, on[1].count > 0, way.own == Own::Aside};
    if (used[1] || used[2]) CU(cuEventRecord(started, streams[0]));
    for (int side : {1, 2}) {
        if (used[side]) CU(cuStreamWaitEvent(streams[side], started, 0));
    }
    on[0].issue(streams[0], way.together);
    if (used[1]) on[1].issue(streams[1], way.together);
    if (used[2]) CU(cuMemcpyDtoDAsync(own, source, shard, streams[2]));
    for (int side : {1, 2}) {
        if (!used[side]) continue;
        CU(cuEventRecord(ended[side], streams[side]));
        CU(cuStreamWaitEvent(streams[0], ended[side], 0));
    }
}

// A start of one set of flags begins only after all peers signalled the one of the other set, hence
// have read what it writes to.
static void handshake(int set, uint64_t value, bool reset) {
    Words words;
    for (int step = 1; step < ranks; step++) words.write(flag((me + step) % ranks, set, me), value);
    for (int step = 1; step < ranks; step++) words.wait(flag(me, set, (me + step) % ranks), value);
    for (int step = 1; reset && step < ranks; step++) words.write(flag(me, set, (me + step) % ranks), 0);
    words.issue();
}

static CUgraphExec record(const Way &way, size_t shard, int set) {
    CUgraph graph;
    CUgraphExec executable;
    CU(cuStreamBeginCapture(streams[0], CU_STREAM_CAPTURE_MODE_THREAD_LOCAL));
    copy(way, shard);
    handshake(2 + set, 1, true);
    CU(cuStreamEndCapture(streams[0], &graph));
    CU(cuGraphInstantiate(&executable, graph, 0));
    CU(cuGraphDestroy(graph));
    CU(cuGraphUpload(executable, streams[0]));
    return executable;
}

static void start(const Way &way, size_t shard) {
    epoch++;
    if (way.graph) {
        CU(cuGraphLaunch(graphs[epoch % 2], streams[0]));
    } else {
        copy(way, shard);
        handshake(epoch % 2, epoch, false);
    }
}

// New bytes of every rank, then a start of each set of flags: the ends of all shards have arrived.
static void prove(const Way &way, size_t shard, int round) {
    auto value = [&](int rank) { return static_cast<unsigned char>(round * RANKS_MAX + rank + 1); };
    CUdeviceptr own = outputs[me] + shard * me;
    CU(cuMemsetD8(way.own == Own::InPlace ? own : input, value(me), shard));
    CU(cuCtxSynchronize());
    barrier();
    start(way, shard);
    start(way, shard);
    CU(cuCtxSynchronize());
    for (int rank = 0; rank < ranks && way.streams > 0; rank++) {
        for (size_t at : {size_t(0), shard - 1}) {
            unsigned char seen;
            CU(cuMemcpyDtoH(&seen, outputs[me] + shard * rank + at, 1));
            if (seen == value(rank)) continue;
            fprintf(stderr, "rank %d, %s: byte %zu of shard %d is %d, wanted %d\n", me, way.name, at, rank,
                    seen, value(rank));
            _exit(1);
        }
    }
    barrier();
}

struct Time {
    double start_us, host_us;
};

static Time measure(const Way &way, size_t shard, int starts) {
    std::vector<double> device, host;
    for (int lap = 0; lap < LAPS + 1; lap++) {
        CU(cuCtxSynchronize());
        barrier();
        CU(cuEventRecord(begin_event, streams[0]));
        double from = microseconds();
        for (int i = 0; i < HOST_STARTS; i++) start(way, shard);
        double host_us = (microseconds() - from) / HOST_STARTS;
        for (int i = HOST_STARTS; i < starts; i++) start(way, shard);
        CU(cuEventRecord(end_event, streams[0]));
        CU(cuEventSynchronize(end_event));
        float milliseconds;
        CU(cuEventElapsedTime(&milliseconds, begin_event, end_event));
        double start_us = longest(milliseconds * 1e3 / starts);
        host_us = longest(host_us);
        // The first lap is to warm up.
        if (lap > 0) device.push_back(start_us), host.push_back(host_us);
    }
    return {median(device), median(host)};
}

static double nanoseconds(const std::function<void()> &call) {
    const int calls = 100, batches = 21;
    std::vector<double> times;
    for (int batch = 0; batch < batches; batch++) {
        CU(cuCtxSynchronize());
        double from = microseconds();
        for (int i = 0; i < calls; i++) call();
        times.push_back((microseconds() - from) * 1e3 / calls);
    }
    return longest(median(times));
}

static void single_calls(CUcontext context) {
    CUcontext seen = context;
    CUstreamCaptureStatus status;
    CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_RELAXED;
    timespec now;
    CU(cuEventRecord(ended[1], streams[1]));
    CU(cuCtxSynchronize());
    const std::pair<const char *, std::function<void()>> calls[] = {
        {"cuCtxGetCurrent", [&] { CU(cuCtxGetCurrent(&seen)); }},
        {"cuStreamGetCtx", [&] { CU(cuStreamGetCtx(streams[0], &seen)); }},
        {"cuStreamIsCapturing", [&] { CU(cuStreamIsCapturing(streams[0], &status)); }},
        {"cuThreadExchangeStreamCaptureMode", [&] { CU(cuThreadExchangeStreamCaptureMode(&mode)); }},
        {"cuEventRecord", [&] { CU(cuEventRecord(ended[2], streams[2])); }},
        {"cuEventQuery, of an event that has passed", [&] { CU(cuEventQuery(ended[1])); }},
        {"cuStreamWaitEvent, for an event that has passed",
         [&] { CU(cuStreamWaitEvent(streams[0], ended[1], 0)); }},
        {"clock_gettime", [&] { clock_gettime(CLOCK_MONOTONIC, &now); }},
    };
    if (me == 0) printf("\n| call | host, ns |\n| --- | --: |\n");
    for (auto &[name, call] : calls) {
        doing = name;
        double ns = nanoseconds(call);
        if (me == 0) printf("| %s | %.0f |\n", name, ns);
    }
}

static void table(const char *title, const std::vector<std::vector<Time>> &times, double Time::*time) {
    printf("\n| %s |", title);
    for (size_t total : TOTALS) {
        if (total < MIB) printf(" %zu KiB |", total / KIB);
        else printf(" %zu MiB |", total / MIB);
    }
    printf("\n| --- |");
    for (size_t i = 0; i < times.size(); i++) printf(" --: |");
    printf("\n");
    for (size_t way = 0; way < WAY_COUNT; way++) {
        printf("| %s |", WAYS[way].name);
        for (auto &of_total : times) printf(" %.1f |", of_total[way].*time);
        printf("\n");
    }
}

static void rank(int number) {
    CUcontext context = enter(number);
    outputs = everywhere(MOST);
    flags = everywhere(2 * MIB);
    CU(cuMemAlloc(&input, MOST / 2));
    for (auto &stream : streams) CU(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
    for (auto *event : {&started, &ended[1], &ended[2]}) CU(cuEventCreate(event, CU_EVENT_DISABLE_TIMING));
    for (auto *event : {&begin_event, &end_event}) CU(cuEventCreate(event, CU_EVENT_DEFAULT));
    std::vector<std::vector<Time>> times;
    int round = 0;
    for (size_t total : TOTALS) {
        // A multiple of 16 bytes, for odd numbers of ranks.
        size_t shard = total / ranks / 16 * 16;
        times.emplace_back();
        for (auto &way : WAYS) {
            begin(way.name, WAY_SECONDS);
            for (int set : {0, 1}) {
                if (way.graph) graphs[set] = record(way, shard, set);
            }
            prove(way, shard, round++);
            times.back().push_back(measure(way, shard, total == MOST ? 20 : 100));
            for (auto &graph : graphs) {
                if (way.graph) CU(cuGraphExecDestroy(graph));
            }
            if (me == 0) fprintf(stderr, "%zu bytes, %s\n", total, way.name);
        }
    }
    if (me == 0) {
        table("start, µs", times, &Time::start_us);
        table("host, µs", times, &Time::host_us);
    }
    begin("single calls", WAY_SECONDS);
    single_calls(context);
    barrier();
}

int main(int argc, char **argv) { return run(argc > 1 ? atoi(argv[1]) : 4, rank); }
