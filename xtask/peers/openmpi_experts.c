/* The peer of `cargo xtask bench experts`: MPI_Alltoall of counts, then MPI_Alltoallv of rows, timed as the example
 * experts of peerlane-cli times itself.
 *
 * Each rank has TOKENS rows, each of which goes to a random rank; with SKEW, half of them go to rank 0. The rows for one
 * rank follow each other. Each iteration has another routing, of ROUTINGS. An iteration is barrier, clock, counts,
 * rows, clock; its time is the maximum over the ranks. What is reported is the median and the 99th percentile of these
 * maxima. Every byte is checked once for each routing.
 *
 * usage: openmpi_experts TOKENS ROW_BYTES SKEW ITERATIONS WARMUP
 * prints one JSON object: tokens, median_us, p99_us, checked */

#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { ROUTINGS = 8 };

static int compare(const void *left, const void *right)
{
    double a = *(const double *)left, b = *(const double *)right;
    return (a > b) - (a < b);
}

static void *allocate(size_t bytes)
{
    void *memory = NULL;
    if (posix_memalign(&memory, 4096, bytes ? bytes : 1) != 0) {
        fprintf(stderr, "openmpi_experts: cannot allocate %zu bytes\n", bytes);
        MPI_Abort(MPI_COMM_WORLD, 1);
    }
    return memory;
}

static unsigned long long mixed(unsigned long long value)
{
    value = (value + 0x9e3779b97f4a7c15ull) * 0xbf58476d1ce4e5b9ull;
    value = (value ^ (value >> 27)) * 0x94d049bb133111ebull;
    return value ^ (value >> 31);
}

/* The rank to which a token goes; the same function is in the example. */
static int destination(int routing, int from, int token, int ranks, int skew)
{
    unsigned long long key = (unsigned long long)routing << 48 | (unsigned long long)from << 32;
    unsigned long long random = mixed(key | (unsigned long long)token);
    if (skew && random & 1)
        return 0;
    return (int)((random >> 8) % (unsigned long long)ranks);
}

static unsigned char pattern(int from, int to, size_t row)
{
    return (unsigned char)(mixed(((size_t)from << 40) ^ ((size_t)to << 50) ^ row) >> 56);
}

int main(int argc, char **argv)
{
    MPI_Init(&argc, &argv);
    int rank, ranks;
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &ranks);
    if (argc != 6) {
        if (rank == 0)
            fprintf(stderr, "usage: %s TOKENS ROW_BYTES SKEW ITERATIONS WARMUP\n", argv[0]);
        MPI_Finalize();
        return 2;
    }
    int tokens = atoi(argv[1]), row = atoi(argv[2]), skew = atoi(argv[3]);
    int iterations = atoi(argv[4]), warmup = atoi(argv[5]);

    size_t words = (size_t)ranks;
    int *rows = calloc(ROUTINGS * words, sizeof(int));
    int *send = calloc(words, sizeof(int)), *sent_at = calloc(words, sizeof(int));
    int *coming = calloc(words, sizeof(int)), *receive = calloc(words, sizeof(int));
    int *received_at = calloc(words, sizeof(int));
    for (int routing = 0; routing < ROUTINGS; routing++)
        for (int token = 0; token < tokens; token++)
            rows[routing * ranks + destination(routing, rank, token, ranks, skew)]++;

    unsigned char *input = allocate((size_t)tokens * (size_t)row);
    unsigned char *output = allocate((size_t)tokens * (size_t)row * words);
    double *times = allocate(sizeof(double) * (size_t)iterations);

    /* The first iterations check each routing. */
    for (int iteration = -warmup - ROUTINGS; iteration < iterations; iteration++) {
        int *counts = rows + (iteration + warmup + ROUTINGS) % ROUTINGS * ranks;
        int checks = iteration < -warmup;
        if (checks) {
            unsigned char *at = input;
            for (int to = 0; to < ranks; to++)
                for (int index = 0; index < counts[to]; index++, at += row)
                    memset(at, pattern(rank, to, (size_t)index), (size_t)row);
        }

        MPI_Barrier(MPI_COMM_WORLD);
        double begin = MPI_Wtime();
        MPI_Alltoall(counts, 1, MPI_INT, coming, 1, MPI_INT, MPI_COMM_WORLD);
        int sent = 0, received = 0;
        for (int peer = 0; peer < ranks; peer++) {
            send[peer] = counts[peer] * row;
            receive[peer] = coming[peer] * row;
            sent_at[peer] = sent;
            received_at[peer] = received;
            sent += send[peer];
            received += receive[peer];
        }
        MPI_Alltoallv(input, send, sent_at, MPI_BYTE, output, receive, received_at, MPI_BYTE,
                      MPI_COMM_WORLD);
        double mine = MPI_Wtime() - begin, slowest = 0;
        MPI_Reduce(&mine, &slowest, 1, MPI_DOUBLE, MPI_MAX, 0, MPI_COMM_WORLD);
        if (iteration >= 0)
            times[iteration] = slowest * 1e6;

        unsigned char *at = output;
        for (int from = 0; checks && from < ranks; from++)
            for (int index = 0; index < coming[from]; index++)
                for (int byte = 0; byte < row; byte++)
                    if (*at++ != pattern(from, rank, (size_t)index)) {
                        fprintf(stderr, "openmpi_experts: row %d from rank %d is wrong\n", index, from);
                        MPI_Abort(MPI_COMM_WORLD, 1);
                    }
    }

    if (rank == 0) {
        qsort(times, (size_t)iterations, sizeof(double), compare);
        int last = iterations - 1;
        double median = (times[last / 2] + times[(last + 1) / 2]) / 2;
        printf("{\"tokens\":%d,\"median_us\":%.3f,\"p99_us\":%.3f,\"checked\":true}\n", tokens, median,
               times[(last * 99 + 99) / 100]);
        fflush(stdout);
    }
    MPI_Finalize();
    return 0;
}
