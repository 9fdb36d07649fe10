// What a direct all-gather costs by how its copies and flags are put on streams.
//
// One process a GPU, memory of the virtual memory API shared by file descriptors, pushes in shifted
// order, one batched memory operation for all signals and waits of a phase, as the CUDA backend does.
// Varied are: the streams that carry the pushes and the own copy, what marks the end of a start, how
// the own shard is copied, and whether `ready` is needed. Times are of starts back to back between
// two events, the longest of all ranks, the median of seven laps.
//
//     nvcc -O3 -std=c++17 -arch=sm_90 streams.cu -o streams -lcuda && ./streams 4
//
// Results: ../cuda-streams.md

#include <cuda.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <signal.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>
#include <vector>

static int me, ranks;

#define CU(call) check((call), #call)
static void check(CUresult result, const char *call) {
    if (result == CUDA_SUCCESS) return;
    const char *text = "";
    cuGetErrorString(result, &text);
    printf("rank %d: %s: %s\n", me, call, text);
    fflush(stdout);
    _exit(1);
}

static double microseconds() {
    using namespace std::chrono;
    return duration<double, std::micro>(steady_clock::now().time_since_epoch()).count();
}

// What the processes share: a barrier and a number each.
struct Shared {
    std::atomic<int> arrived, round;
    double values[8];
};
static Shared *shared;

static void barrier() {
    int round = shared->round;
    if (++shared->arrived == ranks) {
        shared->arrived = 0;
        shared->round++;
    } else {
        while (shared->round == round) usleep(0);
    }
}

static double longest(double value) {
    shared->values[me] = value;
    barrier();
    double most = *std::max_element(shared->values, shared->values + ranks);
    barrier();
    return most;
}

static int sockets[8][8][2];

static void send_descriptor(int socket, int descriptor) {
    char byte = 0, control[CMSG_SPACE(sizeof(int))] = {};
    iovec vector{&byte, 1};
    msghdr message{};
    message.msg_iov = &vector, message.msg_iovlen = 1;
    message.msg_control = control, message.msg_controllen = sizeof control;
    cmsghdr *header = CMSG_FIRSTHDR(&message);
    header->cmsg_level = SOL_SOCKET, header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(sizeof(int));
    memcpy(CMSG_DATA(header), &descriptor, sizeof(int));
    sendmsg(socket, &message, 0);
}

static int receive_descriptor(int socket) {
    char byte, control[CMSG_SPACE(sizeof(int))];
    iovec vector{&byte, 1};
    msghdr message{};
    message.msg_iov = &vector, message.msg_iovlen = 1;
    message.msg_control = control, message.msg_controllen = sizeof control;
    recvmsg(socket, &message, 0);
    int descriptor;
    memcpy(&descriptor, CMSG_DATA(CMSG_FIRSTHDR(&message)), sizeof(int));
    return descriptor;
}

static CUdeviceptr map(CUmemGenericAllocationHandle handle, size_t bytes) {
    CUdeviceptr address;
    CU(cuMemAddressReserve(&address, bytes, 0, 0, 0));
    CU(cuMemMap(address, bytes, 0, handle, 0));
    CUmemAccessDesc access{{CU_MEM_LOCATION_TYPE_DEVICE, me}, CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
    CU(cuMemSetAccess(address, bytes, &access, 1));
    return address;
}

// Memory of every rank, by rank.
static std::vector<CUdeviceptr> everywhere(size_t bytes) {
    CUmemAllocationProp prop{};
    prop.type = CU_MEM_ALLOCATION_TYPE_PINNED;
    prop.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
    prop.location = {CU_MEM_LOCATION_TYPE_DEVICE, me};
    CUmemGenericAllocationHandle handle;
    CU(cuMemCreate(&handle, bytes, &prop, 0));
    int descriptor;
    CU(cuMemExportToShareableHandle(&descriptor, handle, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0));
    std::vector<CUdeviceptr> all(ranks);
    all[me] = map(handle, bytes);
    CU(cuMemsetD8(all[me], 0, bytes));
    for (int peer = 0; peer < ranks; peer++) {
        if (peer != me) send_descriptor(sockets[me][peer][0], descriptor);
    }
    for (int peer = 0; peer < ranks; peer++) {
        if (peer == me) continue;
        intptr_t received = receive_descriptor(sockets[peer][me][1]);
        CU(cuMemImportFromShareableHandle(&handle, reinterpret_cast<void *>(received),
                                          CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR));
        all[peer] = map(handle, bytes);
    }
    CU(cuCtxSynchronize());
    barrier();
    return all;
}

enum class Mark { Nothing, Event, Word };
enum class Own { None, Local, Link };

struct Way {
    const char *name;
    // The stream of the own copy, and of the second push; the other pushes are on stream 0.
    int own_stream, second_stream, third_stream;
    Own own;
    bool ready;
    Mark mark;
};

static const size_t MOST = size_t(1) << 30;
static std::vector<CUdeviceptr> outputs, flags;
static CUdeviceptr input, word;
static CUstream streams[3];
static CUevent started, ended[3], mark, begin_event, end_event;
static cuuint64_t epoch = 0;

struct Batch {
    CUstreamBatchMemOpParams ops[32];
    unsigned count = 0;
    void write(CUdeviceptr address, cuuint64_t value) {
        auto &op = next();
        op.operation = CU_STREAM_MEM_OP_WRITE_VALUE_64;
        op.writeValue.address = address, op.writeValue.value64 = value;
    }
    void wait(CUdeviceptr address, cuuint64_t value) {
        auto &op = next();
        op.operation = CU_STREAM_MEM_OP_WAIT_VALUE_64;
        op.waitValue.address = address, op.waitValue.value64 = value;
    }
    void issue() { CU(cuStreamBatchMemOp(streams[0], count, ops, 0)); }

  private:
    CUstreamBatchMemOpParams &next() {
        memset(&ops[count], 0, sizeof ops[count]);
        return ops[count++];
    }
};

static CUdeviceptr flag(int reader, int kind, int writer) {
    return flags[reader] + 64 * (8 * kind + writer);
}

static void handshake(int kind, bool with_word) {
    Batch batch;
    for (int step = 1; step < ranks; step++) batch.write(flag((me + step) % ranks, kind, me), epoch);
    for (int step = 1; step < ranks; step++) batch.wait(flag(me, kind, (me + step) % ranks), epoch);
    if (with_word) batch.write(word, epoch);
    batch.issue();
}

static void start(const Way &way, size_t shard) {
    epoch++;
    if (way.ready) handshake(0, false);
    bool used[3] = {true, false, false}, marked = false;
    auto on = [&](int index) {
        if (!used[index]) {
            if (!marked) CU(cuEventRecord(started, streams[0]));
            marked = true;
            CU(cuStreamWaitEvent(streams[index], started, 0));
            used[index] = true;
        }
        return streams[index];
    };
    CUdeviceptr own = outputs[me] + shard * me, source = way.own == Own::None ? own : input;
    if (way.own == Own::Local) CU(cuMemcpyDtoDAsync(own, source, shard, on(way.own_stream)));
    for (int step = 1; step < ranks; step++) {
        int peer = (me + step) % ranks;
        CUstream stream = on(step == 2 ? way.second_stream : step == 3 ? way.third_stream : 0);
        CU(cuMemcpyDtoDAsync(outputs[peer] + shard * me, source, shard, stream));
        // Back over the link, from where it was just put.
        if (way.own == Own::Link && step == std::min(2, ranks - 1)) {
            CU(cuMemcpyDtoDAsync(own, outputs[peer] + shard * me, shard, stream));
        }
    }
    for (int index : {1, 2}) {
        if (!used[index]) continue;
        CU(cuEventRecord(ended[index], streams[index]));
        CU(cuStreamWaitEvent(streams[0], ended[index], 0));
    }
    handshake(1, way.mark == Mark::Word);
    if (way.mark == Mark::Event) CU(cuEventRecord(mark, streams[0]));
}

struct Time {
    double device_us, host_us;
};

static Time measure(int starts, const std::function<void()> &one) {
    std::vector<double> device, host;
    for (int lap = 0; lap < 8; lap++) {
        CU(cuCtxSynchronize());
        barrier();
        CU(cuEventRecord(begin_event, streams[0]));
        double from = microseconds();
        for (int i = 0; i < std::min(starts, 10); i++) one();
        double host_us = (microseconds() - from) / std::min(starts, 10);
        for (int i = 10; i < starts; i++) one();
        CU(cuEventRecord(end_event, streams[0]));
        CU(cuEventSynchronize(end_event));
        float milliseconds;
        CU(cuEventElapsedTime(&milliseconds, begin_event, end_event));
        double device_us = longest(milliseconds * 1e3 / starts);
        host_us = longest(host_us);
        if (lap > 0) device.push_back(device_us), host.push_back(host_us);
    }
    std::sort(device.begin(), device.end());
    std::sort(host.begin(), host.end());
    return {device[device.size() / 2], host[host.size() / 2]};
}

// Bare copies to all peers on so many streams, which run freely: the physical limit.
static double limit(size_t shard, int count, int rounds) {
    std::vector<double> laps;
    for (int lap = 0; lap < 6; lap++) {
        CU(cuCtxSynchronize());
        barrier();
        CU(cuEventRecord(begin_event, streams[0]));
        for (int i = 1; i < count; i++) CU(cuStreamWaitEvent(streams[i], begin_event, 0));
        for (int round = 0; round < rounds; round++) {
            for (int step = 1; step < ranks; step++) {
                CUdeviceptr to = outputs[(me + step) % ranks] + shard * me;
                CU(cuMemcpyDtoDAsync(to, input, shard, streams[(step - 1) % count]));
            }
        }
        for (int i = 1; i < count; i++) {
            CU(cuEventRecord(ended[i], streams[i]));
            CU(cuStreamWaitEvent(streams[0], ended[i], 0));
        }
        CU(cuEventRecord(end_event, streams[0]));
        CU(cuEventSynchronize(end_event));
        float milliseconds;
        CU(cuEventElapsedTime(&milliseconds, begin_event, end_event));
        double us = longest(milliseconds * 1e3 / rounds);
        if (lap > 0) laps.push_back(us);
    }
    std::sort(laps.begin(), laps.end());
    return laps[laps.size() / 2];
}

static void rank(int number) {
    me = number;
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    CUdevice device;
    CUcontext context;
    CU(cuInit(0));
    CU(cuDeviceGet(&device, me));
    CU(cuDevicePrimaryCtxRetain(&context, device));
    CU(cuCtxSetCurrent(context));
    outputs = everywhere(MOST);
    flags = everywhere(2 << 20);
    CU(cuMemAlloc(&input, MOST / 2));
    void *host;
    CU(cuMemHostAlloc(&host, 4096, CU_MEMHOSTALLOC_DEVICEMAP));
    CU(cuMemHostGetDevicePointer(&word, host, 0));
    for (auto &stream : streams) CU(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
    for (auto *event : {&started, &ended[1], &ended[2], &mark}) CU(cuEventCreate(event, CU_EVENT_DISABLE_TIMING));
    for (auto *event : {&begin_event, &end_event}) CU(cuEventCreate(event, CU_EVENT_DEFAULT));

    const Way ways[] = {
        {"one stream", 0, 0, 0, Own::Local, false, Mark::Event},
        {"own copy on a second stream", 1, 0, 0, Own::Local, false, Mark::Event},
        {"own copy and second push on a second stream", 1, 1, 0, Own::Local, false, Mark::Event},
        {"own copy on a third, second push on a second stream", 2, 1, 0, Own::Local, false, Mark::Event},
        {"the same, with ready", 2, 1, 0, Own::Local, true, Mark::Event},
        {"the same, end marked by a word in host memory", 2, 1, 0, Own::Local, false, Mark::Word},
        {"the same, end not marked", 2, 1, 0, Own::Local, false, Mark::Nothing},
        {"own copy back over the link", 0, 1, 0, Own::Link, false, Mark::Event},
        {"in place, one stream", 0, 0, 0, Own::None, false, Mark::Event},
        {"in place, second push on a second stream", 0, 1, 0, Own::None, false, Mark::Event},
        {"in place, a stream for each peer", 0, 1, 2, Own::None, false, Mark::Event},
        {"in place, second push on a second stream, with ready", 0, 1, 0, Own::None, true, Mark::Event},
    };
    if (me == 0) printf("| total | way | µs | host µs |\n| --: | --- | --: | --: |\n");
    for (size_t total : {size_t(4) << 10, size_t(1) << 20, size_t(4) << 20, size_t(16) << 20, size_t(64) << 20,
                         size_t(256) << 20, MOST}) {
        size_t shard = total / ranks;
        int starts = total >= (size_t(256) << 20) ? 12 : 100;
        for (auto &way : ways) {
            Time time = measure(starts, [&] { start(way, shard); });
            if (me == 0) printf("| %zu | %s | %.1f | %.1f |\n", total, way.name, time.device_us, time.host_us);
        }
        for (int count = 1; count <= 3; count++) {
            double us = limit(shard, count, starts);
            if (me == 0) printf("| %zu | bare copies on %d streams, no flags | %.1f | |\n", total, count, us);
        }
        fflush(stdout);
    }
    _exit(0);
}

int main(int argc, char **argv) {
    ranks = argc > 1 ? atoi(argv[1]) : 4;
    shared = static_cast<Shared *>(mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0));
    for (int from = 0; from < ranks; from++) {
        for (int to = 0; to < ranks; to++) socketpair(AF_UNIX, SOCK_STREAM, 0, sockets[from][to]);
    }
    for (int number = 0; number < ranks; number++) {
        if (fork() == 0) rank(number);
    }
    int failed = 0;
    for (int number = 0; number < ranks; number++) {
        int status;
        wait(&status);
        if (status != 0) failed = 1, kill(0, SIGTERM);
    }
    return failed;
}
