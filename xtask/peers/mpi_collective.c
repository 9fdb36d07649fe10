/* The peer of `cargo xtask bench host`: a collective of MPI, timed as the program peerlane times itself.
 *
 * Each iteration is barrier, clock, collective, clock; its time is the maximum over the ranks. What is
 * reported for a size is the median and the 99th percentile of these maxima. Every byte of the result
 * is checked once a size, into an output that was poisoned before. The root is rank 0. In an
 * all-to-all-v, rank p sends the length of number q - p (modulo the ranks) to rank q; the lengths are
 * in the ratio 0:1:2 and so on. Reductions add 32-bit floats.
 *
 * usage: mpi_collective COLLECTIVE MIN_BYTES MAX_BYTES FACTOR ITERATIONS WARMUP
 * prints one JSON object a line: ranks, total_bytes, block_bytes, median_us, p99_us, checked */

#include <limits.h>
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum collective {
    ALL_GATHER, GATHER, SCATTER, ALL_TO_ALL_V, ALL_TO_ALL, BROADCAST,
    ALL_REDUCE, REDUCE_SCATTER, REDUCE, SCAN, COLLECTIVES
};
static const char *const names[] = {"all-gather", "gather", "scatter", "all-to-all-v", "all-to-all",
                                    "broadcast", "all-reduce", "reduce-scatter", "reduce", "scan"};

/* What a rank sends and receives: a block for each rank, or one block. */
struct side {
    int blocks, *bytes, *offsets;
    size_t all;
    unsigned char *memory;
};

static int compare(const void *left, const void *right)
{
    double a = *(const double *)left, b = *(const double *)right;
    return (a > b) - (a < b);
}

/* The byte at `index` of a block; unlike for neighbouring ranks, indices and sizes. */
static unsigned char pattern(int from, int to, size_t index, size_t bytes)
{
    unsigned long long x = ((unsigned long long)from << 40) ^ ((unsigned long long)to << 50);
    x = (x ^ (bytes << 20) ^ index) * 0x9e3779b97f4a7c15ull;
    return (unsigned char)(x >> 56);
}

/* The element that a rank contributes at `index`, so small that sums are exact. */
static float element(int rank, size_t index)
{
    return (float)((rank + 1) * (int)(index * 7 % 61));
}

static void *allocate(size_t bytes)
{
    void *memory = NULL;
    if (posix_memalign(&memory, 4096, bytes ? bytes : 1) != 0) {
        fprintf(stderr, "mpi_collective: cannot allocate %zu bytes\n", bytes);
        MPI_Abort(MPI_COMM_WORLD, 1);
    }
    return memory;
}

static int reduces(int collective) { return collective >= ALL_REDUCE; }

/* The bytes of the block from one rank to another. */
static size_t block(int collective, int from, int to, int ranks, size_t total)
{
    size_t number = (size_t)((to - from + ranks) % ranks);
    size_t sum = (size_t)ranks * (size_t)(ranks - 1) / 2;
    switch (collective) {
    case GATHER:
        return to == 0 ? total / (size_t)ranks : 0;
    case SCATTER:
        return from == 0 ? total / (size_t)ranks : 0;
    case ALL_TO_ALL_V:
        if (ranks == 1)
            return total;
        return total * (number * (number + 1) / 2) / sum - total * (number * (number - 1) / 2) / sum;
    default:
        return total / (size_t)ranks;
    }
}

/* The blocks of a side: one if all ranks send or receive the same, or if a rank receives one sum. */
static int blocks(int collective, int sends, int ranks)
{
    switch (collective) {
    case ALL_GATHER:
    case GATHER:
        return sends ? 1 : ranks;
    case REDUCE_SCATTER:
        return sends ? ranks : 1;
    case BROADCAST:
    case ALL_REDUCE:
    case REDUCE:
    case SCAN:
        return 1;
    default:
        return ranks;
    }
}

/* Creates the side of `rank`: what it sends, or what it receives. */
static struct side side(int collective, int rank, int sends, int ranks, size_t total)
{
    struct side side = {.blocks = blocks(collective, sends, ranks)};
    int is_whole = blocks(collective, 0, ranks) == 1 && blocks(collective, 1, ranks) == 1;
    side.bytes = allocate(sizeof(int) * (size_t)side.blocks);
    side.offsets = allocate(sizeof(int) * (size_t)side.blocks);
    for (int peer = 0; peer < side.blocks; peer++) {
        size_t bytes = is_whole           ? total
                       : side.blocks == 1 ? total / (size_t)ranks
                                          : block(collective, sends ? rank : peer,
                                                  sends ? peer : rank, ranks, total);
        side.bytes[peer] = (int)bytes;
        side.offsets[peer] = (int)side.all;
        side.all += bytes;
    }
    side.memory = allocate(side.all);
    return side;
}

static void start(int collective, int rank, const struct side *in, const struct side *out)
{
    int floats = out->bytes[0] / (int)sizeof(float);
    switch (collective) {
    case ALL_GATHER:
        MPI_Allgather(in->memory, in->bytes[0], MPI_BYTE, out->memory, in->bytes[0], MPI_BYTE,
                      MPI_COMM_WORLD);
        break;
    case GATHER:
        MPI_Gather(in->memory, in->bytes[0], MPI_BYTE, out->memory, in->bytes[0], MPI_BYTE, 0,
                   MPI_COMM_WORLD);
        break;
    case SCATTER:
        MPI_Scatter(in->memory, out->bytes[0], MPI_BYTE, out->memory, out->bytes[0], MPI_BYTE, 0,
                    MPI_COMM_WORLD);
        break;
    case ALL_TO_ALL:
        MPI_Alltoall(in->memory, in->bytes[0], MPI_BYTE, out->memory, in->bytes[0], MPI_BYTE,
                     MPI_COMM_WORLD);
        break;
    case BROADCAST:
        MPI_Bcast(rank == 0 ? in->memory : out->memory, in->bytes[0], MPI_BYTE, 0, MPI_COMM_WORLD);
        break;
    case ALL_REDUCE:
        MPI_Allreduce(in->memory, out->memory, floats, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
        break;
    case REDUCE_SCATTER:
        MPI_Reduce_scatter_block(in->memory, out->memory, floats, MPI_FLOAT, MPI_SUM,
                                 MPI_COMM_WORLD);
        break;
    case REDUCE:
        MPI_Reduce(in->memory, out->memory, floats, MPI_FLOAT, MPI_SUM, 0, MPI_COMM_WORLD);
        break;
    case SCAN:
        MPI_Scan(in->memory, out->memory, floats, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
        break;
    default:
        MPI_Alltoallv(in->memory, in->bytes, in->offsets, MPI_BYTE, out->memory, out->bytes,
                      out->offsets, MPI_BYTE, MPI_COMM_WORLD);
    }
}

static void wrong(int index, int from)
{
    fprintf(stderr, "mpi_collective: element %d from rank %d is wrong\n", index, from);
    MPI_Abort(MPI_COMM_WORLD, 1);
}

static void check(int collective, const struct side *out, int rank, int ranks)
{
    int differ = collective == SCATTER || collective == ALL_TO_ALL_V || collective == ALL_TO_ALL;
    if ((collective == BROADCAST && rank == 0) || (collective == REDUCE && rank != 0))
        return;
    if (reduces(collective)) {
        int floats = out->bytes[0] / (int)sizeof(float), terms = collective == SCAN ? rank + 1 : ranks;
        size_t first = collective == REDUCE_SCATTER ? (size_t)rank * (size_t)floats : 0;
        for (int index = 0; index < floats; index++) {
            float sum = 0;
            for (int from = 0; from < terms; from++)
                sum += element(from, first + (size_t)index);
            if (((const float *)out->memory)[index] != sum)
                wrong(index, rank);
        }
        return;
    }
    for (int from = 0; from < out->blocks; from++)
        for (int index = 0; index < out->bytes[from]; index++) {
            size_t bytes = (size_t)out->bytes[from];
            if (out->memory[out->offsets[from] + index] !=
                pattern(from, differ ? rank : 0, (size_t)index, bytes))
                wrong(index, from);
        }
}

static void measure(int collective, int rank, int ranks, size_t total, int iterations, int warmup)
{
    struct side in = side(collective, rank, 1, ranks, total);
    struct side out = side(collective, rank, 0, ranks, total);
    double *times = allocate(sizeof(double) * (size_t)iterations);

    if (reduces(collective))
        for (size_t index = 0; index < in.all / sizeof(float); index++)
            ((float *)in.memory)[index] = element(rank, index);
    else
        for (int to = 0; to < in.blocks; to++)
            for (int index = 0; index < in.bytes[to]; index++)
                in.memory[in.offsets[to] + index] =
                    pattern(rank, to, (size_t)index, (size_t)in.bytes[to]);
    memset(out.memory, 0xa5, out.all);
    start(collective, rank, &in, &out);
    check(collective, &out, rank, ranks);

    for (int iteration = -warmup; iteration < iterations; iteration++) {
        MPI_Barrier(MPI_COMM_WORLD);
        double begin = MPI_Wtime();
        start(collective, rank, &in, &out);
        double mine = MPI_Wtime() - begin, slowest = 0;
        MPI_Reduce(&mine, &slowest, 1, MPI_DOUBLE, MPI_MAX, 0, MPI_COMM_WORLD);
        if (iteration >= 0)
            times[iteration] = slowest * 1e6;
    }

    if (rank == 0) {
        qsort(times, (size_t)iterations, sizeof(double), compare);
        int last = iterations - 1;
        double median = (times[last / 2] + times[(last + 1) / 2]) / 2;
        printf("{\"ranks\":%d,\"total_bytes\":%zu,\"block_bytes\":%zu,\"median_us\":%.3f,"
               "\"p99_us\":%.3f,\"checked\":true}\n",
               ranks, total, total / (size_t)ranks, median, times[(last * 99 + 99) / 100]);
        fflush(stdout);
    }
    free(times);
    struct side *sides[] = {&in, &out};
    for (int number = 0; number < 2; number++) {
        free(sides[number]->memory);
        free(sides[number]->offsets);
        free(sides[number]->bytes);
    }
}

int main(int argc, char **argv)
{
    MPI_Init(&argc, &argv);
    int rank, ranks, collective = 0;
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &ranks);
    while (argc > 1 && collective < COLLECTIVES && strcmp(argv[1], names[collective]) != 0)
        collective++;
    if (argc != 7 || collective == COLLECTIVES) {
        if (rank == 0)
            fprintf(stderr, "usage: %s COLLECTIVE MIN_BYTES MAX_BYTES FACTOR ITERATIONS WARMUP\n",
                    argv[0]);
        MPI_Finalize();
        return 2;
    }
    size_t min = strtoull(argv[2], NULL, 10), max = strtoull(argv[3], NULL, 10);
    size_t factor = strtoull(argv[4], NULL, 10);
    int iterations = atoi(argv[5]), warmup = atoi(argv[6]);
    if (factor < 2 || iterations < 1 || min < 1 || max > INT_MAX) {
        if (rank == 0)
            fprintf(stderr, "%s: FACTOR >= 2, ITERATIONS >= 1, MIN_BYTES >= 1, MAX_BYTES < 2 GiB\n",
                    argv[0]);
        MPI_Finalize();
        return 2;
    }
    for (size_t total = min; total <= max; total *= factor)
        measure(collective, rank, ranks, total, iterations, warmup);
    MPI_Finalize();
    return 0;
}
