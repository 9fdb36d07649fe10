/* The peer of `cargo xtask bench host`: MPI_Allgather, timed as the program peerlane times itself.
 *
 * Each iteration is barrier, clock, all-gather, clock; its time is the maximum over the ranks. What
 * is reported for a size is the median and the 99th percentile of these maxima. Every byte of the
 * result is checked once a size, into an output that was poisoned before.
 *
 * usage: openmpi_allgather MIN_BYTES MAX_BYTES FACTOR ITERATIONS WARMUP
 * prints one JSON object a line: ranks, total_bytes, shard_bytes, median_us, p99_us, checked */

#include <limits.h>
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static int compare(const void *left, const void *right)
{
    double a = *(const double *)left, b = *(const double *)right;
    return (a > b) - (a < b);
}

/* The byte that `rank` contributes at `index`; unlike for neighbouring ranks, indices and sizes. */
static unsigned char pattern(int rank, size_t index, size_t shard_bytes)
{
    unsigned long long x = ((unsigned long long)rank << 40) ^ (shard_bytes << 20) ^ index;
    x *= 0x9e3779b97f4a7c15ull;
    return (unsigned char)(x >> 56);
}

static void *allocate(size_t bytes)
{
    void *memory = NULL;
    if (posix_memalign(&memory, 4096, bytes ? bytes : 1) != 0) {
        fprintf(stderr, "openmpi_allgather: cannot allocate %zu bytes\n", bytes);
        MPI_Abort(MPI_COMM_WORLD, 1);
    }
    return memory;
}

static void check(const unsigned char *output, int ranks, size_t shard_bytes)
{
    for (int rank = 0; rank < ranks; rank++)
        for (size_t index = 0; index < shard_bytes; index++) {
            unsigned char seen = output[(size_t)rank * shard_bytes + index];
            if (seen != pattern(rank, index, shard_bytes)) {
                fprintf(stderr, "openmpi_allgather: byte %zu of shard %d is wrong\n", index, rank);
                MPI_Abort(MPI_COMM_WORLD, 1);
            }
        }
}

static void measure(int rank, int ranks, size_t shard_bytes, int iterations, int warmup)
{
    size_t total_bytes = shard_bytes * (size_t)ranks;
    unsigned char *input = allocate(shard_bytes), *output = allocate(total_bytes);
    double *times = allocate(sizeof(double) * (size_t)iterations);

    for (size_t index = 0; index < shard_bytes; index++)
        input[index] = pattern(rank, index, shard_bytes);
    memset(output, 0xa5, total_bytes);
    MPI_Allgather(input, (int)shard_bytes, MPI_BYTE, output, (int)shard_bytes, MPI_BYTE,
                  MPI_COMM_WORLD);
    check(output, ranks, shard_bytes);

    for (int iteration = -warmup; iteration < iterations; iteration++) {
        MPI_Barrier(MPI_COMM_WORLD);
        double start = MPI_Wtime();
        MPI_Allgather(input, (int)shard_bytes, MPI_BYTE, output, (int)shard_bytes, MPI_BYTE,
                      MPI_COMM_WORLD);
        double mine = MPI_Wtime() - start, slowest = 0;
        MPI_Reduce(&mine, &slowest, 1, MPI_DOUBLE, MPI_MAX, 0, MPI_COMM_WORLD);
        if (iteration >= 0)
            times[iteration] = slowest * 1e6;
    }

    if (rank == 0) {
        qsort(times, (size_t)iterations, sizeof(double), compare);
        int last = iterations - 1;
        double median = (times[last / 2] + times[(last + 1) / 2]) / 2;
        printf("{\"ranks\":%d,\"total_bytes\":%zu,\"shard_bytes\":%zu,\"median_us\":%.3f,"
               "\"p99_us\":%.3f,\"checked\":true}\n",
               ranks, total_bytes, shard_bytes, median, times[(last * 99 + 99) / 100]);
        fflush(stdout);
    }
    free(times);
    free(output);
    free(input);
}

int main(int argc, char **argv)
{
    MPI_Init(&argc, &argv);
    int rank, ranks;
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &ranks);
    if (argc != 6) {
        if (rank == 0)
            fprintf(stderr, "usage: %s MIN_BYTES MAX_BYTES FACTOR ITERATIONS WARMUP\n", argv[0]);
        MPI_Finalize();
        return 2;
    }
    size_t min = strtoull(argv[1], NULL, 10), max = strtoull(argv[2], NULL, 10);
    size_t factor = strtoull(argv[3], NULL, 10);
    int iterations = atoi(argv[4]), warmup = atoi(argv[5]);
    if (factor < 2 || iterations < 1 || min < 1 || max / (size_t)ranks > INT_MAX) {
        if (rank == 0)
            fprintf(stderr, "%s: FACTOR >= 2, ITERATIONS >= 1, MIN_BYTES >= 1, shards < 2 GiB\n",
                    argv[0]);
        MPI_Finalize();
        return 2;
    }
    for (size_t total = min; total <= max; total *= factor)
        measure(rank, ranks, total / (size_t)ranks, iterations, warmup);
    MPI_Finalize();
    return 0;
}
