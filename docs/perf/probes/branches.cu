// Records starts with waits, copies and branches in several shapes, and measures for each shape: the time of a
// start, whether an urgent stream of the same context makes progress while the graph waits, and whether writes on that
// stream release the graph.
//
//   nvcc -O2 -std=c++17 branches.cu -o branches -lcuda
//   ./branches SHAPE BYTES STARTS [LAUNCHES]
//
// The shapes are the modes in `rec`: 0 is a copy on a branch beside one on the trunk, 1 has no branches, 5 has both
// copies on branches, 14 is 0 with the copy on the trunk recorded first, 12 has the caller's own branch.

#include <cuda.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <map>
#include <thread>
#include <vector>
using namespace std;
typedef chrono::steady_clock C;
static double us(C::time_point a) { return chrono::duration<double, micro>(C::now() - a).count(); }
#define CK(x)                                                  \
    do {                                                       \
        CUresult r_ = (x);                                     \
        if (r_) {                                              \
            const char* s_ = 0;                                \
            cuGetErrorString(r_, &s_);                         \
            printf("FAIL %s: %s line %d\n", #x, s_, __LINE__); \
            fflush(stdout);                                    \
            _exit(1);                                          \
        }                                                      \
    } while (0)
typedef CUstreamBatchMemOpParams P;
CUcontext ctx;
CUdevice dev;
CUdeviceptr hpd;
volatile uint64_t* hp;
int hi, lo;
static P w(CUdeviceptr a, uint64_t v) {
    P p;
    memset(&p, 0, sizeof p);
    p.operation = CU_STREAM_MEM_OP_WRITE_VALUE_64;
    p.writeValue.address = a;
    p.writeValue.value64 = v;
    return p;
}
static P wt(CUdeviceptr a, uint64_t v) {
    P p;
    memset(&p, 0, sizeof p);
    p.operation = CU_STREAM_MEM_OP_WAIT_VALUE_64;
    p.waitValue.address = a;
    p.waitValue.value64 = v;
    p.waitValue.flags = CU_STREAM_WAIT_VALUE_GEQ;
    return p;
}
CUstream s, u, A, B, D, X[8];
CUevent ex[8];
CUdeviceptr F, buf;
CUevent ea, eb, es;
size_t bytes;
int starts, mode;
static void ops(CUstream x, initializer_list<P> l) {
    vector<P> v(l);
    CK(cuStreamBatchMemOp(x, v.size(), v.data(), 0));
}
static void fork_(CUstream to) {
    CK(cuEventRecord(es, s));
    CK(cuStreamWaitEvent(to, es, 0));
}
static void join_(CUstream from, CUevent e) {
    CK(cuEventRecord(e, from));
    CK(cuStreamWaitEvent(s, e, 0));
}
static void cp(CUstream x, int i) {
    CK(cuMemcpyAsync(buf + bytes * (2 * i + 1), buf + bytes * 2 * i, bytes, x));
}
static CUgraphExec rec(uint64_t after, bool print) {
    CUgraph g;
    CUgraphExec e;
    CK(cuStreamBeginCapture(s, CU_STREAM_CAPTURE_MODE_RELAXED));
    if (mode == 4) {
        fork_(A);
    }
    if (mode == 9) {
        CUgraph child;
        CK(cuStreamEndCapture(s, &g));
        CK(cuStreamBeginCapture(s, CU_STREAM_CAPTURE_MODE_RELAXED));
        ops(s, {wt(F, 1), w(F, after)});
        fork_(A);
        cp(A, 1);
        cp(s, 0);
        join_(A, ea);
        ops(s, {wt(F + 8, 1), w(F + 8, after)});
        CK(cuStreamEndCapture(s, &child));
        CUgraphNode last = 0;
        for (int i = 0; i < starts; i++) {
            CUgraphNode n;
            CK(cuGraphAddChildGraphNode(&n, g, last ? &last : 0, last ? 1 : 0, child));
            last = n;
        }
    } else {
        for (int i = 0; i < starts; i++) {
            if (mode != 2)
                ops(s, {wt(F, 1), w(F, after)});
            switch (mode) {
                case 0:
                    fork_(A);
                    cp(A, 1);
                    cp(s, 0);
                    join_(A, ea);
                    break;
                case 1:
                    cp(s, 1);
                    cp(s, 0);
                    break;  // linear
                case 2:
                    fork_(A);
                    ops(A, {wt(F, 1), w(F, after)});
                    cp(A, 1);
                    cp(s, 0);
                    join_(A, ea);
                    break;
                case 3:
                    fork_(A);
                    cp(A, 1);
                    cp(s, 0);
                    break;  // join only at the end
                case 4:
                    cp(A, 1);
                    cp(s, 0);
                    join_(A, ea);
                    break;  // no fork edges
                case 5:
                    fork_(A);
                    CK(cuStreamWaitEvent(B, es, 0));
                    cp(A, 1);
                    cp(B, 0);
                    join_(A, ea);
                    join_(B, eb);
                    break;
                case 6:
                    fork_(A);
                    cp(A, 1);
                    join_(A, ea);
                    break;
                case 7:
                    fork_(A);
                    CK(cuMemsetD8Async(buf + bytes * 3, 1, bytes, A));
                    cp(s, 0);
                    join_(A, ea);
                    break;
                case 8:
                    fork_(A);
                    CK(cuMemsetD8Async(buf + bytes * 3, 1, bytes, A));
                    join_(A, ea);
                    break;
                case 10: {  // memop in front of the copy on the side, and behind it
                    fork_(A);
                    ops(A, {w(hpd + 2048, 1)});
                    cp(A, 1);
                    ops(A, {w(hpd + 1032, 1)});
                    cp(s, 0);
                    join_(A, ea);
                    break;
                }
                case 11: {  // user's branch of kernels or memsets over the whole graph, gathers linear
                    if (i == 0)
                        fork_(A);
                    CK(cuMemsetD8Async(buf + bytes * 3, 1, bytes, A));
                    CK(cuMemsetD8Async(buf + bytes * 3, 1, bytes, A));
                    cp(s, 0);
                    break;
                }
                case 12: {  // a user's branch that forks and joins with every start, two memsets
                    fork_(A);
                    CK(cuMemsetD8Async(buf + bytes * 3, 1, bytes, A));
                    CK(cuMemsetD8Async(buf + bytes * 3, 1, bytes, A));
                    cp(s, 0);
                    join_(A, ea);
                    break;
                }
                case 14:
                    CK(cuEventRecord(es, s));
                    cp(s, 0);
                    CK(cuStreamWaitEvent(A, es, 0));
                    cp(A, 1);
                    join_(A, ea);
                    break;
                case 15:
                    CK(cuEventRecord(es, s));
                    CK(cuStreamWaitEvent(A, es, 0));
                    CK(cuMemsetD8Async(buf + bytes * 5, 1, bytes, A));
                    CK(cuMemsetD8Async(buf + bytes * 5, 1, bytes, A));
                    CK(cuStreamWaitEvent(B, es, 0));
                    CK(cuStreamWaitEvent(D, es, 0));
                    cp(B, 0);
                    cp(D, 1);
                    join_(B, eb);
                    join_(D, ex[0]);
                    ops(s, {w(hpd + 2048, 1)});
                    join_(A, ea);
                    break;
                case 16:
                    cp(s, 0);
                    break;
                case 17:
                    fork_(A);
                    CK(cuMemsetD8Async(buf + bytes * 5, 1, bytes, A));
                    cp(s, 0);
                    ops(s, {w(hpd + 2048, 1)});
                    join_(A, ea);
                    break;
                case 18:
                    fork_(A);
                    CK(cuMemsetD8Async(buf + bytes * 5, 1, bytes, A));
                    CK(cuStreamWaitEvent(B, es, 0));
                    cp(B, 0);
                    join_(B, eb);
                    ops(s, {w(hpd + 2048, 1)});
                    join_(A, ea);
                    break;
                case 19:
                case 20: {
                    int n = mode == 19 ? 3 : 7;
                    CK(cuEventRecord(es, s));
                    for (int k = 0; k < n; k++) {
                        CK(cuStreamWaitEvent(X[k], es, 0));
                        cp(X[k], k % 4);
                    }
                    for (int k = 0; k < n; k++) {
                        join_(X[k], ex[k]);
                        ops(s, {w(hpd + 2048 + 8 * k, 1)});
                    }
                    break;
                }
                case 21: {
                    CK(cuEventRecord(es, s));
                    for (int k = 0; k < 7; k++) {
                        if (k < 2)
                            CK(cuStreamWaitEvent(X[k], es, 0));
                        cp(X[k % 2], k % 4);
                    }
                    for (int k = 0; k < 2; k++) {
                        join_(X[k], ex[k]);
                    }
                    vector<P> v;
                    for (int k = 0; k < 7; k++)
                        v.push_back(w(hpd + 2048 + 8 * k, 1));
                    CK(cuStreamBatchMemOp(s, 7, v.data(), 0));
                    break;
                }
                case 22: {
                    for (int k = 0; k < 7; k++)
                        cp(s, k % 4);
                    vector<P> v;
                    for (int k = 0; k < 7; k++)
                        v.push_back(w(hpd + 2048 + 8 * k, 1));
                    CK(cuStreamBatchMemOp(s, 7, v.data(), 0));
                    break;
                }
                case 23: {
                    CK(cuEventRecord(es, s));
                    for (int k = 0; k < 4; k++) {
                        CK(cuStreamWaitEvent(X[k], es, 0));
                    }
                    for (int k = 0; k < 7; k++)
                        cp(X[k % 4], k % 4);
                    for (int k = 0; k < 4; k++) {
                        join_(X[k], ex[k]);
                    }
                    vector<P> v;
                    for (int k = 0; k < 7; k++)
                        v.push_back(w(hpd + 2048 + 8 * k, 1));
                    CK(cuStreamBatchMemOp(s, 7, v.data(), 0));
                    break;
                }
                case 24: {
                    fork_(X[0]);
                    cp(X[0], 0);
                    ops(s, {wt(F + 8, 1)});
                    fork_(X[1]);
                    cp(X[1], 1);
                    ops(s, {wt(F + 8, 1)});
                    fork_(X[2]);
                    cp(X[2], 2);
                    for (int k = 0; k < 3; k++) {
                        join_(X[k], ex[k]);
                        ops(s, {w(hpd + 2048 + 8 * k, 1)});
                    }
                    break;
                }
                case 25: {
                    fork_(X[0]);
                    cp(X[0], 0);
                    ops(s, {wt(F + 8, 1)});
                    fork_(X[1]);
                    cp(X[1], 1);
                    ops(s, {wt(F + 8, 1)});
                    cp(s, 2);
                    for (int k = 0; k < 2; k++) {
                        join_(X[k], ex[k]);
                        ops(s, {w(hpd + 2048 + 8 * k, 1)});
                    }
                    break;
                }
                case 26:
                    fork_(A);
                    cp(A, 1);
                    CK(cuStreamWaitEvent(B, es, 0));
                    cp(B, 0);
                    join_(B, eb);
                    ops(s, {w(hpd + 2048, 1)});
                    join_(A, ea);
                    break;
                case 27:
                    fork_(A);
                    cp(A, 1);
                    cp(A, 0);
                    join_(A, ea);
                    break;
                case 13: {
                    CUDA_MEMCPY2D c = {};
                    c.srcMemoryType = c.dstMemoryType = CU_MEMORYTYPE_DEVICE;
                    c.srcDevice = buf;
                    c.dstDevice = buf + bytes * 3;
                    c.srcPitch = c.dstPitch = 65536;
                    c.WidthInBytes = min(bytes, (size_t)65536);
                    c.Height = max<size_t>(1, bytes / 65536);
                    fork_(A);
                    CK(cuMemcpy2DAsync(&c, A));
                    cp(s, 0);
                    join_(A, ea);
                    break;
                }
            }
            ops(s, {wt(F + 8, 1), w(F + 8, after)});
        }
        if (mode == 3 || mode == 11)
            join_(A, ea);
        CK(cuStreamEndCapture(s, &g));
    }
    if (print) {
        size_t nn = 0, ne = 0;
        CK(cuGraphGetNodes(g, 0, &nn));
#if CUDA_VERSION >= 13000
        CK(cuGraphGetEdges(g, 0, 0, 0, &ne));
#else
        CK(cuGraphGetEdges(g, 0, 0, &ne));
#endif
        printf("nodes %zu edges %zu ", nn, ne);
    }
    CK(cuGraphInstantiate(&e, g, 0));
    CK(cuGraphUpload(e, s));
    CK(cuStreamSynchronize(s));
    return e;
}
int main(int c, char** v) {
    mode = atoi(v[1]);
    bytes = atol(v[2]);
    starts = atoi(v[3]);
    CK(cuInit(0));
    CK(cuDeviceGet(&dev, 0));
    CK(cuDevicePrimaryCtxRetain(&ctx, dev));
    CK(cuCtxSetCurrent(ctx));
    CK(cuCtxGetStreamPriorityRange(&lo, &hi));
    void* h;
    CK(cuMemHostAlloc(&h, 16384, CU_MEMHOSTALLOC_DEVICEMAP | CU_MEMHOSTALLOC_PORTABLE));
    memset(h, 0, 16384);
    hp = (volatile uint64_t*)h;
    CK(cuMemHostGetDevicePointer(&hpd, h, 0));
    CK(cuStreamCreate(&s, CU_STREAM_NON_BLOCKING));
    CK(cuStreamCreate(&A, CU_STREAM_NON_BLOCKING));
    CK(cuStreamCreate(&B, CU_STREAM_NON_BLOCKING));
    CK(cuStreamCreateWithPriority(&u, CU_STREAM_NON_BLOCKING, hi));
    CK(cuStreamCreate(&D, CU_STREAM_NON_BLOCKING));
    for (int i = 0; i < 8; i++) {
        CK(cuStreamCreate(&X[i], CU_STREAM_NON_BLOCKING));
        CK(cuEventCreate(&ex[i], CU_EVENT_DISABLE_TIMING));
    }
    for (auto e : {&ea, &eb, &es})
        CK(cuEventCreate(e, CU_EVENT_DISABLE_TIMING));
    CUevent t0e, t1e;
    CK(cuEventCreate(&t0e, 0));
    CK(cuEventCreate(&t1e, 0));
    CK(cuMemAlloc(&F, 4096));
    CK(cuMemAlloc(&buf, bytes * 8));
    uint64_t ones[8] = {1, 1, 1, 1, 1, 1, 1, 1};
    CK(cuMemcpyHtoD(F, ones, 64));
    printf("mode %2d %9zu B %3d starts: ", mode, bytes, starts);
    CUgraphExec t = rec(1, true);
    vector<float> ms;
    for (int i = 0; i < 7; i++) {
        CK(cuEventRecord(t0e, s));
        CK(cuGraphLaunch(t, s));
        CK(cuEventRecord(t1e, s));
        CK(cuEventSynchronize(t1e));
        float f;
        CK(cuEventElapsedTime(&f, t0e, t1e));
        ms.push_back(f * 1000 / starts);
    }
    sort(ms.begin(), ms.end());
    printf("%8.2f us a start; ", ms[3]);
    fflush(stdout);
    CUgraphExec e = rec(0, false);
    CK(cuMemsetD8(F, 0, 64));
    CK(cuCtxSynchronize());
    int launches = c > 4 ? atoi(v[4]) : 1;
    atomic<int> ln{0};
    thread th([&] {
        CK(cuCtxSetCurrent(ctx));
        for (int i = 0; i < launches; i++) {
            CK(cuGraphLaunch(e, s));
            ln++;
        }
    });
    th.detach();
    usleep(launches > 1 ? 200000 : 10000);
    if (launches > 1)
        printf("launched %d of %d ", ln.load(), launches);
    P x = w(hpd, 5);
    CK(cuStreamBatchMemOp(u, 1, &x, 0));
    auto q = C::now();
    while (hp[0] != 5 && us(q) < 3e4)
        ;
    printf("urgent %d ", (int)(hp[0] == 5));
    fflush(stdout);
    uint64_t base = 7;
    hp[50] = 7;
    q = C::now();
    int rounds = 0;
    while ((ln < launches || cuStreamQuery(s) == CUDA_ERROR_NOT_READY) && us(q) < 3e5) {
        if (hp[50] == base) {
            P y[33];
            for (int i = 0; i < 32; i++)
                y[i] = w(F + 8 * (i % 2), 1);
            y[32] = w(hpd + 400, ++base);
            CK(cuStreamBatchMemOp(u, 33, y, 0));
            rounds++;
        }
    }
    printf("%s %.2f ms %d rounds\n", cuStreamQuery(s) == CUDA_SUCCESS ? "drained" : "STUCK", us(q) / 1e3,
           rounds);
    fflush(stdout);
    _exit(0);
}
