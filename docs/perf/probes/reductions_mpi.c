// Times MPI_Allreduce and MPI_Reduce_scatter_block as the example `reductions` times its reductions.
//
// mpicc -O3 -march=native reductions_mpi.c -o reductions_mpi && mpirun -n 4 ./reductions_mpi

#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>

#define ROUNDS 11
#define BYTES_PER_ROUND (64L << 20)

static int compare(const void *one, const void *other) {
    double difference = *(const double *)one - *(const double *)other;
    return (difference > 0) - (difference < 0);
}

int main(int argc, char **argv) {
    MPI_Init(&argc, &argv);
    int rank, ranks;
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &ranks);
    if (rank == 0) printf("bytes,all_reduce,reduce_scatter\n");
    for (long len = 256; len * 4 <= BYTES_PER_ROUND; len *= 4) {
        long starts = BYTES_PER_ROUND / (len * 4) / ranks;
        starts = starts < 1 ? 1 : starts > 2000 ? 2000 : starts;
        float *input = malloc(len * 4), *output = calloc(len, 4);
        for (long at = 0; at < len; at++) input[at] = 1;
        double times[2][ROUNDS + 1];
        for (int scatters = 0; scatters < 2; scatters++) {
            for (int round = 0; round <= ROUNDS; round++) {
                MPI_Barrier(MPI_COMM_WORLD);
                double begin = MPI_Wtime();
                for (long start = 0; start < starts; start++) {
                    if (scatters)
                        MPI_Reduce_scatter_block(input, output, len / ranks, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
                    else
                        MPI_Allreduce(input, output, len, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
                }
                times[scatters][round] = (MPI_Wtime() - begin) / starts * 1e6;
            }
            // The first round warms up.
            qsort(times[scatters] + 1, ROUNDS, sizeof(double), compare);
        }
        if (rank == 0) printf("%ld,%.2f,%.2f\n", len * 4, times[0][1 + ROUNDS / 2], times[1][1 + ROUNDS / 2]);
        free(input);
        free(output);
    }
    MPI_Finalize();
}
