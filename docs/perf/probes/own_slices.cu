// Whether an own copy in slices, or on an urgent stream, runs beside a GEMM that fills the device.
//
// A copy of 16 MiB inside the device, in several ways, is timed alone and beside a bf16 GEMM of 8192³
// in a loop: the copies begin after a GEMM has, and GEMMs run all along. The GEMMs that lie inside the
// copies' time are timed against GEMMs alone, so what the copies cost them shows too.
//
//     nvcc -O3 -std=c++17 -arch=sm_90 own_slices.cu -o own_slices -lcuda -lcublas && ./own_slices
//
// Wants CUDA 13 headers. Results: ../cuda-local-copies.md

#include <cublas_v2.h>
#include <cuda.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <unistd.h>
#include <vector>

static const size_t KIB = 1 << 10, MIB = 1 << 20, BYTES = 16 * MIB;
static const int GEMM_SIDE = 8192, LAPS = 5, GEMMS_MOST = 800;
// How many GEMMs lie inside the copies' time at least, and how long a way may take.
static const int GEMMS_INSIDE = 6;
static const unsigned WAY_SECONDS = 60;

#define CU(call) check((call), #call)
static void check(CUresult result, const char *call) {
    if (result == CUDA_SUCCESS) return;
    const char *text = "";
    cuGetErrorString(result, &text);
    fprintf(stderr, "%s: %s\n", call, text);
    exit(1);
}

#define BLAS(call) check((call), #call)
static void check(cublasStatus_t result, const char *call) {
    if (result == CUBLAS_STATUS_SUCCESS) return;
    fprintf(stderr, "%s: status %d\n", call, static_cast<int>(result));
    exit(1);
}

static CUdeviceptr from, to;
static void *host;
static CUstream compute, plain, urgent;

// The GEMM and an event behind each.
struct Gemm {
    cublasHandle_t handle;
    CUdeviceptr a, b, c;
    std::vector<CUevent> ends{GEMMS_MOST + 1};

    Gemm() {
        const size_t elements = size_t(GEMM_SIDE) * GEMM_SIDE, bytes = 2 * elements;
        for (auto *matrix : {&a, &b, &c}) CU(cuMemAlloc(matrix, bytes));
        // Numbers from 1/2 to 1 of either sign: equal ones would draw less power, so run faster.
        std::vector<uint16_t> numbers(elements);
        uint32_t seed = 1;
        for (auto &number : numbers) {
            seed ^= seed << 13, seed ^= seed >> 17, seed ^= seed << 5;
            number = 0x3f00 | (seed & 0x807f);
        }
        for (auto matrix : {a, b}) CU(cuMemcpyHtoD(matrix, numbers.data(), bytes));
        for (auto &end : ends) CU(cuEventCreate(&end, CU_EVENT_DEFAULT));
        BLAS(cublasCreate(&handle));
        BLAS(cublasSetStream(handle, compute));
    }

    void one() {
        const float alpha = 1, beta = 0;
        auto matrix = [](CUdeviceptr address) { return reinterpret_cast<void *>(address); };
        const int n = GEMM_SIDE;
        BLAS(cublasGemmEx(handle, CUBLAS_OP_N, CUBLAS_OP_N, n, n, n, &alpha, matrix(a), CUDA_R_16BF, n, matrix(b),
                          CUDA_R_16BF, n, &beta, matrix(c), CUDA_R_16BF, n, CUBLAS_COMPUTE_32F,
                          CUBLAS_GEMM_DEFAULT));
    }

    // The end of GEMM i is event i; event 0 is before the first.
    void enqueue(int count) {
        CU(cuEventRecord(ends[0], compute));
        for (int i = 1; i <= count; i++) {
            one();
            CU(cuEventRecord(ends[i], compute));
        }
    }
};

static double between_us(CUevent begin, CUevent end) {
    float milliseconds;
    CU(cuEventElapsedTime(&milliseconds, begin, end));
    return milliseconds * 1e3;
}

static double median(std::vector<double> values) {
    std::sort(values.begin(), values.end());
    return values[values.size() / 2];
}

static void batch(size_t piece) {
    std::vector<CUdeviceptr> targets, sources;
    std::vector<size_t> lengths;
    for (size_t at = 0; at < BYTES; at += piece) {
        targets.push_back(to + at), sources.push_back(from + at), lengths.push_back(piece);
    }
    CUmemcpyAttributes attributes{};
    attributes.srcAccessOrder = CU_MEMCPY_SRC_ACCESS_ORDER_STREAM;
    attributes.flags = CU_MEMCPY_FLAG_PREFER_OVERLAP_WITH_COMPUTE;
    size_t first = 0;
    CU(cuMemcpyBatchAsync(targets.data(), sources.data(), lengths.data(), lengths.size(), &attributes, &first, 1,
                          plain));
}

static void pieces(size_t piece, CUstream stream) {
    for (size_t at = 0; at < BYTES; at += piece) CU(cuMemcpyDtoDAsync(to + at, from + at, piece, stream));
}

static void through_host() {
    CU(cuMemcpyDtoHAsync(host, from, BYTES, plain));
    CU(cuMemcpyHtoDAsync(to, host, BYTES, plain));
}

struct Way {
    const char *name;
    CUstream stream;
    std::function<void()> copy;
};

static CUevent begin_event, end_event;

static void prove(const Way &way, unsigned char value) {
    CU(cuMemsetD8(from, value, BYTES));
    CU(cuMemsetD8(to, 0, BYTES));
    CU(cuCtxSynchronize());
    way.copy();
    CU(cuCtxSynchronize());
    std::vector<unsigned char> seen(BYTES);
    CU(cuMemcpyDtoH(seen.data(), to, BYTES));
    if (std::count(seen.begin(), seen.end(), value) == static_cast<long>(BYTES)) return;
    fprintf(stderr, "%s: bytes are missing\n", way.name);
    exit(1);
}

static double alone_us(const Way &way) {
    const int copies = 20;
    std::vector<double> laps;
    for (int lap = 0; lap < LAPS; lap++) {
        CU(cuCtxSynchronize());
        CU(cuEventRecord(begin_event, way.stream));
        for (int i = 0; i < copies; i++) way.copy();
        CU(cuEventRecord(end_event, way.stream));
        CU(cuEventSynchronize(end_event));
        laps.push_back(between_us(begin_event, end_event) / copies);
    }
    return median(laps);
}

// Long after the first ones, when clocks have settled.
static double gemm_alone_us(Gemm &gemm) {
    const int first = 20, last = 60;
    CU(cuCtxSynchronize());
    gemm.enqueue(last);
    CU(cuCtxSynchronize());
    return between_us(gemm.ends[first], gemm.ends[last]) / (last - first);
}

struct Beside {
    double copy_us, gemm_us;
};

static Beside beside(const Way &way, Gemm &gemm) {
    // The copies begin behind so many GEMMs, when clocks have settled.
    const int before = 20;
    for (int copies = 4, gemms = 60; gemms <= GEMMS_MOST;) {
        CU(cuCtxSynchronize());
        gemm.enqueue(gemms);
        CU(cuStreamWaitEvent(way.stream, gemm.ends[before], 0));
        CU(cuEventRecord(begin_event, way.stream));
        for (int i = 0; i < copies; i++) way.copy();
        CU(cuEventRecord(end_event, way.stream));
        CU(cuCtxSynchronize());
        if (between_us(end_event, gemm.ends[gemms]) < 0) {
            gemms *= 2;
            continue;
        }
        std::vector<double> inside;
        for (int i = before; i < gemms; i++) {
            bool within = between_us(begin_event, gemm.ends[i]) >= 0 && between_us(gemm.ends[i + 1], end_event) >= 0;
            if (within) inside.push_back(between_us(gemm.ends[i], gemm.ends[i + 1]));
        }
        if (int(inside.size()) < GEMMS_INSIDE) {
            copies *= 2;
            continue;
        }
        double sum = 0;
        for (double us : inside) sum += us;
        return {between_us(begin_event, end_event) / copies, sum / inside.size()};
    }
    fprintf(stderr, "%s: the copies outlast %d GEMMs\n", way.name, GEMMS_MOST);
    exit(1);
}

int main() {
    alarm(WAY_SECONDS);
    CUdevice device;
    CUcontext context;
    CU(cuInit(0));
    CU(cuDeviceGet(&device, 0));
    CU(cuDevicePrimaryCtxRetain(&context, device));
    CU(cuCtxSetCurrent(context));
    CU(cuMemAlloc(&from, BYTES));
    CU(cuMemAlloc(&to, BYTES));
    CU(cuMemHostAlloc(&host, BYTES, 0));
    int least_urgent, most_urgent;
    CU(cuCtxGetStreamPriorityRange(&least_urgent, &most_urgent));
    for (auto *stream : {&compute, &plain}) CU(cuStreamCreateWithPriority(stream, CU_STREAM_NON_BLOCKING, least_urgent));
    CU(cuStreamCreateWithPriority(&urgent, CU_STREAM_NON_BLOCKING, most_urgent));
    for (auto *event : {&begin_event, &end_event}) CU(cuEventCreate(event, CU_EVENT_DEFAULT));
    Gemm gemm;

    const Way ways[] = {
        {"whole", plain, [] { pieces(BYTES, plain); }},
        {"pieces of 4 MiB", plain, [] { pieces(4 * MIB, plain); }},
        {"pieces of 2 MiB", plain, [] { pieces(2 * MIB, plain); }},
        {"pieces of 1 MiB", plain, [] { pieces(MIB, plain); }},
        {"pieces of 256 KiB", plain, [] { pieces(256 * KIB, plain); }},
        {"pieces of 64 KiB", plain, [] { pieces(64 * KIB, plain); }},
        {"pieces of 32 KiB", plain, [] { pieces(32 * KIB, plain); }},
        {"whole, urgent stream", urgent, [] { pieces(BYTES, urgent); }},
        {"pieces of 2 MiB in one batch, overlap preferred", plain, [] { batch(2 * MIB); }},
        {"through pinned memory of the host", plain, [] { through_host(); }},
    };
    unsigned char value = 0;
    printf("| own copy of 16 MiB | alone, µs | beside the GEMM, µs | GEMM, times its time alone |\n");
    printf("| --- | --: | --: | --: |\n");
    for (auto &way : ways) {
        alarm(WAY_SECONDS);
        prove(way, ++value);
        double copy_us = alone_us(way);
        double gemm_us = gemm_alone_us(gemm);
        Beside both = beside(way, gemm);
        printf("| %s | %.1f | %.1f | %.2f |\n", way.name, copy_us, both.copy_us, both.gemm_us / gemm_us);
        fflush(stdout);
    }
}
