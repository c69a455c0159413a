/* On the GPU, from a program that uses the CUDA runtime: a plan made once, then executions captured into a CUDA graph,
 * as an inference engine does it. Without a usable GPU it says why and ends with success. */
#include <acromion.h>
#include <cuda_runtime_api.h>
#include <stdio.h>
#include <stdlib.h>

/* Ends the program when a call fails. */
static void die(const char *call, const char *error)
{
    fprintf(stderr, "%s: %s\n", call, error);
    exit(1);
}
#define CUDA(call) ((call) == cudaSuccess ? (void)0 : die(#call, cudaGetErrorString(cudaGetLastError())))

#define ACR(call) ((call) == ACR_OK ? (void)0 : die(#call, acr_last_error()))

enum {
    ELEMS = 2 * 8 * 512 * 64,
    LAUNCHES = 100
};
static const char PROBLEM[] = "f16:b2:h8:s512:d64";

/* Replays a graph of LAUNCHES executions and returns the microseconds of one. */
static float replay_us(const acr_plan *plan, const acr_buffers *buffers, void *workspace, cudaStream_t stream)
{
    cudaGraph_t graph;
    cudaGraphExec_t executable;
    cudaEvent_t first, end;
    float ms;
    CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
    for (int i = 0; i < LAUNCHES; i++)
        ACR(acr_execute(plan, buffers, workspace, acr_plan_workspace(plan), stream));
    CUDA(cudaStreamEndCapture(stream, &graph));
    CUDA(cudaGraphInstantiate(&executable, graph, 0));
    CUDA(cudaEventCreate(&first));
    CUDA(cudaEventCreate(&end));
    CUDA(cudaGraphLaunch(executable, stream)); /* warm up */
    CUDA(cudaEventRecord(first, stream));
    CUDA(cudaGraphLaunch(executable, stream));
    CUDA(cudaEventRecord(end, stream));
    CUDA(cudaEventSynchronize(end));
    CUDA(cudaEventElapsedTime(&ms, first, end));
    CUDA(cudaEventDestroy(first));
    CUDA(cudaEventDestroy(end));
    CUDA(cudaGraphExecDestroy(executable));
    CUDA(cudaGraphDestroy(graph));
    return ms * 1000.0f / LAUNCHES;
}

int main(void)
{
    acr_ctx_options options = ACR_CTX_OPTIONS_INIT;
    options.backend = "cuda";
    acr_ctx *ctx = NULL;
    if (acr_ctx_create(&ctx, &options) != ACR_OK) {
        printf("no GPU to run on: %s\n", acr_last_error());
        return 0;
    }

    acr_problem problem = ACR_PROBLEM_INIT;
    acr_plan *plan = NULL;
    ACR(acr_problem_parse(&problem, PROBLEM, NULL));
    ACR(acr_plan_create(&plan, ctx, &problem, ACR_ESTIMATE));

    /* The context has retained the device's primary context, the one the CUDA runtime uses too. */
    const size_t bytes = ELEMS * 2;
    void *tensors = NULL, *workspace = NULL;
    cudaStream_t stream;
    CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    CUDA(cudaMalloc(&tensors, 4 * bytes));
    CUDA(cudaMemset(tensors, 0, 4 * bytes));
    if (acr_plan_workspace(plan) > 0)
        CUDA(cudaMalloc(&workspace, acr_plan_workspace(plan)));
    ACR(acr_workspace_init(plan, workspace, acr_plan_workspace(plan), stream));

    char *base = tensors;
    acr_buffers buffers = {
        .size = sizeof buffers, .q = base, .k = base + bytes, .v = base + 2 * bytes, .o = base + 3 * bytes};
    printf("%s\n%s: %.2f us an execution, in a graph of %d\n", acr_ctx_device(ctx), acr_plan_text(plan),
           (double)replay_us(plan, &buffers, workspace, stream), LAUNCHES);

    acr_plan_destroy(plan);
    acr_ctx_destroy(ctx);
    CUDA(cudaFree(workspace));
    CUDA(cudaFree(tensors));
    CUDA(cudaStreamDestroy(stream));
    return 0;
}
