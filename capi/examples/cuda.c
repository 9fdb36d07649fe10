/* On NVIDIA GPUs: gathers on a stream into memory of the program, and then from a graph that is replayed.
 *
 * cc cuda.c -I../include -I/usr/local/cuda/include -L../../target/release -lpeerlane_c -L/usr/local/cuda/lib64 -lcudart
 * Ranks may share a GPU. */
#include <cuda_runtime.h>

#include "check.h"

#define CUDA(call)                                                                                \
    do {                                                                                          \
        cudaError_t error_ = (call);                                                              \
        if (error_ != cudaSuccess) {                                                              \
            fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, cudaGetErrorString(error_));       \
            exit(1);                                                                              \
        }                                                                                         \
    } while (0)

enum { COUNT = 100000, REPLAYS = 20 };

static void expect_gathered(const int32_t *gathered, uint32_t ranks, int32_t step) {
    for (uint32_t from = 0; from < ranks; from++)
        for (int at = 0; at < COUNT; at++) EXPECT(gathered[from * COUNT + (unsigned)at] == (int32_t)from * 1000 + step);
}

int main(void) {
    peerlane_group_options options = PEERLANE_GROUP_OPTIONS_INIT;
    options.backend = "cuda";
    peerlane_group *group;
    CHECK(peerlane_group_open(&options, &group));
    uint32_t rank, ranks;
    CHECK(peerlane_group_rank(group, &rank, &ranks));
    int devices;
    CUDA(cudaGetDeviceCount(&devices));
    CUDA(cudaSetDevice((int)rank % devices));
    cudaStream_t stream;
    CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));

    /* The arena of the program: the input, and behind it the output. */
    size_t bytes = (1 + ranks) * COUNT * sizeof(int32_t);
    void *arena;
    CUDA(cudaMalloc(&arena, bytes));
    peerlane_window *window;
    CHECK(peerlane_window_over(group, arena, bytes, &window));
    peerlane_operation_options description = PEERLANE_OPERATION_OPTIONS_INIT;
    description.collective = PEERLANE_COLLECTIVE_ALL_GATHER;
    description.dtype = PEERLANE_DTYPE_I32;
    description.count = COUNT;
    description.capturable = true;
    description.input = window;
    description.output = window;
    description.output_begin = COUNT;
    peerlane_operation *gather;
    CHECK(peerlane_operation_prepare(group, &description, &gather));

    int32_t *input, *gathered;
    CUDA(cudaMallocHost((void **)&input, COUNT * sizeof(int32_t)));
    CUDA(cudaMallocHost((void **)&gathered, ranks * COUNT * sizeof(int32_t)));
    void *output;
    for (int32_t step = 0; step < 10; step++) {
        for (int at = 0; at < COUNT; at++) input[at] = (int32_t)rank * 1000 + step;
        CUDA(cudaMemcpyAsync(arena, input, COUNT * sizeof(int32_t), cudaMemcpyHostToDevice, stream));
        CHECK(peerlane_operation_start_on(gather, stream, &output));
        EXPECT(output == (char *)arena + COUNT * sizeof(int32_t));
        CUDA(cudaMemcpyAsync(gathered, output, ranks * COUNT * sizeof(int32_t), cudaMemcpyDeviceToHost, stream));
        CHECK(peerlane_operation_end_lease(gather));
        CUDA(cudaStreamSynchronize(stream));
        expect_gathered(gathered, ranks, step);
    }

    cudaGraph_t graph;
    cudaGraphExec_t replayed;
    CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
    CUDA(cudaMemcpyAsync(arena, input, COUNT * sizeof(int32_t), cudaMemcpyHostToDevice, stream));
    CHECK(peerlane_operation_start_on(gather, stream, &output));
    CUDA(cudaMemcpyAsync(gathered, output, ranks * COUNT * sizeof(int32_t), cudaMemcpyDeviceToHost, stream));
    CHECK(peerlane_operation_end_lease(gather));
    CUDA(cudaStreamEndCapture(stream, &graph));
    CUDA(cudaGraphInstantiate(&replayed, graph, 0));
    for (int32_t step = 100; step < 100 + REPLAYS; step++) {
        for (int at = 0; at < COUNT; at++) input[at] = (int32_t)rank * 1000 + step;
        CUDA(cudaGraphLaunch(replayed, stream));
        CUDA(cudaStreamSynchronize(stream));
        CHECK(peerlane_operation_check(gather));
        expect_gathered(gathered, ranks, step);
    }
    if (peerlane_operation_start_on(gather, NULL, NULL) == PEERLANE_STATUS_OK) EXPECT(!"the default stream is refused");
    if (rank == 0) printf("10 starts and %d replays on %u ranks are right; refused: %s\n", REPLAYS, ranks, peerlane_error_text());

    CUDA(cudaGraphExecDestroy(replayed));
    CUDA(cudaGraphDestroy(graph));
    CHECK(peerlane_operation_destroy(gather));
    CHECK(peerlane_window_release(group, window));
    CUDA(cudaFree(arena));
    CHECK(peerlane_group_close(group));
    return 0;
}
