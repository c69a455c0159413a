/* Attention over several ranks, in C: each holds a part of the sequence and gets its part of the output, which is
 * compared with one rank's.
 *
 *     mpirun -n 4 ring                                a GPU for each rank of a host, by NCCL
 *     mpirun -n 3 ring build/tests/libfake_nccl.so    on the CPU, by a library that exchanges memory of the host
 *
 *     nvcc -DRING_CUDA ring.c -lacromion_nccl -lacromion      for GPUs, by CUDA's runtime; see CMakeLists.txt
 *     cc ring.c -lacromion_nccl -lacromion -lm                for the CPU
 *
 * Ranks are told apart by what mpirun, srun or torchrun put in the environment, and NCCL's id goes from rank 0 to the
 * others by a file, RING_FILE or ring.id: a program that uses MPI sends the 128 bytes by MPI_Bcast. */
#include <acromion_nccl.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

static const char PROBLEM[] = "b1:h8:s1000:d64:causal"; /* the whole; float16 */

enum {
    HEADS = 8,
    ROWS = 1000,
    DIM = 64
};

/* Ends the program when a call fails. */
static void die(const char *call, const char *error)
{
    fprintf(stderr, "%s: %s\n", call, error);
    exit(1);
}
#define ACR(call) ((call) == ACR_OK ? (void)0 : die(#call, acr_last_error()))
#define GROUP(call) ((call) == ACR_OK ? (void)0 : die(#call, acr_group_last_error()))

/* ---- Memory: CUDA's, or the host's own --------------------------------------------------------------------------- */

#ifdef RING_CUDA
#include <cuda_runtime_api.h>

static const char BACKEND[] = "cuda";

static void check(cudaError_t error)
{
    if (error == cudaSuccess)
        return;
    fprintf(stderr, "CUDA: %s\n", cudaGetErrorString(error));
    exit(1);
}

static void use_device(int device)
{
    check(cudaSetDevice(device));
}

static void *device_memory(size_t bytes)
{
    void *memory = NULL;
    check(cudaMalloc(&memory, bytes));
    return memory;
}

static void device_free(void *memory)
{
    check(cudaFree(memory));
}

static void copy(void *to, const void *from, size_t bytes)
{
    check(cudaMemcpy(to, from, bytes, cudaMemcpyDefault));
}
#else
static const char BACKEND[] = "cpu";

static void use_device(int device)
{
    (void)device;
}

static void *device_memory(size_t bytes)
{
    void *memory = aligned_alloc(256, (bytes + 255) / 256 * 256);
    if (!memory)
        exit(1);
    return memory;
}

static void device_free(void *memory)
{
    free(memory);
}

static void copy(void *to, const void *from, size_t bytes)
{
    memcpy(to, from, bytes);
}
#endif

/* ---- Ranks ------------------------------------------------------------------------------------------------------- */

/* The first of these variables that is set, else `otherwise`. */
static int number_of(const char *const names[], int otherwise)
{
    for (int i = 0; names[i]; i++)
        if (getenv(names[i]))
            return (int)strtol(getenv(names[i]), NULL, 10);
    return otherwise;
}

/* Rank 0 writes the id to a file of another name and renames it, so that nobody reads half of it. The file must not be
 * there before. */
static acr_group_id share_id(int rank, const char *library)
{
    const char *path = getenv("RING_FILE") ? getenv("RING_FILE") : "ring.id";
    char part[512];
    acr_group_id id;
    snprintf(part, sizeof part, "%s.part", path);
    if (rank == 0) {
        GROUP(acr_group_id_create(&id, library));
        FILE *file = fopen(part, "wb");
        if (!file || fwrite(&id, sizeof id, 1, file) != 1 || fclose(file) != 0 || rename(part, path) != 0) {
            perror(part);
            exit(1);
        }
        return id;
    }
    FILE *file;
    while (!(file = fopen(path, "rb"))) /* whoever started the ranks ends them if rank 0 fails */
        nanosleep(&(struct timespec){0, 10000000}, NULL);
    if (fread(&id, sizeof id, 1, file) != 1) {
        fprintf(stderr, "%s: is no id\n", path);
        exit(1);
    }
    fclose(file);
    return id;
}

/* ---- Attention --------------------------------------------------------------------------------------------------- */

typedef unsigned short half; /* the bits of a float16 */

/* A value in (-1, 1), the same on every rank: sign, exponent of [0.25, 0.5) or [0.5, 1), mantissa. */
static half value_of(size_t i, unsigned salt)
{
    const unsigned x = ((unsigned)i * 2654435761u) ^ (salt * 40503u) ^ ((unsigned)i >> 7);
    return (half)((x >> 16 & 0x8000u) | (13u + (x >> 5 & 1u)) << 10 | (x >> 10 & 0x3ffu));
}

static float float_of(half h)
{
    const int exponent = h >> 10 & 31, mantissa = h & 0x3ff;
    const float size = exponent ? ldexpf((float)(1024 + mantissa), exponent - 25) : ldexpf((float)mantissa, -24);
    return h & 0x8000 ? -size : size;
}

/* A tensor [heads, rows, dim] with only the rows that a rank holds. */
static half *rows_of(const half *whole, const acr_rows rows[2])
{
    const size_t held = (size_t)(rows[0].count + rows[1].count);
    half *out = malloc(HEADS * held * DIM * sizeof *out), *at = out;
    if (!out)
        exit(1);
    for (size_t h = 0; h < HEADS; h++)
        for (int i = 0; i < 2; i++) {
            memcpy(at, whole + (h * ROWS + (size_t)rows[i].first) * DIM, (size_t)rows[i].count * DIM * sizeof *at);
            at += rows[i].count * DIM;
        }
    return out;
}

static void *to_device(const half *host, size_t elements)
{
    void *memory = device_memory(elements * sizeof *host);
    copy(memory, host, elements * sizeof *host);
    return memory;
}

/* The largest difference from one rank's output. */
static float differ(acr_ctx *ctx, const acr_problem *problem, half *const inputs[3], const acr_rows rows[2],
                    const half *mine, size_t held)
{
    static half whole[HEADS * ROWS * DIM];
    void *tensors[4];
    for (int t = 0; t < 4; t++)
        tensors[t] = to_device(t < 3 ? inputs[t] : whole, sizeof whole / sizeof *whole);
    const acr_buffers b = {.size = sizeof b, .q = tensors[0], .k = tensors[1], .v = tensors[2], .o = tensors[3]};
    ACR(acr_forward(ctx, problem, &b, NULL));
    copy(whole, b.o, sizeof whole);
    half *want = rows_of(whole, rows);
    float most = 0;
    for (size_t i = 0; i < HEADS * held * DIM; i++)
        most = fmaxf(most, fabsf(float_of(want[i]) - float_of(mine[i])));
    free(want);
    for (int t = 0; t < 4; t++)
        device_free(tensors[t]);
    return most;
}

/* One execution of the plan by this rank, on the tensors that it takes from the whole ones. */
static float execute(acr_ctx *ctx, acr_group *group, acr_group_plan *plan, const acr_problem *problem,
                     const acr_rows rows[2])
{
    /* A program would make only its own rows; here every rank makes all of them, to compare. */
    const size_t held = (size_t)(rows[0].count + rows[1].count);
    half *inputs[3], *mine = NULL;
    void *tensors[4];
    for (unsigned t = 0; t < 3; t++) {
        if (!(inputs[t] = malloc(HEADS * ROWS * DIM * sizeof **inputs)))
            exit(1);
        for (size_t i = 0; i < HEADS * ROWS * DIM; i++)
            inputs[t][i] = value_of(i, t);
        free(mine);
        mine = rows_of(inputs[t], rows);
        tensors[t] = to_device(mine, HEADS * held * DIM);
    }
    tensors[3] = device_memory(HEADS * held * DIM * sizeof(half));
    const acr_buffers b = {.size = sizeof b, .q = tensors[0], .k = tensors[1], .v = tensors[2], .o = tensors[3]};
    GROUP(acr_group_execute(plan, &b, NULL));
    GROUP(acr_group_wait(group, NULL, 60000)); /* what went wrong on the way, here or on another rank */
    copy(mine, b.o, HEADS * held * DIM * sizeof(half));
    const float most = differ(ctx, problem, inputs, rows, mine, held);
    for (int t = 0; t < 4; t++)
        device_free(tensors[t]);
    for (int t = 0; t < 3; t++)
        free(inputs[t]);
    free(mine);
    return most;
}

int main(int argc, char **argv)
{
    static const char *const rank_names[] = {"OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID", "RANK", NULL};
    static const char *const size_names[] = {"OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_NTASKS", "WORLD_SIZE", NULL};
    static const char *const local_names[] = {"OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "SLURM_LOCALID",
                                              "LOCAL_RANK", NULL};
    const int rank = number_of(rank_names, 0), ranks = number_of(size_names, 1);
    const int device = strcmp(BACKEND, "cuda") == 0 ? number_of(local_names, rank) : 0;

    use_device(device);
    acr_ctx_options ctx_options = ACR_CTX_OPTIONS_INIT;
    ctx_options.backend = BACKEND;
    ctx_options.device = device;
    acr_ctx *ctx;
    ACR(acr_ctx_create(&ctx, &ctx_options));

    acr_group_options options = ACR_GROUP_OPTIONS_INIT;
    options.rank = rank;
    options.ranks = ranks;
    options.device = device;
    options.library = argc > 1 ? argv[1] : NULL;
    const acr_group_id id = share_id(rank, options.library);
    options.id = &id;
    acr_group *group;
    GROUP(acr_group_create(&group, ctx, &options));

    acr_problem problem;
    acr_group_plan *plan;
    ACR(acr_problem_parse(&problem, PROBLEM, NULL));
    GROUP(acr_group_plan_create(&plan, group, &problem, ACR_SCHEDULE_AUTO, ACR_ZIGZAG, ACR_ESTIMATE));

    acr_rows rows[2];
    GROUP(acr_shard_rows(rows, ROWS, ranks, rank, ACR_ZIGZAG));
    const float most = execute(ctx, group, plan, &problem, rows);
    printf("rank %d of %d: %d of %d rows, at most %g from one rank's; %zu bytes sent\n", rank, ranks,
           (int)(rows[0].count + rows[1].count), ROWS, (double)most, acr_group_plan_traffic(plan));
    acr_group_plan_destroy(plan);
    acr_group_destroy(group);
    acr_ctx_destroy(ctx);
    return most <= 0x1p-9f ? 0 : 1; /* a part and the output are rounded, of values below 1 */
}
