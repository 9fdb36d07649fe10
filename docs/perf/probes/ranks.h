// Ranks of a probe: one process a GPU, with a barrier, memory of each other, and a deadline.
//
// A failure or a passed deadline of one ends all.

#pragma once

#include <cuda.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <signal.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>
#include <vector>

static const int RANKS_MAX = 8;

static int me, ranks;
static const char *doing = "setting up";

#define CU(call) check((call), #call)
static void check(CUresult result, const char *call) {
    if (result == CUDA_SUCCESS) return;
    const char *text = "";
    cuGetErrorString(result, &text);
    fprintf(stderr, "rank %d, %s: %s: %s\n", me, doing, call, text);
    _exit(1);
}

// Every wait of a process ends here at the latest.
static void deadline(int) {
    const char *parts[] = {"deadline passed: ", doing, "\n"};
    for (const char *part : parts) {
        if (write(2, part, strlen(part)) < 0) _exit(1);
    }
    _exit(1);
}

static double microseconds() {
    using namespace std::chrono;
    return duration<double, std::micro>(steady_clock::now().time_since_epoch()).count();
}

// What the processes share: a barrier and a number each.
struct Shared {
    std::atomic<int> arrived, round;
    double values[RANKS_MAX];
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

static int sockets[RANKS_MAX][RANKS_MAX][2];

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
    if (sendmsg(socket, &message, 0) != 1) perror("sendmsg"), _exit(1);
}

static int receive_descriptor(int socket) {
    char byte, control[CMSG_SPACE(sizeof(int))] = {};
    iovec vector{&byte, 1};
    msghdr message{};
    message.msg_iov = &vector, message.msg_iovlen = 1;
    message.msg_control = control, message.msg_controllen = sizeof control;
    if (recvmsg(socket, &message, 0) != 1 || !CMSG_FIRSTHDR(&message)) perror("recvmsg"), _exit(1);
    int descriptor;
    memcpy(&descriptor, CMSG_DATA(CMSG_FIRSTHDR(&message)), sizeof(int));
    return descriptor;
}

static CUdeviceptr map(CUmemGenericAllocationHandle handle, size_t bytes) {
    CUdeviceptr address;
    CU(cuMemAddressReserve(&address, bytes, 0, 0, 0));
    CU(cuMemMap(address, bytes, 0, handle, 0));
    CUmemAccessDesc access{};
    access.location.type = CU_MEM_LOCATION_TYPE_DEVICE, access.location.id = me;
    access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
    CU(cuMemSetAccess(address, bytes, &access, 1));
    return address;
}

// Memory of every rank, by rank.
static std::vector<CUdeviceptr> everywhere(size_t bytes) {
    const auto by_descriptor = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
    CUmemAllocationProp prop{};
    prop.type = CU_MEM_ALLOCATION_TYPE_PINNED;
    prop.requestedHandleTypes = by_descriptor;
    prop.location.type = CU_MEM_LOCATION_TYPE_DEVICE, prop.location.id = me;
    CUmemGenericAllocationHandle handle;
    CU(cuMemCreate(&handle, bytes, &prop, 0));
    int descriptor;
    CU(cuMemExportToShareableHandle(&descriptor, handle, by_descriptor, 0));
    std::vector<CUdeviceptr> all(ranks);
    all[me] = map(handle, bytes);
    CU(cuMemsetD8(all[me], 0, bytes));
    for (int peer = 0; peer < ranks; peer++) {
        if (peer != me) send_descriptor(sockets[me][peer][0], descriptor);
    }
    for (int peer = 0; peer < ranks; peer++) {
        if (peer == me) continue;
        intptr_t received = receive_descriptor(sockets[peer][me][1]);
        CU(cuMemImportFromShareableHandle(&handle, reinterpret_cast<void *>(received), by_descriptor));
        all[peer] = map(handle, bytes);
    }
    CU(cuCtxSynchronize());
    barrier();
    return all;
}

// One rank: its device is current, and what it does next is bounded.
static CUcontext enter(int number) {
    me = number;
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    signal(SIGALRM, deadline);
    alarm(120);
    CUdevice device;
    CUcontext context;
    CU(cuInit(0));
    CU(cuDeviceGet(&device, me));
    CU(cuDevicePrimaryCtxRetain(&context, device));
    CU(cuCtxSetCurrent(context));
    return context;
}

// From here on, `what` may take so many seconds.
static void begin(const char *what, unsigned seconds) {
    doing = what;
    alarm(seconds);
}

// Runs `rank` in so many processes, made before any of them knows a driver; the exit status of all.
static int run(int count, void (*rank)(int)) {
    if (count < 2 || count > RANKS_MAX) {
        fprintf(stderr, "%d ranks, wanted 2 to %d\n", count, RANKS_MAX);
        return 2;
    }
    ranks = count;
    void *memory = mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) return perror("mmap"), 1;
    shared = static_cast<Shared *>(memory);
    for (int from = 0; from < ranks; from++) {
        for (int to = 0; to < ranks; to++) {
            if (socketpair(AF_UNIX, SOCK_STREAM, 0, sockets[from][to]) != 0) return perror("socketpair"), 1;
        }
    }
    pid_t children[RANKS_MAX];
    for (int number = 0; number < ranks; number++) {
        children[number] = fork();
        if (children[number] < 0) return perror("fork"), 1;
        if (children[number] == 0) rank(number), fflush(stdout), _exit(0);
    }
    int failed = 0;
    for (int left = ranks; left > 0; left--) {
        int status;
        pid_t ended = wait(&status);
        std::replace(children, children + ranks, ended, pid_t(0));
        if (status == 0 || failed) continue;
        failed = 1;
        for (int number = 0; number < ranks; number++) {
            if (children[number] > 0) kill(children[number], SIGKILL);
        }
    }
    return failed;
}
